"""Turns a wish for devices into device strings.

`configure` sets devices up before TensorFlow initialises. `resolve` is for the time
after that: it turns a `gpus` argument into strings for devices that exist. `table` says
it in words.
"""

from towers.program import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

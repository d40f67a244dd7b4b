"""Turns the user's choice of devices into device strings.

`configure` sets up devices before TensorFlow initialises. After that, `resolve` turns a
`gpus` argument into strings of existing devices. `table` describes them in words.
"""

from towers.program import lazy

__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

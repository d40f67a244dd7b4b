"""Explains training steps that are not finite, by the first value that is not."""

from towers.program import lazy

# As in `towers`.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

"""Layers that compute only some blocks of a kernel, or of the scores of attention."""

from towers.program import lazy

# As in `towers`.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

"""Explains steps that are not finite: finds where that began."""

from towers.program import lazy

# As in `towers`.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

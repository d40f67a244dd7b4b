"""Checks that a model trains on towers as it does on one device, number by number.

`python -m towers.parity` is the same for the command line, with the flags of
`towers.train`.
"""

from towers.program import lazy

# As in `towers`.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

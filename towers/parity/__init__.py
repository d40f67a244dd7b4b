"""Checks that a model trains on towers as it does on one device, number by number.

`python -m towers.parity` is the same for the command line, with the flags of
`towers.train`.
"""

from towers.parity.check import check_parity
from towers.parity.report import Parity, Row

__all__ = ["Parity", "Row", "check_parity"]

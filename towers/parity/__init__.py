"""Checks that a model trains on towers as it does on one device, number by number.

`python -m towers.parity` is the same for the command line, with the flags of
`towers.train`.
"""

from typing import TYPE_CHECKING

from towers import lazy

if TYPE_CHECKING:
    from towers.parity.check import check_parity
    from towers.parity.report import Parity, Row

__all__ = ["Parity", "Row", "check_parity"]

# As in `towers`.
__getattr__, __dir__ = lazy.attach(
    __name__,
    {
        "Parity": "towers.parity.report",
        "Row": "towers.parity.report",
        "check_parity": "towers.parity.check",
    },
)

"""Reads and checks the flags of towers.train; `Settings` says what they mean."""

from collections.abc import Sequence

from towers.program.flags import command_line
from towers.train import checks
from towers.train.settings import Settings


def read(argv: Sequence[str], doc: str = "") -> Settings:
    """Reads the flags of towers.train, as `command_line.read`, and checks them."""
    return checks.check(command_line.read(Settings, argv, doc))

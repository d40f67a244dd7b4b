"""The flags of towers.parity: its own, and those of towers.train."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from towers.program import commands
from towers.program.flags import command_line
from towers.program.flags.command_line import HostsFlag
from towers.program.flags.table import About, flag
from towers.train import checks, tower_flags
from towers.train.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(HostsFlag, Settings):
    """The flags of towers.parity."""

    parity_steps: int = flag(
        3, "Comparison", "Number of steps to compare.", about=About.MAIN, at_least=1
    )


def read(
    argv: Sequence[str], doc: str, environ: Mapping[str, str] = os.environ
) -> Check:
    """Reads the flags, and checks them; with --hosts, has a launcher start hosts.

    Their program is this one, whose process becomes the launcher.
    """
    check = checks.check_not_mixed(checks.check(command_line.read(Check, argv, doc)))
    tower_flags.check_fixed(check, "towers.parity", finds_free=True)
    if (check.hosts or 1) > 1 and "TOWERS_HOST_RANK" not in environ:
        start = commands.on_hosts(check.hosts, check.num_gpus)
        command = [*start, "-m", "towers.parity", *argv[1:]]
        os.execv(command[0], command)
    return check

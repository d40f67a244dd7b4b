"""The flags of towers.parity: its own, and those of towers.train."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

from towers.program import commands
from towers.program.flags import command_line
from towers.train import checks, tower_flags
from towers.train import flags as train_flags
from towers.train.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check(Settings):
    """What to compare with one device."""

    hosts: int | None = None


command_line.define_hosts()


def read(
    argv: Sequence[str], doc: str, environ: Mapping[str, str] = os.environ
) -> Check:
    """Reads the flags, and checks them; with --hosts, has a launcher start hosts.

    Their program is this one, whose process becomes the launcher.
    """
    ours = command_line.below([command_line.HOSTS])
    train_flags.read_with(ours, argv, doc)
    found = checks.check_not_mixed(checks.check(command_line.settings(Check)))
    tower_flags.check_fixed(found, "towers.parity", finds_free=True)
    if (found.hosts or 1) > 1 and "TOWERS_HOST_RANK" not in environ:
        start = commands.on_hosts(found.hosts, found.num_gpus)
        command = [*start, "-m", "towers.parity", *argv[1:]]
        os.execv(command[0], command)
    return found

"""The flags of towers.find_batch_size: its own, and those of towers.train."""

import dataclasses
from collections.abc import Sequence

from towers.program.commands import check_plot
from towers.program.flags import command_line, table
from towers.program.flags.command_line import HostsFlag, TableFlags
from towers.program.flags.table import About, flag
from towers.train import checks, tower_flags
from towers.train.settings import Settings

# No example is read. But --model_dir is: what an earlier run there has measured of the
# data, and found of the towers.
_IDLE = (
    *table.names(Settings, About.RUN),
    *(*table.names(Settings, About.EXAMPLES), "eval_only"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(TableFlags, HostsFlag, Settings):
    """The flags of towers.find_batch_size."""

    max_batch_size: int | None = flag(
        None,
        "Search",
        "Largest batch to try. Default: no limit.",
        about=About.MAIN,
        at_least=1,
    )
    probe_steps: int = flag(
        5,
        "Each size",
        "Most steps to measure after the warm-up. Two are enough if steps are slow.",
        about=About.MAIN,
        at_least=1,
    )
    memory_limit_mb: int | None = flag(
        None,
        "Each size",
        "Most memory of the process that tries a size, in MB, without a GPU. "
        "Default: its memory at the start, and 9/10 of the free memory.",
        about=About.MAIN,
        at_least=1,
    )

    def for_a_probe(self, batch_size: int) -> list[str]:
        """Returns the flags that the process is to have that tries a batch size."""
        own = "probe_steps", "memory_limit_mb"
        return [
            *self.but(batch_size=batch_size).as_text().splitlines(),
            *(self.as_flag(name) for name in own if getattr(self, name) is not None),
        ]


def read(argv: Sequence[str], doc: str) -> Search:
    """Reads the flags, and checks them, as `towers.train.flags.read` does."""
    search = checks.check(command_line.read(Search, argv, doc))
    tower_flags.check_fixed(search, "towers.find_batch_size", finds_free=True)
    tower_flags.check_whole_batch(search, "towers.find_batch_size")
    check_plot(search.plot, "batch_size.png", "batch_size.svg")
    tower_flags.say_idle(search, _IDLE, "towers.find_batch_size")
    return search


def read_checked(argv: Sequence[str]) -> Search:
    """Reads the flags that `Search.for_a_probe` has made."""
    return command_line.read(Search, argv)

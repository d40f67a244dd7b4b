"""The flags of towers.find_batch_size: its own, and those of towers.train."""

import dataclasses
from collections.abc import Sequence

from absl import flags

from towers.program.commands import check_plot
from towers.program.flags import command_line
from towers.train import checks, tower_flags
from towers.train import flags as train_flags
from towers.train.settings import Settings

_SEARCH = {"module_name": "Search"}
_PROBE = {"module_name": "Each size"}

# No example is read. But --model_dir is: what an earlier run there has measured of the
# data, and found of the towers.
_IDLE = (
    *(*tower_flags.OF_A_RUN, "eval_only", "cache", "shuffle_mb", "ram_budget_mb"),
    *("data_service", "recipe", "randaugment", "group_by_length"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search(Settings):
    """What to train, and which batch sizes to try; flags say what each means."""

    hosts: int | None = None
    max_batch_size: int | None = None
    plot: str | None = None
    json: bool = False
    probe_steps: int = 5
    memory_limit_mb: int | None = None

    def for_a_probe(self, batch_size: int) -> list[str]:
        """Returns the flags that the process is to have that tries a batch size."""
        own = "probe_steps", "memory_limit_mb"
        return [
            *self.but(batch_size=batch_size).as_text().splitlines(),
            *(self.as_flag(name) for name in own if getattr(self, name) is not None),
        ]


flags.DEFINE_integer(
    "max_batch_size",
    Search.max_batch_size,
    "Largest batch to try. Default: no limit.",
    lower_bound=1,
    **_SEARCH,
)
flags.DEFINE_integer(
    "probe_steps",
    Search.probe_steps,
    "Most steps to measure after the warm-up. Two are enough if steps are slow.",
    lower_bound=1,
    **_PROBE,
)
flags.DEFINE_integer(
    "memory_limit_mb",
    Search.memory_limit_mb,
    "Most memory of the process that tries a size, in MB, without a GPU. "
    "Default: its memory at the start, and 9/10 of the free memory.",
    lower_bound=1,
    **_PROBE,
)

command_line.define_output()
command_line.define_hosts()


def read(argv: Sequence[str], doc: str) -> Search:
    """Reads the flags, and checks them, as `towers.train.flags.read` does."""
    own = [each["module_name"] for each in (_SEARCH, _PROBE)]
    ours = command_line.below([*own, command_line.OUTPUT, command_line.HOSTS])
    train_flags.read_with(ours, argv, doc)
    search = checks.check(command_line.settings(Search))
    tower_flags.check_fixed(search, "towers.find_batch_size", finds_free=True)
    tower_flags.check_whole_batch(search, "towers.find_batch_size")
    check_plot(search.plot, "batch_size.png", "batch_size.svg")
    tower_flags.say_idle(search, _IDLE, "towers.find_batch_size")
    return search


def read_checked(argv: Sequence[str]) -> Search:
    """Reads the flags that `Search.for_a_probe` has made."""
    flags.FLAGS(argv)
    return command_line.settings(Search)

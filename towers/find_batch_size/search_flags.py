"""The flags of towers.find_batch_size besides those of towers.train."""

from collections.abc import Sequence

from absl import flags

from towers.program import command_line
from towers.program.commands import check_plot
from towers.train import flags as train_flags

FLAGS = flags.FLAGS
_SEARCH = {"module_name": "Search"}
_PROBE = {"module_name": "Each size"}

flags.DEFINE_integer(
    "max_batch_size",
    None,
    "Largest batch to try. Default: no limit.",
    lower_bound=1,
    **_SEARCH,
)
flags.DEFINE_string(
    "plot", None, "PNG or SVG file to write a chart to (needs matplotlib).", **_SEARCH
)
flags.DEFINE_bool(
    "json", False, "Print one line of JSON instead of a table.", **_SEARCH
)
flags.DEFINE_integer(
    "probe_steps",
    5,
    "Most steps to measure after the warm-up. Two are enough if steps are slow.",
    lower_bound=1,
    **_PROBE,
)
flags.DEFINE_integer(
    "memory_limit_mb",
    None,
    "Most memory of the process that tries a size, in MB, without a GPU. "
    "Default: its memory at the start, and 9/10 of the free memory.",
    lower_bound=1,
    **_PROBE,
)


def read(argv: Sequence[str], doc: str) -> None:
    """Reads the flags, and checks them.

    Args:
        argv: The program's name and its arguments.
        doc: What the program is for.

    Raises:
        ValueError: If a flag is bad, or there is anything but flags.
    """
    ours = {group["module_name"]: list(of(group)) for group in (_SEARCH, _PROBE)}
    rest = command_line.read(
        argv,
        doc,
        {**ours, **train_flags.groups(train_flags.MAIN)},
        {**ours, **train_flags.groups()},
    )
    train_flags.check(rest)
    check_plot(FLAGS.plot, "batch_size.png", "batch_size.svg")


def for_a_probe() -> list[str]:
    """Returns the flags that a probe's process is to have."""
    given = [flag.serialize() for flag in of(_PROBE) if flag.value is not None]
    return [*train_flags.as_text().splitlines(), *given]


def of(group: dict[str, str]) -> list[flags.Flag]:
    """Returns the flags below a heading."""
    return FLAGS.flags_by_module_dict()[group["module_name"]]

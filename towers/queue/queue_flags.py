"""The flags of towers.queue: its own, and those of towers.train."""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence

from absl import flags

from towers.program.commands import check_folder
from towers.program.extras import install_command
from towers.program.flags import command_line
from towers.queue import runs
from towers.queue.runs import Run
from towers.train import checks
from towers.train import flags as train_flags
from towers.train.settings import NAMES, Settings

_QUEUE = {"module_name": "Queue"}


@dataclasses.dataclass(frozen=True)
class QueueOptions:
    """What a queue is asked to do; flags say what each means.

    Attributes:
        runs: What to run, each checked.
    """

    queue_dir: str
    devices: int | None
    runs_per_gpu: int
    ray_tune: bool
    runs: Sequence[Run] = ()


flags.DEFINE_multi_string(
    "sweep",
    None,
    "A flag of training and its values, such as learning_rate=1e-3,1e-2. Where this is "
    "given more than once, each combination of the values is a run.",
    **_QUEUE,
)
flags.DEFINE_string(
    "queue_dir",
    "runs/queue",
    "Folder for runs without a --model_dir, and for the record of what is finished.",
    **_QUEUE,
)
flags.DEFINE_integer(
    "devices",
    None,
    "Number of devices to use: the first of the GPUs or, without a GPU, logical CPUs. "
    "Default: all GPUs that are free; without a GPU, one for each core.",
    lower_bound=1,
    **_QUEUE,
)
flags.DEFINE_integer(
    "runs_per_gpu",
    1,
    "Number of runs to train at once on each device. The runs share a GPU's memory.",
    lower_bound=1,
    **_QUEUE,
)
flags.DEFINE_bool(
    "ray_tune",
    False,
    "Have Ray Tune start the runs, on its cluster or on one started here.",
    **_QUEUE,
)


def read(argv: Sequence[str], doc: str) -> QueueOptions:
    """Reads the command line, and checks the flags of all runs.

    Args:
        argv: The program's name and its arguments: flags, and files of flags.
        doc: What the program is for.

    Raises:
        ValueError: A flag is wrong, of this program or of a run.
        SystemExit: The help was asked for.
    """
    own = command_line.below([_QUEUE["module_name"]])
    shown, every = (
        {**own, **train_flags.groups(names)} for names in (train_flags.MAIN, None)
    )
    with _flags_anywhere():
        _, *files = command_line.read(argv, doc, shown, every)
    names = [field.name for field in dataclasses.fields(QueueOptions)][:-1]
    found = {name: flags.FLAGS[name].value for name in names}
    found["queue_dir"] = os.path.abspath(os.path.expanduser(found["queue_dir"]))
    options = QueueOptions(**found)
    _check_ray(options)
    check_folder("queue_dir", options.queue_dir, "--queue_dir")
    common = [
        flag.serialize() for flag in map(flags.FLAGS.__getitem__, NAMES) if flag.present
    ]
    sweeps = flags.FLAGS["sweep"].value or ()
    asked = [
        _run(source, options.queue_dir)
        for source in runs.sources(files, common, sweeps)
    ]
    runs.check_different(asked)
    return dataclasses.replace(options, runs=asked)


@contextlib.contextmanager
def _flags_anywhere() -> Iterator[None]:
    """Inside, flags may stand behind files."""
    before = flags.FLAGS.is_gnu_getopt()
    flags.FLAGS.set_gnu_getopt(True)
    try:
        yield
    finally:
        flags.FLAGS.set_gnu_getopt(before)


def _check_ray(options: QueueOptions) -> None:
    if options.ray_tune and importlib.util.find_spec("ray") is None:
        raise ValueError(
            "Received --ray_tune, but Ray is not installed; run: "
            f"{install_command('ray')}"
        )


def _run(source: runs.RunSource, queue_dir: str) -> Run:
    """Reads the flags of a run, and checks them as towers.train does."""
    try:
        settings = _read_again(source.flags)
        run = runs.of(source, settings, queue_dir)
        checks.check_model_dir(run.settings)
    except ValueError as error:
        raise ValueError(f"{source.name}: {error}") from error
    return run


def _read_again(argv: Sequence[str]) -> Settings:
    """Reads flags of training, as if there had been no others."""
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
    settings = train_flags.read(["towers.train", *argv], "")
    for flag in command_line.below([_QUEUE["module_name"]])[_QUEUE["module_name"]]:
        if flag.present:
            raise ValueError(
                f"Received --{flag.name} in a file; expected flags of towers train "
                "there, so give it to the queue."
            )
    return settings

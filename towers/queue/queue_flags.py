"""The flags of towers.queue: its own, and those of towers.train."""

import dataclasses
import importlib.util
import os
from collections.abc import Sequence

from towers.program.commands import check_folder
from towers.program.extras import install_command
from towers.program.flags import command_line, old_flags, table
from towers.program.flags.table import About, argument, flag
from towers.queue import runs, search
from towers.queue.runs import Run
from towers.train import checks
from towers.train.settings import NAMES, Settings


@dataclasses.dataclass(frozen=True)
class QueueOptions:
    """What a queue is asked to do; `QueueFlags` say what each means.

    Attributes:
        ray_tune: Whether Ray Tune starts the runs.
        runs: What to run, each checked.
    """

    queue_dir: str
    devices: int | None = None
    runs_per_gpu: int = 1
    ray_tune: bool = False
    scheduler: str | None = None
    runs: Sequence[Run] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueueFlags(Settings):
    """The flags of a queue, and those of all its runs."""

    files: tuple[str, ...] = argument(
        "Files of flags of towers train, such as the flags.txt of a run.", ()
    )
    sweep: tuple[str, ...] | None = flag(
        None,
        "Queue",
        "A flag of training and its values, such as learning_rate=1e-3,1e-2. Where "
        "this is given more than once, each combination of the values is a run.",
        about=About.MAIN,
        repeated=True,
    )
    queue_dir: str = flag(
        "runs/queue",
        "Queue",
        "Folder for runs without a --model_dir, and for the record of what is "
        "finished.",
        about=About.MAIN,
    )
    devices: int | None = flag(
        None,
        "Queue",
        "Number of devices to use: the first of the GPUs or, without a GPU, logical "
        "CPUs. Default: all GPUs that are free; without a GPU, one for each core.",
        about=About.MAIN,
        at_least=1,
    )
    runs_per_gpu: int = flag(
        1,
        "Queue",
        "Number of runs to train at once on each device. The runs share a GPU's "
        "memory.",
        about=About.MAIN,
        at_least=1,
    )
    ray_tune: bool | None = flag(
        None,
        "Queue",
        "Have Ray Tune start the runs, on its cluster or on one started here. Default: "
        "where Ray is installed.",
        about=About.MAIN,
    )
    scheduler: str | None = flag(
        None,
        "Queue",
        "asha:METRIC, such as asha:val_loss or asha:max:val_f1: Ray Tune stops runs "
        "early whose metric, at the ends of epochs, is worse than that of most others.",
        about=About.MAIN,
    )
    search: str = flag(
        "grid",
        "Queue",
        "grid: train each combination of the sweeps' values. random:20: train 20 that "
        "Ray Tune draws; a sweep may then be a distribution, such as "
        "learning_rate=loguniform:1e-5:1e-1.",
        about=About.MAIN,
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
    asked, given = command_line.read_given(QueueFlags, argv, doc)
    samples = search.samples(asked.search)
    options = QueueOptions(
        queue_dir=os.path.abspath(os.path.expanduser(asked.queue_dir)),
        devices=asked.devices,
        runs_per_gpu=asked.runs_per_gpu,
        ray_tune=_is_on_ray(asked, samples),
        scheduler=asked.scheduler,
    )
    if options.scheduler is not None:
        search.metric(options.scheduler)
    check_folder("queue_dir", options.queue_dir, "--queue_dir")
    of_runs = {*NAMES, *old_flags.NAMES}
    common = [text for name, text in given.items() if name in of_runs]
    wanted = [
        _run(source, options.queue_dir)
        for source in runs.sources(asked.files, common, asked.sweep or (), samples)
    ]
    runs.check_different(wanted)
    return dataclasses.replace(options, runs=wanted)


def _is_on_ray(asked: QueueFlags, samples: int | None) -> bool:
    """Tells whether Ray Tune starts the runs.

    Args:
        asked: The flags.
        samples: How many combinations Ray Tune draws; `None` for all.

    Raises:
        ValueError: A flag needs Ray, which is not installed, or not wanted.
    """
    # Tune needs pandas, which Ray alone does not bring.
    is_here = all(map(importlib.util.find_spec, ("ray", "pandas")))
    needed = {
        "ray_tune": asked.ray_tune,
        "scheduler": asked.scheduler is not None,
        "search": samples is not None,
    }
    for name in [name for name, needs in needed.items() if needs]:
        given = asked.as_flag(name)
        if not is_here:
            raise ValueError(
                f"Received {given}, but Ray is not installed; run: "
                f"{install_command('ray')}"
            )
        if asked.ray_tune is False:
            raise ValueError(
                f"Received {given} with --noray_tune; expected one of them, as Ray "
                "Tune does that."
            )
    return is_here if asked.ray_tune is None else asked.ray_tune


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
    asked, given = command_line.read_given(QueueFlags, ["towers.train", *argv])
    for name in table.fields(QueueFlags):
        if name not in NAMES and name in given:
            raise ValueError(
                f"Received --{name} in a file; expected flags of towers train there, "
                "so give it to the queue."
            )
    return checks.check(Settings(**{name: getattr(asked, name) for name in NAMES}))

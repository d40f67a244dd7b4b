"""The runs of a queue: what each trains, and what its name is."""

import csv
import dataclasses
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from towers.program.flags import old_flags
from towers.program.flags.suggestions import unknown_flag
from towers.queue import search
from towers.train import tower_flags
from towers.train.settings import NAMES, Settings, is_given

# What a queue decides for each run, or what it would do each time it is started.
_OF_THE_QUEUE = {
    "clean": "started again, it continues; remove the runs' folders to start over",
    "eval_only": "it trains; evaluate one run at a time by towers train",
    "checkpoint": "its runs continue from their last checkpoints",
    "gpu_indices": "it gives each run its GPUs; give --num_gpus for how many, and "
    "CUDA_VISIBLE_DEVICES for those that it may use",
    "share_gpus": "it gives each run its GPUs; give --num_gpus for how many",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of towers.train.

    Attributes:
        name: What it is called here.
        settings: What it trains, with its model_dir and number of GPUs.
    """

    name: str
    settings: Settings

    @property
    def model_dir(self) -> str:
        """Where everything is written."""
        return self.settings.absolute_model_dir

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.settings.max_gpus or self.settings.num_gpus

    @property
    def log(self) -> str:
        """The file of its output."""
        return os.path.join(self.model_dir, "output.log")


@dataclasses.dataclass(frozen=True)
class RunSource:
    """Where a run comes from.

    Attributes:
        name: What it is called.
        flags: Its flags, as they are given.
    """

    name: str
    flags: Sequence[str]


def sources(
    files: Sequence[str],
    flags: Sequence[str],
    sweeps: Sequence[str],
    samples: int | None = None,
) -> Iterator[RunSource]:
    """Yields the runs of each file, for each combination of the values of a sweep.

    Args:
        files: Files of flags.
        flags: Flags of all runs, which count more than those of the files.
        sweeps: Each a flag and its values, such as "learning_rate=1e-3,1e-2".
        samples: How many combinations to draw; `None` for all of them.

    Raises:
        ValueError: There is nothing to run, or a sweep is not understood.
    """
    if not (files or sweeps):
        raise ValueError(
            "Received no runs; expected files of flags, such as runs/*.flags, or "
            "--sweep, such as --sweep learning_rate=1e-3,1e-2."
        )
    read = [_read(text) for text in sweeps]
    names = [name for name, _ in read]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Received --sweep {name}= {names.count(name)} times; expected all of "
                f"its values in one, such as --sweep {name}=A,B."
            )
    if samples is not None:
        from towers.queue.on_ray import draws  # imports Ray

        combinations = draws.draw([values for _, values in read], samples)
    else:
        _check_no_distribution(read)
        combinations = [*itertools.product(*(values for _, values in read))]
    for file, values in itertools.product(files or [None], combinations):
        chosen = [f"{name}={value}" for name, value in zip(names, values, strict=True)]
        parts = [_name(file)] if file else []
        yield RunSource(
            as_path(",".join([*parts, *chosen])),
            [
                *([f"--flagfile={file}"] if file else []),
                *flags,
                *(f"--{each}" for each in chosen),
            ],
        )


def of(source: RunSource, settings: Settings, queue_dir: str) -> Run:
    """Makes a run of its settings.

    Args:
        source: Where it comes from.
        settings: As they were read.
        queue_dir: Where its model_dir is, unless it says otherwise.

    Raises:
        ValueError: A flag is not for a queue, or --split_ratios are not for its towers.
    """
    for name, why in _OF_THE_QUEUE.items():
        if is_given(settings, name):
            raise ValueError(
                f"Received {settings.as_flag(name)} for a queue; expected none, as "
                f"{why}."
            )
    tower_flags.check_fixed(settings, "a queue")
    logical = settings.stages * len(settings.split_ratios or (1,))
    settings = settings.but(
        num_gpus=settings.num_gpus or -(-logical // settings.gpu_split),
        model_dir=settings.model_dir or os.path.join(queue_dir, source.name),
    )
    logical = settings.num_gpus * settings.gpu_split
    tower_flags.check_ratios(settings, logical // settings.stages)
    return Run(source.name, settings)


def check_different(runs: Sequence[Run]) -> None:
    """Checks that each run has a model_dir of its own.

    Raises:
        ValueError: Two have the same one.
    """
    seen: dict[str, Run] = {}
    for run in runs:
        path = os.path.realpath(run.model_dir)
        if path in seen:
            raise ValueError(
                f"Received two runs, {seen[path].name} and {run.name}, whose model_dir "
                f"is {run.model_dir}; expected one for each, so give each file a "
                "--model_dir of its own, or leave it out where there is a sweep."
            )
        seen[path] = run


def differing(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the flags by which runs differ, apart from where they go."""
    return [
        name
        for name in NAMES
        if name != "model_dir"
        and len({str(getattr(run.settings, name)) for run in runs}) > 1
    ]


def as_path(text: str) -> str:
    """Returns a text as the name of a folder."""
    return "".join(c if c.isalnum() or c in "-.,=_" else "_" for c in text)


def _check_no_distribution(sweeps):
    for name, values in sweeps:
        if search.bounds(values) is not None:
            raise ValueError(
                f"Received --sweep {name}={values[0]}, a distribution; expected "
                "--search=random:20 as well, for 20 runs, or values."
            )


def _name(file: str) -> str:
    path = Path(os.path.abspath(file))
    # That is what towers.train calls it, in the model_dir of each run.
    return path.parent.name if path.name == "flags.txt" else path.stem


def _read(text: str) -> tuple[str, list[str]]:
    """Reads a flag and its values; one with commas stands in quotes."""
    name, _, values = text.removeprefix("--").partition("=")
    if name and name not in (*NAMES, *old_flags.NAMES):
        raise ValueError(unknown_flag(name, NAMES))
    if name == "model_dir" or name in _OF_THE_QUEUE:
        why = _OF_THE_QUEUE.get(name, "each run has one of its own")
        raise ValueError(f"Received --sweep {text}; expected another flag, as {why}.")
    (found,) = [*csv.reader([values])] or [[]]
    if not (name and found and all(found)):
        raise ValueError(
            f"Received --sweep {text}; expected a flag and its values, such as "
            "--sweep learning_rate=1e-3,1e-2."
        )
    return name, found

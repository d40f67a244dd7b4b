"""The arguments of towers.predict: files, and devices as of towers.train."""

import csv
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, Literal

from towers.models import spec
from towers.program import object_store, small_file
from towers.program.commands import check_folder
from towers.program.features import feature
from towers.program.flags import command_line, table
from towers.program.flags.table import argument, flag
from towers.train import checks, tower_flags
from towers.train.settings import ARCHITECTURE, PREPROCESSING, Settings

# Files that a run writes, without which there is nothing to predict with.
FILES = {"last": "model.keras", "best": "best.keras"}
# Of the devices of towers.train, those that do not come and go.
_DEVICES = ("num_gpus", "gpu_indices", "gpu_split", "gpu_memory")
_DEVICES += ("soft_placement", "log_device_placement")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The arguments and flags that name a model of a run."""

    model_dir: str = argument("Folder of a run of towers train.")
    checkpoint: Literal[*FILES] = flag(
        "last",
        "Flags",
        "Which model of the run: last is model.keras, or the newest checkpoint of a "
        "run that has not ended; best is best.keras.",
    )
    model: str | None = flag(
        None,
        "Flags",
        "The Python file of the run's --model, as FILE.py or FILE.py:FUNCTION. It is "
        "needed if it defines preprocess, or classes of the model. A run folder names "
        "it, but never has it run.",
    )

    @functools.cached_property
    def local_dir(self) -> str:
        """The folder of the run; of an address, a copy that is fetched now."""
        if object_store.scheme(self.model_dir):
            return feature("lifecycle.remote_run").fetched(self.model_dir)
        return self.model_dir


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictOptions(ModelOptions, table.part_of(Settings, _DEVICES)):
    """The arguments and flags of towers.predict."""

    # It stands here again to come before FILES on the command line.
    model_dir: str = argument("Folder of a run of towers train.")
    files: tuple[str, ...] = argument(
        "Pictures, folders of pictures, tables, texts or arrays to predict for."
    )
    output: str | None = flag(
        None, "Flags", "CSV file to write to. Default: standard output."
    )
    probabilities: bool = flag(
        False,
        "Flags",
        "Write a column for each class with its probability. Default: that of the "
        "second of two classes, else that of the predicted class.",
    )
    keep_columns: str = flag(
        "",
        "Flags",
        "Columns of the tables to copy into the output, such as id,name.",
    )
    batch_size: int = flag(
        64, "Flags", "Number of examples in a batch, for all towers.", at_least=1
    )

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """The names in --keep_columns; quotes are as in CSV."""
        row = next(csv.reader([self.keep_columns]), [])
        return tuple(name.strip() for name in row)

    @property
    def settings(self) -> Settings:
        """The settings of a run on the devices."""
        given = {name: getattr(self, name) for name in (*_DEVICES, "batch_size")}
        return Settings(**given, dataset="digits")


def read(argv: Sequence[str], doc: str) -> PredictOptions:
    """Reads the arguments.

    Args:
        argv: The program's name and its arguments.
        doc: Description of the program.

    Raises:
        ValueError: An argument is missing, unknown or bad.
    """
    options = command_line.read(PredictOptions, argv, doc)
    check_model(options)
    _check_files(options.files)
    if (
        options.output is None
        and preprocessing_of(options.local_dir).get("task") == "segmentation"
    ):
        raise ValueError(
            "This run's model makes masks, which are files; expected --output, such as "
            "--output=masks.csv, which names them and the folder masks."
        )
    _check_kept(options.kept_columns)
    if options.output:
        _check_output(options.output, options.files)
    tower_flags.check_fixed(options.settings, "towers.predict", finds_free=True)
    checks.check(options.settings)
    return options


def check_model(options: ModelOptions) -> None:
    """Checks that the model is there, and the file that --model names.

    Raises:
        ValueError: If it is not.
    """
    if options.model is not None:
        if not spec.is_user_file(options.model):
            raise ValueError(
                f"Received --model={options.model}; expected the Python file that the "
                "run was trained with, such as --model=my_model.py."
            )
        spec.check(options.model)
    names = [FILES[options.checkpoint]]
    if options.checkpoint == "last":
        names.append(ARCHITECTURE)
    if not any(os.path.isfile(os.path.join(options.local_dir, name)) for name in names):
        ended = "that has ended" if options.checkpoint == "best" else "that has begun"
        found = os.path.isdir(options.local_dir)
        lacks = f"has no {names[0]}" if found else "does not exist"
        raise ValueError(
            f"Received {options.model_dir}, which {lacks}; expected the "
            f"model_dir of a run of towers train {ended}."
        )


def preprocessing_of(model_dir: str) -> dict[str, Any]:
    """Returns what preprocessing.json has; nothing if that is said later to be bad."""
    try:
        return small_file.read_json(os.path.join(model_dir, PREPROCESSING), dict)
    except (FileNotFoundError, small_file.FileError):
        return {}


def _check_kept(names):
    if wrong := [name for name in names if name in ("", "file", "row")]:
        raise ValueError(
            f"Received --keep_columns={','.join(names)}; expected names of columns, "
            f"other than file and row, which predictions have, so leave out "
            f"{wrong[0]!r}."
        )
    if len({*names}) < len(names):
        raise ValueError(
            f"Received --keep_columns={','.join(names)}; expected each column once."
        )


def _check_files(files):
    missing = [file for file in files if not os.path.exists(file)]
    if missing:
        raise ValueError(f"There is no file {missing[0]}; correct its name.")


def _check_output(path, files):
    if object_store.scheme(path):
        return
    if os.path.isdir(path):
        raise ValueError(
            f"Received --output={path}, which is a folder; expected a file, such as "
            f"--output={os.path.join(path, 'predictions.csv')}."
        )
    if os.path.exists(path) and any(os.path.samefile(path, file) for file in files):
        raise ValueError(
            f"Received --output={path}, which is to be read; expected another file, as "
            "predictions would take its place."
        )
    # Devices and pipes are written to, and nothing is made in their folder.
    if not os.path.exists(path) or os.path.isfile(path):
        folder = os.path.dirname(os.path.realpath(path))
        check_folder("folder", folder, "--output")

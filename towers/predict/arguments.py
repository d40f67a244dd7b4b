"""The arguments of towers.predict: files, and devices as of towers.train."""

import argparse
import csv
import dataclasses
import os
import typing
from collections.abc import Sequence
from typing import Any

from towers.models import spec
from towers.program import small_file
from towers.program.commands import check_folder
from towers.program.flags.arguments import Parser
from towers.train import checks, flags
from towers.train.settings import ARCHITECTURE, PREPROCESSING, Settings

# Files that a run writes, without which there is nothing to predict with.
FILES = {"last": "model.keras", "best": "best.keras"}


def read(argv: Sequence[str], doc: str) -> argparse.Namespace:
    """Reads the arguments, without the program's name; `settings` has the devices.

    Raises:
        ValueError: If one is missing, unknown or bad.
    """
    parser = Parser("towers.predict", doc)
    add_model(parser)
    parser.add_argument(
        "files",
        nargs="+",
        help="Pictures, folders of pictures, tables, texts or arrays to predict for.",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="CSV file to write to. Default: standard output.",
    )
    parser.add_argument(
        "--probabilities",
        action="store_true",
        help="Write a column for each class with its probability. Default: that of the "
        "second of two classes, else that of the predicted class.",
    )
    parser.add_argument(
        "--keep_columns",
        type=_names,
        default=(),
        metavar="NAME,NAME",
        help="Columns of the tables to copy into the output, such as id.",
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=64,
        help="Number of examples in a batch, for all towers. Default: 64.",
    )
    devices = parser.add_argument_group("Devices")
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    names = [*flags.HELPS["Devices"]]
    for name in names:
        devices.add_argument(
            f"--{name}",
            help=flags.HELPS["Devices"][name],
            default=fields[name].default,
            **_kind(fields[name].type, name),
        )
    options = parser.parse_args(argv)
    check_model(options)
    _check_files(options.files)
    if (
        options.output is None
        and preprocessing_of(options.model_dir).get("task") == "segmentation"
    ):
        raise ValueError(
            "This run's model makes masks, which are files; expected --output, such as "
            "--output=masks.csv, which names them and the folder masks."
        )
    _check_kept(options.keep_columns)
    if options.output:
        _check_output(options.output, options.files)
    given = {name: getattr(options, name) for name in (*names, "batch_size")}
    options.settings = checks.check(Settings(**given, dataset="digits"))
    return options


def add_model(parser: Parser) -> None:
    """Adds the arguments that name a model."""
    parser.add_argument("model_dir", help="Folder of a run of towers train.")
    parser.add_argument(
        "--checkpoint",
        choices=FILES,
        default="last",
        help="Which model of the run: last is model.keras, or the newest checkpoint of "
        "a run that has not ended; best is best.keras. Default: last.",
    )
    parser.add_argument(
        "--model",
        metavar="FILE",
        help="The Python file of the run's --model, as FILE.py or FILE.py:FUNCTION. It "
        "is needed if it defines preprocess, or classes of the model. A run folder "
        "names it, but never has it run.",
    )


def check_model(options: argparse.Namespace) -> None:
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
    if not any(os.path.isfile(os.path.join(options.model_dir, name)) for name in names):
        ended = "that has ended" if options.checkpoint == "best" else "that has begun"
        raise ValueError(
            f"Received {options.model_dir}, which has no {names[0]}; expected the "
            f"model_dir of a run of towers train {ended}."
        )


def _names(text):
    """Names of columns, with commas between; quotes are as in CSV."""
    return tuple(name.strip() for name in next(csv.reader([text]), []))


def _kind(annotation, name):
    """How argparse is to read a flag of some type."""
    kind = (typing.get_args(annotation) or (annotation,))[0]  # or None
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if kind is int:
        return {"type": int, "metavar": "N"}
    return {"type": lambda text: tuple(text.split(",")), "metavar": "N,N"}


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

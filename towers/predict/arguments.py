"""The arguments of towers.predict: files, and devices as of towers.train."""

import argparse
import dataclasses
import json
import os
import typing
from collections.abc import Sequence

from towers.program.commands import check_folder
from towers.program.flags.arguments import Parser
from towers.train import checks, flags
from towers.train.settings import ARCHITECTURE, PREPROCESSING, Settings

# These are of towers that come and go while a run trains.
_OF_TRAINING = "max_gpus", "share_gpus", "join_seconds"
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
        "--batch_size",
        type=int,
        default=64,
        help="Number of examples in a batch, for all towers. Default: 64.",
    )
    devices = parser.add_argument_group("Devices")
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    names = [name for name in flags.HELPS["Devices"] if name not in _OF_TRAINING]
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
    if options.output is None and _task(options.model_dir) == "segmentation":
        raise ValueError(
            "This run's model makes masks, which are files; expected --output, such as "
            "--output=masks.csv, which names them and the folder masks."
        )
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


def check_model(options: argparse.Namespace) -> None:
    """Checks that the model is there.

    Raises:
        ValueError: If it is not.
    """
    names = [FILES[options.checkpoint]]
    if options.checkpoint == "last":
        names.append(ARCHITECTURE)
    if not any(os.path.isfile(os.path.join(options.model_dir, name)) for name in names):
        ended = "that has ended" if options.checkpoint == "best" else "that has begun"
        raise ValueError(
            f"Received {options.model_dir}, which has no {names[0]}; expected the "
            f"model_dir of a run of towers train {ended}."
        )


def _kind(annotation, name):
    """How argparse is to read a flag of some type."""
    kinds = typing.get_args(annotation) or (annotation,)  # or None
    if kinds[0] is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(kinds[0]) is tuple:
        return {"type": lambda text: tuple(text.split(",")), "metavar": "N,N"}
    return {"type": kinds[0], "metavar": {int: "N", float: "X"}[kinds[0]]}


def _task(model_dir):
    """The task of a run; `None` if it cannot be read, which is said later."""
    try:
        with open(os.path.join(model_dir, PREPROCESSING), encoding="utf-8") as file:
            return json.load(file)["task"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


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

"""Reads the arguments of towers.input_pipeline.convert."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from towers.input_pipeline import specs
from towers.input_pipeline.choices import RAW
from towers.input_pipeline.data_flags import BadRecordsFlag, DataFlags
from towers.program.commands import check_folder, read_image_size
from towers.program.flags import command_line
from towers.program.flags.table import argument, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(DataFlags, BadRecordsFlag):
    """The arguments and flags of towers.input_pipeline.convert."""

    source: str = argument("Data set to convert, as --dataset of towers train.")
    target: str = argument("Where to write it: tfrecord:FOLDER.")
    shards: int = flag(8, "Flags", "Number of files for each split.", at_least=1)
    image_size: str | None = flag(
        None,
        "Flags",
        "Size to resize images to: N or HxW pixels. Default: no resizing.",
    )
    raw: Literal[*RAW] = flag(
        "auto",
        "Flags",
        "Whether to write pixels instead of encoded images. auto: for small images of "
        "one size.",
    )
    overwrite: bool = flag(False, "Flags", "Remove an earlier conversion first.")
    data_dir: str = flag(
        "data", "Flags", "Folder where digits and tfds: store their files."
    )

    @property
    def folder(self) -> str:
        """The folder to write to."""
        return self.target.partition(":")[2]


def read(argv: Sequence[str], doc: str) -> ConvertOptions:
    """Reads the command line, as `command_line.read`, and checks it.

    Raises:
        ValueError: Anything is bad.
    """
    options = command_line.read(ConvertOptions, argv, doc)
    kind, _, folder = options.target.partition(":")
    if kind != "tfrecord" or not folder or any(sign in folder for sign in "*?["):
        raise ValueError(f"Received {options.target}; expected tfrecord:FOLDER.")
    specs.check(options.source)
    check_folder("folder", folder, "folder")
    read_image_size(options.image_size)
    _ = options.max_bad_records
    return options

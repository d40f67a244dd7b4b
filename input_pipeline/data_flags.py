"""Flags of several programs that describe the files of a data set."""

import dataclasses
import re
from typing import Any, Literal

from towers.input_pipeline.choices import CACHES, DECODE_ON, MISSING
from towers.program.extras import import_extra
from towers.program.flags import table
from towers.program.flags.table import About, flag

MAX_BAD_RECORDS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFlags:
    """Flags that describe the files of a data set: arguments of `open_source`."""

    num_classes: int | None = flag(
        None,
        "Data",
        "Number of classes, if labels are read from files. Default: counted from the "
        "labels.",
        about=About.MAIN,
        at_least=1,
    )
    eval_fraction: float | None = flag(
        None,
        "Data",
        "Fraction of the data to hold out for validation, unless a file, folder or "
        "array is named test or the like. Default: 0.1.",
        about=About.MAIN,
        defined_by=("train_data",),
        at_least=0,
        below=1,
    )
    feature_columns: tuple[str, ...] | None = flag(
        None,
        "Data",
        "Columns of a table to train on, such as age,fare. Default: all except the "
        "label; of texts, those that repeat.",
        about=About.MAIN,
        defined_by=("train_data",),
    )
    missing: Literal[*MISSING] | None = flag(
        None,
        "Data",
        "Value of a missing number in csv:, parquet:, npz: and npy:, in training and "
        "prediction: mean or median of its column, and a further column says so; "
        "fail: its row is bad. Default: mean.",
        defined_by=("train_data",),
    )
    label_column: str | None = flag(
        None,
        "Data",
        "Column of a table, or field of a record, with the label; in conll:, the "
        "number of the tags' column. Default: label, class or target, else the last "
        "one; of a record, image/class/label.",
        about=About.MAIN,
        defined_by=("train_data",),
    )
    text_column: str | None = flag(
        None,
        "Data",
        "Column of csv: and parquet: with text to train on. In conll:, the number of "
        "the words' column. Default: train on the columns of numbers; in conll:, the "
        "first column, or the second of CoNLL-U.",
        defined_by=("train_data",),
    )
    tokenizer: str | None = flag(
        None,
        "Data",
        "Tokenizer of text: bytes, sentencepiece:FILE, wordpiece:FILE, words:FILE, or "
        "hf:FILE, a tokenizer.json of Hugging Face. Default: bytes; in conll:, the "
        "words of the training data.",
        about=About.MAIN,
        defined_by=("train_data",),
    )
    sequence_length: int | None = flag(
        None,
        "Data",
        "Number of tokens in a row of text. Default: 128.",
        about=About.MAIN,
        at_least=1,
        defined_by=("train_data",),
    )
    packing: bool | None = flag(
        None,
        "Data",
        "Join the documents of text: into rows without padding. --nopacking: a row "
        "has one document, or a part of it. Default: packing.",
        defined_by=("train_data",),
    )
    image_column: str | None = flag(
        None,
        "Data",
        "Column of the image in parquet:, or its field in tfrecord: and "
        "array_record:. Default: image; of a record, image/encoded.",
        defined_by=("train_data",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadRecordsFlag:
    """The flag --bad_records, and its parts."""

    bad_records: str = flag(
        "fail",
        "Data",
        "What to do with records that cannot be read, decoded or trained on. fail: "
        "stop, and name the first one. skip, or skip:2000: first list them in "
        "bad_records.json, and leave them out, up to 100 or 2000.",
        about=About.MAIN,
        defined_by=("train_data",),
    )

    @property
    def skips_bad(self) -> bool:
        """Whether bad records are left out."""
        return self.bad_records.partition(":")[0] == "skip"

    @property
    def max_bad_records(self) -> int:
        """The largest number of records that may be left out of a data set.

        Raises:
            ValueError: --bad_records has another form.
        """
        match = re.fullmatch(r"fail|skip(?::(\d{1,12}))?", self.bad_records)
        if match is None:
            raise ValueError(
                f"Received --bad_records={self.bad_records}; expected fail, skip, or "
                "skip:2000 for the most records to leave out."
            )
        return int(match[1] or MAX_BAD_RECORDS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFlag:
    """The flag --cache, and its parts."""

    cache: str = flag(
        "auto",
        "Input pipeline",
        "Where to keep examples: auto, memory, devices, none, disk:DIR or auto:DIR. "
        "devices (towers train): training examples on each tower's device; for one "
        "host, without augmentation but --mix. auto: in "
        "memory if a quarter of the free memory is enough, else in the folder DIR if "
        "it is given; with --deterministic, in memory up to 1 GB. Images are kept as "
        "pixels if they have one size, or if --recipe=none or cifar resizes them to "
        "one (in memory for more than one epoch only). Others are kept as encoded "
        "files, in memory.",
        about=About.EXAMPLES | About.HOST,
        defined_by=("train_data",),
    )

    @property
    def cache_kind(self) -> str:
        """The first part of --cache: one of `CACHES`, or "devices".

        Raises:
            ValueError: --cache has another form.
        """
        kind, colon, folder = self.cache.partition(":")
        kinds = (*CACHES, "devices")
        wrong = kind not in kinds or (colon and kind not in ("auto", "disk"))
        if wrong or bool(colon) != bool(folder) or (kind == "disk" and not folder):
            raise ValueError(
                f"Received --cache={self.cache}; expected one of {', '.join(kinds)}, "
                "and disk or auto with a folder, such as disk:FOLDER."
            )
        return kind

    @property
    def cache_dir(self) -> str | None:
        """The folder where examples are kept, if it is given."""
        return self.cache.partition(":")[2] or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeFlag:
    """The flag --decode_on, of programs that read images."""

    decode_on: Literal[*DECODE_ON] = flag(
        "cpu",
        "Input pipeline",
        "Device that decodes, crops and resizes JPEG files. gpu: by DALI.",
        about=About.HOST | About.EXAMPLES,
        defined_by=("train_data",),
    )


# Kinds of data sets that may have JPEG files.
_WITH_JPEG = ("array_record", "folder", "parquet", "tfds", "tfrecord")


def check_decoding(options: Any) -> None:
    """Checks that JPEG files can be decoded where --decode_on says.

    Args:
        options: has the flags as its attributes.

    Raises:
        ValueError: they cannot.
    """
    if options.decode_on == "cpu":
        return
    for name, why in (
        ("randaugment", "which changes images one by one on the CPU"),
        ("data_service", "whose workers decode themselves"),
    ):
        if getattr(options, name) is not None:
            raise ValueError(
                f"Received --decode_on=gpu with --{name}, {why}; expected one of the "
                "two."
            )
    if options.dataset.partition(":")[0] not in _WITH_JPEG:
        raise ValueError(
            f"Received --decode_on=gpu for {options.dataset}; expected it only for "
            f"{', '.join(f'{kind}:' for kind in _WITH_JPEG)}, so leave it out."
        )
    import_extra("nvidia.dali", "dali")


NAMES = tuple(table.fields(DataFlags))


def given(options: DataFlags) -> dict[str, Any]:
    """Returns the flags that were given, as arguments of ``open_source``."""
    values = {name: getattr(options, name) for name in NAMES}
    return {name: value for name, value in values.items() if value is not None}

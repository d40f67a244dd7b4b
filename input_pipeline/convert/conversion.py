"""Writes all splits of a source as TFRecord files."""

import os
from typing import Any

from towers.input_pipeline.choices import BAD_RECORDS, RAW
from towers.input_pipeline.convert import folder as folders
from towers.input_pipeline.convert import serialize
from towers.input_pipeline.convert.writer import Progress, Writer
from towers.input_pipeline.pipeline.scaling import columns_merged_by_float32
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.checks import blame_records
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.examples.tfrecord import INFO
from towers.program import whole_file, words


def convert(
    source: Source,
    folder: str,
    *,
    shards: int = 8,
    image_size: tuple[int, int] | None = None,
    raw: str = "auto",
    overwrite: bool = False,
    bad_records: str = "fail",
    max_bad_records: int = 100,
) -> dict[str, Any]:
    """Writes all splits of a source as TFRecord files.

    Args:
        source: a source of images, or of rows of numbers.
        folder: the folder for the files; new, empty, or of an earlier call.
        shards: number of files for each split.
        image_size: (H, W) to resize images to; None keeps them as they are.
        raw: "true" writes pixels, "false" encoded images, "auto" pixels if all images
            have one size and take no more than 64 KB.
        overwrite: removes the files of an earlier call.
        bad_records: "fail" ends at the first one. "skip" looks at all records first,
            lists the bad ones in bad_records.json, and leaves them out; `source` must
            be opened with ``skip_bad``.
        max_bad_records: more bad records than that are an error in any case.

    Returns:
        The contents of dataset_info.json beside the files.

    Raises:
        ValueError: an argument, the folder or a record is bad.
    """
    _check(source, shards, raw, bad_records)
    source.prepare()
    bad = None
    if bad_records == "skip":
        bad = quarantine.inspect(source, [*source.splits], max_bad_records)
        source = source.without(bad.bad, bad.splits)
    with blame_records(source):
        form = serialize.choose_form(source, image_size, raw)
        manifest = folders.describe(source, shards, form)
        _say_what_is_lost(source)
    with folders.alone(folder):
        folders.prepare(source, folder, manifest, overwrite)
        if bad:
            path = os.path.join(folder, folders.BAD_RECORDS_FILE)
            quarantine.write([bad], path)
            left_out = words.count(len(bad), "bad record")
            print(f"{left_out} left out; {path} lists them all.")
        splits = [
            folders.SplitFiles(folder, split, size, shards)
            for split, size in manifest["splits"].items()
        ]
        examples = sum(manifest["splits"].values())
        with Progress(examples) as progress, blame_records(source):
            for files in splits:
                Writer(source, files, form, progress).run()
        info = folders.info(source, form, splits)
        whole_file.write_json(os.path.join(folder, INFO), info)
    return info


def _say_what_is_lost(source: Source) -> None:
    """Reports columns whose numbers become equal when they are written."""
    if source.input_kind != "row" or not source.splits.get("train"):
        return
    if merged := columns_merged_by_float32(source, scaled=False)[0]:
        print(
            "TFRecord files have float32, which cannot tell most of the numbers apart "
            f"in {', '.join(map(repr, merged))}; take a number near their mean off "
            "them first, or train on the table itself."
        )


def _check(source: Source, shards: int, raw: str, bad_records: str) -> None:
    if source.input_kind == "tokens":
        raise ValueError(
            f"{source.name} is text, which training reads as fast as it is: expected "
            "images or rows of numbers, so train on it"
        )
    if bad_records not in BAD_RECORDS:
        raise ValueError(
            f"received bad_records={bad_records!r}: expected one of "
            f"{', '.join(BAD_RECORDS)}"
        )
    if shards < 1 or raw not in RAW:
        raise ValueError(
            f"received shards={shards} and raw={raw!r}: expected at least 1, and one "
            f"of {', '.join(RAW)}"
        )

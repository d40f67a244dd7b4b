"""Manages the folder of a conversion: its files, and the notes beside them."""

import contextlib
import datetime
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.input_pipeline import json_file
from towers.input_pipeline.convert import serialize
from towers.input_pipeline.sources import Source
from towers.input_pipeline.sources.examples.tfrecord import CONVERTER, INFO
from towers.program import locks, whole_file
from towers.program.progress import Progress

BAD_RECORDS_FILE = "bad_records.json"
PROGRAM = "towers.input_pipeline.convert"
READ_AT_ONCE = 1024
_MANIFEST = ".convert.json"
_LOCK = ".convert.lock"
_UNFINISHED = ".unfinished"
_FILES_TO_LOOK_AT = 1000


class SplitFiles:
    """The files of a split, none of which is empty.

    Attributes:
        split: the name of the split.
        paths: the paths of the files.
        bounds: the first record of each file, and the end.
    """

    def __init__(self, folder: str, split: str, size: int, shards: int):
        self.split, shards = split, max(min(shards, size), 1)
        self.paths = [
            os.path.join(folder, f"{split}-{shard:05}-of-{shards:05}.tfrecord")
            for shard in range(shards)
        ]
        self.bounds = [shard * size // shards for shard in range(shards + 1)]

    def count(self, shard: int) -> int:
        """Returns the number of records of a file."""
        return self.bounds[shard + 1] - self.bounds[shard]


def until_whole(path: str) -> str:
    """Returns the path that a file has until it is whole."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}{_UNFINISHED}")


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """A context in which no other conversion writes into a folder, which is created.

    Only this machine's file systems have locks.

    Raises:
        ValueError: Another conversion writes there.
        OSError: The folder cannot be created or written to.
    """
    with contextlib.ExitStack() as stack:
        if "://" not in folder:
            os.makedirs(folder, exist_ok=True)
            try:
                stack.enter_context(locks.taken(os.path.join(folder, _LOCK)))
            except BlockingIOError as error:
                raise ValueError(
                    f"Another conversion writes into {folder}; expected one at a time, "
                    "so wait for its end, or choose another folder"
                ) from error
        yield


def describe(source: Source, shards: int, form: serialize.Form) -> dict[str, Any]:
    """Describes the facts that a call must share with the one that it continues."""
    sizes = {}
    digest = hashlib.sha256()
    for split, size in source.splits.items():
        paths = source.files(split)
        if size is None:
            batches = source.batches(split, READ_AT_ONCE)
            batches = batches.map(lambda numbers, _: tf.size(numbers))
            what = f"Counting the records of {source.name}"
            with Progress(what, unit="records") as shown:
                for count in batches.as_numpy_iterator():
                    shown.add(int(count))
            size = shown.done
        sizes[split] = size
        digest.update("\n".join(paths).encode())
        for path in paths[:: len(paths) // _FILES_TO_LOOK_AT + 1]:
            stat = tf.io.gfile.stat(path)
            digest.update(f"{stat.length} {stat.mtime_nsec}".encode())
        # Data in memory has no files.
        for _, records in source.batches(split, serialize.AT_ONCE).take(1):
            for part in source.parse(records):
                digest.update(tf.io.serialize_tensor(part).numpy())
    return {
        "source": source.name,
        "num_classes": source.num_classes,
        "splits": sizes,
        "shards": shards,
        "image shape": list(form.shape),
        "resized": form.resized,
        "raw": form.raw,
        "content": digest.hexdigest(),
    }


def prepare(
    source: Source, folder: str, manifest: dict[str, Any], overwrite: bool
) -> None:
    """Creates the folder, or checks that an earlier call had the same arguments."""
    for path in itertools.chain.from_iterable(map(source.files, source.splits)):
        if os.path.abspath(os.path.dirname(path)) == os.path.abspath(folder):
            raise ValueError(
                f"{folder} holds files of {source.name}: expected another folder to "
                "write to"
            )
    tf.io.gfile.makedirs(folder)
    names = set(tf.io.gfile.listdir(folder))
    unfinished = {name for name in names if name.endswith(_UNFINISHED)}
    names -= unfinished | {name for name in names if name.startswith(_LOCK)}
    path = os.path.join(folder, _MANIFEST)
    if names and _MANIFEST not in names:
        raise ValueError(
            f"{folder} is not empty, and {PROGRAM} has not begun it: expected a new "
            "folder"
        )
    if names and not overwrite:
        try:
            before = json_file.read(path, dict)
        except ValueError as error:
            raise ValueError(
                f"{path} cannot be read ({error}): choose another folder, or "
                "--overwrite it"
            ) from error
        _check_same(folder, before, manifest)
    ours = {name for name in names if name.endswith(".tfrecord")} | {
        INFO,
        _MANIFEST,
        BAD_RECORDS_FILE,
    }
    for name in unfinished | (names & ours if overwrite else set()):
        tf.io.gfile.remove(os.path.join(folder, name))
    if overwrite or not names:
        whole_file.write_json(path, manifest)


def _check_same(folder: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            # The content is a digest, so there is nothing to show.
            was = "" if key == "content" else f": {before.get(key)}, now {value}"
            raise ValueError(
                f"{folder} was begun with another {key}{was}; expected the same "
                "source and arguments: repeat them, choose another folder, or "
                "--overwrite it"
            )


def info(
    source: Source, form: serialize.Form, splits: Sequence[SplitFiles]
) -> dict[str, Any]:
    """Describes the files, for people and for ``TFRecordSource``."""
    files = {
        split.split: {
            os.path.basename(path): {
                "examples": split.count(shard),
                "bytes": tf.io.gfile.stat(path).length,
            }
            for shard, path in enumerate(split.paths)
        }
        for split in splits
    }
    return {
        "written_by": CONVERTER,
        "source": source.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "num_classes": source.num_classes,
        "class_names": source.class_names,
        "image_shape": form.shape,
        "raw": form.raw,
        "fields": [*source.image_fields] if len(form.shape) == 1 else None,
        "splits": {
            split: {
                "examples": sum(file["examples"] for file in of_split.values()),
                "files": len(of_split),
                "bytes": sum(file["bytes"] for file in of_split.values()),
            }
            for split, of_split in files.items()
        },
        "files": {
            name: file for of_split in files.values() for name, file in of_split.items()
        },
    }

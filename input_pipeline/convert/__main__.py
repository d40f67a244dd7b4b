"""Converts a data set to TFRecord files, which are the fastest to read.

    python -m towers.input_pipeline.convert folder:my_pictures tfrecord:my_records

Encoded images are kept byte for byte, unless --image_size asks for another size. Small
images of one size become pixels, which need no decoding. Each file contains consecutive
records of a split. A file gets its name once it is written completely and read back. If
you interrupt the conversion, run it again to continue.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.input_pipeline.convert import flags as convert_flags
    from towers.program import startup

    startup.begin(
        "towers.input_pipeline.convert", lambda argv: convert_flags.read(argv, __doc__)
    )

import concurrent.futures
import datetime
import hashlib
import itertools
import json
import math
import os
import shlex
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

from towers.input_pipeline import data_flags
from towers.input_pipeline.choices import BAD_RECORDS, RAW
from towers.input_pipeline.convert import flags as convert_flags
from towers.input_pipeline.convert import serialize
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.checks import blame_records
from towers.input_pipeline.sources import Source, open_source
from towers.input_pipeline.sources.base import IndexedSource
from towers.input_pipeline.sources.examples.tfrecord import CONVERTER, INFO
from towers.input_pipeline.sources.record import BadRecordError
from towers.program import startup, words
from towers.program.commands import fail, quieten, read_image_size

_PROGRAM = "towers.input_pipeline.convert"
_MANIFEST = ".convert.json"
_UNFINISHED = ".unfinished"
_BAD_RECORDS = "bad_records.json"
# Files at once, each read and prepared by as many threads as there are.
_WRITERS = min(os.cpu_count() or 1, 8)
_READ_AT_ONCE = 1024
_FILES_TO_LOOK_AT = 1000


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
        source: of images, or of rows of numbers.
        folder: where the files go; new, empty, or of an earlier call.
        shards: files for each split.
        image_size: (H, W) to resize images to; None keeps them as they are.
        raw: "true" writes pixels, "false" encoded images, "auto" pixels where all
            images have one size and take no more than 64 KB.
        overwrite: removes what an earlier call has written there.
        bad_records: "fail" ends at the first one. "skip" looks at all records first,
            lists the bad ones in bad_records.json, and leaves them out; `source` has
            to be opened with ``skip_bad``.
        max_bad_records: more than that are an error in any case.

    Returns:
        What stands in dataset_info.json beside the files.

    Raises:
        ValueError: an argument, the folder or a record is bad.
    """
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
    source.prepare()
    found = None
    if bad_records == "skip":
        found = quarantine.inspect(source, [*source.splits], max_bad_records)
        source = source.without(found.bad, found.splits)
    with blame_records(source):
        form = serialize.choose_form(source, image_size, raw)
        manifest = _describe(source, shards, form)
    _prepare_folder(source, folder, manifest, overwrite)
    if found:
        path = os.path.join(folder, _BAD_RECORDS)
        quarantine.write([found], path)
        left_out = words.count(len(found), "bad record")
        print(f"{left_out} left out; {path} lists them all.")
    sizes = manifest["splits"]
    with _Progress(sum(sizes.values())) as progress, blame_records(source):
        for split, size in sizes.items():
            _Writer(source, split, form, folder, size, shards, progress).run()
    info = _info(source, form, folder, sizes, shards)
    _write_json(os.path.join(folder, INFO), info)
    return info


class _Writer:
    """Writes the files of one split that are not there yet, several at once."""

    def __init__(self, source, split, form, folder, size, shards, progress):
        self._source, self._split, self._form = source, split, form
        self._progress = progress
        self._stop = threading.Event()
        self._paths = _paths(folder, split, size, shards)
        self._bounds = _bounds(size, len(self._paths))

    def run(self) -> None:
        """Writes them.

        Raises:
            ValueError: a file is not read back as it was written.
            tf.errors.OpError: a record or a file system is bad.
        """
        # What is written is finished by others, so that it does not queue up behind
        # what has yet to be written.
        pools = [concurrent.futures.ThreadPoolExecutor(_WRITERS) for _ in "12"]
        writers, self._finishers = pools
        try:
            # What was there is read once more: the disk may have been full.
            shards = range(len(self._paths))
            kept = [*writers.map(self._is_whole, shards)]
            self._progress.add(sum(map(self._count, itertools.compress(shards, kept))))
            missing = [shard for shard in shards if not kept[shard]]
            jobs = [writers.submit(self._write, run) for run in self._runs(missing)]
            done, _ = concurrent.futures.wait(jobs, return_when="FIRST_EXCEPTION")
            for finishing in itertools.chain.from_iterable(j.result() for j in done):
                finishing.result()
        finally:
            self._stop.set()
            for pool in pools:
                pool.shutdown(cancel_futures=True)

    def _runs(self, missing: list[int]) -> list[list[int]]:
        """Files in a row that are read in one go, which starts somewhere else each."""
        # A stream is read from its beginning each time.
        parts = _WRITERS if isinstance(self._source, IndexedSource) else 1
        size = max(math.ceil(len(missing) / parts), 1)
        chunks = [missing[i : i + size] for i in range(0, len(missing), size)]
        return [run for chunk in chunks for run in _in_a_row(chunk)]

    def _count(self, shard: int) -> int:
        return self._bounds[shard + 1] - self._bounds[shard]

    def _write(self, shards: list[int]) -> list[concurrent.futures.Future]:
        """Writes files in a row."""
        first, end = self._bounds[shards[0]], self._bounds[shards[-1] + 1]
        batches = serialize.serialized(
            self._source, self._split, self._form, first, end - first
        )
        records = self._until_stopped(batches.as_numpy_iterator())
        jobs = []
        for shard in shards:
            path = _unfinished(self._paths[shard])
            with tf.io.TFRecordWriter(path) as writer:
                for record in itertools.islice(records, self._count(shard)):
                    writer.write(record)
            jobs.append(self._finishers.submit(self._finish, shard))
        return jobs

    def _until_stopped(self, batches: Iterable[np.ndarray]) -> Iterator[bytes]:
        for batch in batches:
            if self._stop.is_set():
                raise concurrent.futures.CancelledError
            self._progress.add(len(batch))
            yield from batch

    def _finish(self, shard: int) -> None:
        """Has a file kept by the disk, reads it back and gives it its name."""
        path = self._paths[shard]
        _sync(_unfinished(path))
        if not self._is_whole(shard, _unfinished(path)):
            raise ValueError(
                f"{path} was not read back as it was written: expected "
                f"{self._count(shard)} records; look for a full disk, or for a source "
                "that has changed meanwhile"
            )
        tf.io.gfile.rename(_unfinished(path), path, overwrite=True)
        _sync(os.path.dirname(path))
        self._progress.say(path, self._count(shard))

    def _is_whole(self, shard: int, path: str | None = None) -> bool:
        """Whether a file has its records, with their checksums and good labels."""
        path = path or self._paths[shard]
        if not tf.io.gfile.exists(path):
            return False
        field = {"image/class/label": tf.io.FixedLenFeature([], tf.int64)}
        count = 0
        try:
            for records in tf.data.TFRecordDataset(path).batch(_READ_AT_ONCE):
                (labels,) = tf.io.parse_example(records, field).values()
                labels = labels.numpy()
                if labels.min() < 0 or labels.max() >= self._source.num_classes:
                    return False
                count += len(labels)
        except (tf.errors.DataLossError, tf.errors.InvalidArgumentError):
            return False
        return count == self._count(shard)


class _Progress:
    """A bar on a terminal, else a line for each file."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self._shown = sys.stderr.isatty()
        self._bar = tqdm(total=total, unit=" examples", disable=not self._shown)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._bar.close()

    def add(self, examples: int) -> None:
        self._bar.update(examples)

    def say(self, path: str, examples: int) -> None:
        if not self._shown:
            size = words.size(tf.io.gfile.stat(path).length)
            print(f"{path}: {words.count(examples, 'example')}, {size}", flush=True)


def _paths(folder: str, split: str, size: int, shards: int) -> list[str]:
    """The files of a split: none of them is empty."""
    shards = max(min(shards, size), 1)
    names = [f"{split}-{shard:05}-of-{shards:05}.tfrecord" for shard in range(shards)]
    return [os.path.join(folder, name) for name in names]


def _bounds(size: int, shards: int) -> list[int]:
    """The first record of each file, and the end."""
    return [shard * size // shards for shard in range(shards + 1)]


def _unfinished(path: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}{_UNFINISHED}")


def _in_a_row(shards: list[int]) -> list[list[int]]:
    """Divides rising numbers where one is left out."""
    groups = itertools.groupby(enumerate(shards), lambda pair: pair[1] - pair[0])
    return [[shard for _, shard in group] for _, group in groups]


def _sync(path: str) -> None:
    """Has the disk keep a file or a folder; other file systems do by themselves."""
    if "://" in path:
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _describe(source: Source, shards: int, form: serialize.Form) -> dict[str, Any]:
    """What a call has to have in common with the one that it continues."""
    sizes = {}
    digest = hashlib.sha256()
    for split, size in source.splits.items():
        paths = source.files(split)
        if size is None:
            batches = source.batches(split, _READ_AT_ONCE)
            batches = batches.map(lambda numbers, _: tf.size(numbers))
            size = int(sum(batches.as_numpy_iterator()))
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


def _prepare_folder(
    source: Source, folder: str, manifest: dict[str, Any], overwrite: bool
) -> None:
    """Makes the folder, or checks that an earlier call was the same."""
    for path in itertools.chain.from_iterable(map(source.files, source.splits)):
        if os.path.abspath(os.path.dirname(path)) == os.path.abspath(folder):
            raise ValueError(
                f"{folder} holds files of {source.name}: expected another folder to "
                "write to"
            )
    tf.io.gfile.makedirs(folder)
    names = set(tf.io.gfile.listdir(folder))
    unfinished = {name for name in names if name.endswith(_UNFINISHED)}
    names -= unfinished
    path = os.path.join(folder, _MANIFEST)
    if names and _MANIFEST not in names:
        raise ValueError(
            f"{folder} is not empty, and {_PROGRAM} has not begun it: expected a new "
            "folder"
        )
    if names and not overwrite:
        with tf.io.gfile.GFile(path) as file:
            _check_same(folder, json.load(file), manifest)
    ours = {name for name in names if name.endswith(".tfrecord")} | {
        INFO,
        _MANIFEST,
        _BAD_RECORDS,
    }
    for name in unfinished | (names & ours if overwrite else set()):
        tf.io.gfile.remove(os.path.join(folder, name))
    if overwrite or not names:
        _write_json(path, manifest)


def _check_same(folder: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key, value in now.items():
        if before.get(key) != value:
            # Of the content there is nothing to show.
            was = "" if key == "content" else f": {before.get(key)}, now {value}"
            raise ValueError(
                f"{folder} was begun with another {key}{was}; expected the same "
                "source and arguments: repeat them, choose another folder, or "
                "--overwrite it"
            )


def _write_json(path: str, content: dict[str, Any]) -> None:
    with tf.io.gfile.GFile(_unfinished(path), "w") as file:
        json.dump(content, file, indent=1)
    _sync(_unfinished(path))
    tf.io.gfile.rename(_unfinished(path), path, overwrite=True)
    _sync(os.path.dirname(path))


def _info(
    source: Source,
    form: serialize.Form,
    folder: str,
    sizes: dict[str, int],
    shards: int,
) -> dict[str, Any]:
    """What stands beside the files, for people and for ``TFRecordSource``."""
    files = {}
    splits = {}
    for split, size in sizes.items():
        paths = _paths(folder, split, size, shards)
        lengths = [tf.io.gfile.stat(path).length for path in paths]
        splits[split] = {
            "examples": size,
            "files": len(paths),
            "bytes": sum(lengths),
        }
        bounds = itertools.pairwise(_bounds(size, len(paths)))
        for path, length, (first, end) in zip(paths, lengths, bounds, strict=True):
            files[os.path.basename(path)] = {"examples": end - first, "bytes": length}
    return {
        "written_by": CONVERTER,
        "source": source.name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "num_classes": source.num_classes,
        "class_names": source.class_names,
        "image_shape": form.shape,
        "raw": form.raw,
        "fields": [*source.image_fields] if len(form.shape) == 1 else None,
        "splits": splits,
        "files": files,
    }


def main(argv: Sequence[str]) -> int:
    """Converts what the command line says.

    Args:
        argv: The program's name and its arguments.

    Returns:
        The exit code.
    """
    values = None
    try:
        startup.end()
        spec, folder, values = convert_flags.read(argv, __doc__)
        _run(spec, folder, values)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the progress bar's line
        fail("stopped by Ctrl-C; run it again to go on", _PROGRAM)
        return 130
    except BadRecordError as error:
        skips = values.bad_records == "skip" or error.many
        hint = (
            ""
            if skips
            else "; to convert without it, give --bad_records=skip --overwrite"
        )
        return fail(f"{str(error).removesuffix('.')}{hint}", _PROGRAM)
    except (ValueError, OSError, tf.errors.OpError) as error:
        return fail(error, _PROGRAM)
    return 0


def _run(spec: str, folder: str, values: flags.FlagValues) -> None:
    source = open_source(
        spec,
        data_dir=os.path.expanduser(values.data_dir),
        skip_bad=values.bad_records == "skip",
        **data_flags.given(values),
    )
    for note in source.notes:
        print(note)
    folder = os.path.expanduser(folder)
    info = convert(
        source,
        folder,
        shards=values.shards,
        image_size=read_image_size(values.image_size),
        raw=values.raw,
        overwrite=values.overwrite,
        bad_records=values.bad_records,
        max_bad_records=values.max_bad_records,
    )
    print(_done(info, folder))


def _done(info: dict[str, Any], folder: str) -> str:
    """Says that all is done, and how to train on it."""
    splits = info["splits"]
    records, files, size = (
        sum(split[what] for split in splits.values())
        for what in ("examples", "files", "bytes")
    )
    counts = ", ".join(
        f"{split['examples']:,} in {name}" for name, split in splits.items()
    )
    wanted = " --image_size=224" if None in info["image_shape"] else ""
    return (
        f"Done: {words.count(records, 'record')} ({counts}) in "
        f"{words.count(files, 'file')}, {words.size(size)}, in {folder}; train on "
        f"them: python -m towers.train --dataset={shlex.quote(f'tfrecord:{folder}')}"
        f"{wanted}"
    )


if __name__ == "__main__":
    # They are left to training.
    tf.config.set_visible_devices([], "GPU")
    quieten()
    tf.get_logger().setLevel("ERROR")
    sys.exit(main(sys.argv))

"""Writes a source as TFRecord files, which are the fastest to read.

    python -m towers.input_pipeline.convert folder:my_pictures tfrecord:my_records

Encoded images are kept byte for byte, unless --image_size asks for another size; small
ones of one size become pixels, which need no decoding. Each file holds a part of the
split that is contiguous in the source's order. It gets its name once it is complete, on
disk and read back, so that what was interrupted goes on where it stopped.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.input_pipeline import convert_flags, startup

    startup.begin(
        "towers.input_pipeline.convert", lambda argv: convert_flags.read(argv, __doc__)
    )

import concurrent.futures
import dataclasses
import datetime
import hashlib
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import flags

from towers.input_pipeline import (
    augment,
    convert_flags,
    data_flags,
    startup,
    words,
)
from towers.input_pipeline.checks import assert_good, blame_records, read_labels
from towers.input_pipeline.choices import RAW
from towers.input_pipeline.commands import fail, quieten, read_image_size
from towers.input_pipeline.decode import Tricks, decode_window
from towers.input_pipeline.sources import Source, open_source
from towers.input_pipeline.sources.base import IndexedSource, decode_image
from towers.input_pipeline.sources.tfrecord import CONVERTER, INFO

_PROGRAM = "towers.input_pipeline.convert"
_MANIFEST = ".convert.json"
_UNFINISHED = ".unfinished"
# Images that take no more than this are kept as pixels.
_SMALL = 64 * 2**10
_AT_ONCE = 64
# Files at once, each read and prepared by as many threads as there are.
_WRITERS = min(os.cpu_count() or 1, 8)
_READ_AT_ONCE = 1024
_FILES_TO_LOOK_AT = 1000
_ACCURATE = Tricks(scaled=False, fast_dct=False, plain_upsampling=False)


def convert(
    source: Source,
    folder: str,
    *,
    shards: int = 8,
    image_size: tuple[int, int] | None = None,
    raw: str = "auto",
    overwrite: bool = False,
) -> None:
    """Writes all splits of a source as TFRecord files.

    Args:
        source: of images.
        folder: where the files go; new, empty, or of an earlier call.
        shards: files for each split.
        image_size: (H, W) to resize images to; None keeps them as they are.
        raw: "true" writes pixels, "false" encoded images, "auto" pixels where all
            images have one size and take no more than 64 KB.
        overwrite: removes what an earlier call has written there.

    Raises:
        ValueError: an argument, the folder or a record is bad.
    """
    if shards < 1 or raw not in RAW:
        raise ValueError(
            f"received shards={shards} and raw={raw!r}: expected at least 1, and one "
            f"of {', '.join(RAW)}"
        )
    source.prepare()
    with blame_records(source):
        form = _choose_form(source, image_size, raw)
        manifest = _describe(source, shards, form)
    _prepare_folder(source, folder, manifest, overwrite)
    sizes = manifest["splits"]
    with _Progress(sum(sizes.values())) as progress, blame_records(source):
        for split, size in sizes.items():
            _Writer(source, split, form, folder, size, shards, progress).run()
    _write_json(os.path.join(folder, INFO), _info(source, form, folder, sizes, shards))


@dataclasses.dataclass(frozen=True)
class _Form:
    """What becomes of the images.

    Attributes:
        shape: (H, W, C), None where it varies.
        resized: whether they are made this large.
        raw: whether pixels are written.
    """

    shape: tuple[int | None, int | None, int]
    resized: bool
    raw: bool

    def one(self, source: Source, image: tf.Tensor) -> tf.Tensor:
        """The bytes to write of one image that ``source.parse`` gave."""
        if source.encoded:
            encoded = source.load(image)
            if self.resized:
                image = decode_window(
                    encoded,
                    None,
                    self.shape,
                    antialias="exact",
                    tricks=_ACCURATE,
                )
            elif self.raw:
                image = decode_image(encoded, self.shape)
            else:
                # Decoded all the same, as small as can be, to see that it can be.
                size = (1, 1, self.shape[-1])
                tested = decode_window(encoded, None, size)
                with tf.control_dependencies([tested]):
                    return tf.identity(encoded)
        elif self.resized:
            image = augment.resize(image, *self.shape[:2])
        if self.raw:
            # The pixels are the last field of a TensorProto.
            size = math.prod(self.shape)
            return tf.strings.substr(tf.io.serialize_tensor(image), -size, size)
        # Only what was a photograph can do with a loss.
        if source.encoded and self.shape[-1] in (1, 3):
            return tf.io.encode_jpeg(image)
        return tf.io.encode_png(image)


def _choose_form(source: Source, size: tuple[int, int] | None, raw: str) -> _Form:
    if len(source.image_shape) != 3:
        raise ValueError(
            f"{source.name} gives rows of numbers, expected images: leave it as it is"
        )
    shape = source.image_shape
    if size is not None:
        shape = (*size, shape[-1])
    elif None in shape and raw != "false":
        shape = _common_shape(source, math.inf if raw == "true" else _SMALL)
    known = None not in shape
    if raw == "true" and not known:
        raise ValueError(
            f"the images of {source.name} differ in size: expected one for raw pixels, "
            "choose an image_size, or encoded images"
        )
    png = shape[-1] in (1, 3, 4)
    if raw == "false" and not source.encoded and not png:
        raise ValueError(
            f"the images of {source.name} have {shape[-1]} channels: expected 1, 3 or "
            "4 to encode them, choose raw pixels"
        )
    pixels = known and (math.prod(shape) <= _SMALL or not png)
    resized = size is not None and shape != source.image_shape
    return _Form(shape, resized, raw == "true" or (raw == "auto" and pixels))


def _common_shape(source: Source, limit: float) -> tuple[int | None, int | None, int]:
    """The shape of all images, if they have one and take no more than ``limit``."""
    first = None
    for split in source.splits:
        images = _images(source, split).map(
            lambda image, _: tf.shape(
                decode_image(source.load(image), source.image_shape)
            ),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        for shapes in images.batch(_AT_ONCE).as_numpy_iterator():
            first = shapes[0] if first is None else first
            if (shapes != first).any() or math.prod(first.tolist()) > limit:
                return source.image_shape
    return tuple(first.tolist())


def _images(source: Source, split: str, start: int = 0) -> tf.data.Dataset:
    """Images and labels as ``source.parse`` gives them, one by one."""

    def parse(_, records):
        images, labels = source.parse(records)
        assert_good(images, labels, source.num_classes)
        return images, labels

    batches = source.batches(split, _AT_ONCE, start=start)
    return batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).unbatch()


def _serialized(
    source: Source, split: str, form: _Form, start: int, count: int
) -> tf.data.Dataset:
    """Batches of tf.Examples of some records in a row."""
    images = _images(source, split, start).take(count)
    images = images.map(
        lambda image, label: (form.one(source, image), label),
        # The costly part; to try out what is best would take longer than it brings.
        num_parallel_calls=os.cpu_count(),
    )
    shape = form.shape if form.raw else None
    return (
        images.batch(_AT_ONCE)
        .map(
            lambda images, labels: _examples(images, labels, shape),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        .prefetch(tf.data.AUTOTUNE)
    )


def _examples(
    images: tf.Tensor, labels: tf.Tensor, shape: Sequence[int] | None
) -> tf.Tensor:
    """Serializes tf.Examples [B]; in TensorFlow, which uses all cores for it."""

    def message(name, **fields):
        """Each field [B, N]."""
        sizes = [tf.repeat([[value.shape[1]]], count, 0) for value in fields.values()]
        sizes = tf.concat(sizes, axis=1)
        return tf.io.encode_proto(
            sizes, [*fields.values()], [*fields], f"tensorflow.{name}"
        )[:, None]

    def entry(key, **values):
        ((kind, value),) = values.items()
        names = {"bytes_list": "BytesList", "int64_list": "Int64List"}
        value = message(names[kind], value=value[:, None])
        feature = message("Feature", **{kind: value})
        keys = tf.repeat([[key]], count, 0)
        return message("Features.FeatureEntry", key=keys, value=feature)

    count = tf.size(labels)
    entries = [
        entry("image/encoded", bytes_list=images),
        entry("image/class/label", int64_list=labels),
    ]
    for name, size in zip(("height", "width", "channels"), shape or (), strict=False):
        sizes = tf.fill([count], tf.constant(size, tf.int64))
        entries.append(entry(f"image/{name}", int64_list=sizes))
    features = message("Features", feature=tf.concat(entries, axis=1))
    return message("Example", features=features)[:, 0]


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
        batches = _serialized(self._source, self._split, self._form, first, end - first)
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


def _describe(source: Source, shards: int, form: _Form) -> dict[str, Any]:
    """What a call has to have in common with the one that it continues."""
    sizes = {}
    digest = hashlib.sha256()
    for split, size in source.splits.items():
        paths = source.files(split)
        if size is None:
            size = sum(len(read_labels(source, path)) for path in paths)
        sizes[split] = size
        digest.update("\n".join(paths).encode())
        for path in paths[:: len(paths) // _FILES_TO_LOOK_AT + 1]:
            stat = tf.io.gfile.stat(path)
            digest.update(f"{stat.length} {stat.mtime_nsec}".encode())
        # Data in memory has no files.
        for _, records in source.batches(split, _AT_ONCE).take(1):
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
    ours = {name for name in names if name.endswith(".tfrecord")} | {INFO, _MANIFEST}
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
    source: Source, form: _Form, folder: str, sizes: dict[str, int], shards: int
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
    try:
        startup.end()
        _run(*convert_flags.read(argv, __doc__))
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the progress bar's line
        fail("stopped by Ctrl-C; run it again to go on", _PROGRAM)
        return 130
    except (ValueError, OSError, tf.errors.OpError) as error:
        return fail(error, _PROGRAM)
    return 0


def _run(spec: str, folder: str, values: flags.FlagValues) -> None:
    source = open_source(
        spec,
        data_dir=os.path.expanduser(values.data_dir),
        **data_flags.given(values),
    )
    convert(
        source,
        os.path.expanduser(folder),
        shards=values.shards,
        image_size=read_image_size(values.image_size),
        raw=values.raw,
        overwrite=values.overwrite,
    )


if __name__ == "__main__":
    # They are left to training.
    tf.config.set_visible_devices([], "GPU")
    quieten()
    tf.get_logger().setLevel("ERROR")
    sys.exit(main(sys.argv))

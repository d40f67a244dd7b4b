"""Stores checkpoints on the disk: whole, verified and in order, or not at all.

A checkpoint is a folder, `ckpt-EPOCH-BATCH`, of TensorFlow's own files, which
`tf.train.load_checkpoint` reads. (To write a ResNet-20, `tf.train.Checkpoint` takes 45
ms, for its graph of objects; the operation under it takes 6.) It is written under
another name, flushed to the disk, read back, and only then renamed. An older one of the
same position is called `ckpt-EPOCH-BATCH.replaced` until the new one has its name. No
separate list could be wrong (`tf.train.CheckpointManager` removes what its list names,
wherever that is): the folders are the list.

A state may fill most of the memory, so it is written and read back in pieces. A large
value is stored in slices, as TensorFlow stores partitioned variables, and each file
holds about as much as one slice.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.devices.names import HOST
from towers.program import whole_file

_REPLACED = ".replaced"
_NAME = re.compile(rf"ckpt-(\d+)-(\d+)({re.escape(_REPLACED)})?")
_UNFINISHED = ".unfinished"
_FILES = "variables"
_ABOUT = "about"
_FORMAT = 1
# The most bytes of a piece; a checkpoint stores this. Older ones have whole values.
_PIECE_BYTES, _PIECES_OF = 2**25, "piece bytes"
# TensorFlow can join slices of these types; other values are always in one piece.
_CAN_BE_CUT = (
    *(tf.float32, tf.float64, tf.bfloat16, tf.complex64, tf.complex128, tf.bool),
    *(tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8),
)
# The folder in which Linux lists the open files of a process.
_OPENED = "/proc/self/fd"


class DamagedError(ValueError):
    """A checkpoint cannot be read; the message names the checkpoint and the reason."""


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """The position of a run.

    Attributes:
        epoch: The number of the epoch, from 0.
        batch: The number of its batches that have been trained on.
    """

    epoch: int
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        values: The values of variables, in order, by the name of their part. They may
            be `OnDemand`.
        about: The description of the checkpoint, as JSON.
    """

    values: Mapping[str, Sequence[Any]]
    about: Mapping[str, Any]


class OnDemand(Sequence):
    """Values that are read when requested, and not kept."""

    def __init__(self, read: Callable[[Any], Any], sources: Sequence[Any]):
        """Reads nothing yet.

        Args:
            read: Returns the value of a source.
            sources: The source of each value.
        """
        self._read, self._sources = read, sources

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: int) -> Any:
        return self._read(self._sources[index])


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A whole value, or a slice of it.

    Attributes:
        name: The name of the value in the files.
        shape: The shape of the whole value.
        dtype: The type.
        axis: The axis that is cut.
        rows: The slice on that axis; `None` for the whole value.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    axis: int = 0
    rows: range | None = None

    @property
    def nbytes(self) -> int:
        """The size of the piece in bytes."""
        whole = math.prod(self.shape) * self.dtype.size
        if self.rows is None:
            return whole
        return whole // self.shape[self.axis] * len(self.rows)

    @property
    def slice_spec(self) -> str:
        """The slice as TensorFlow's operations take it; empty for the whole value."""
        if self.rows is None:
            return ""
        cuts = ["-"] * len(self.shape)
        cuts[self.axis] = f"{self.rows.start},{len(self.rows)}"
        return f"{' '.join(map(str, self.shape))} {':'.join(cuts)}"

    def cut_from(self, value: Any) -> tf.Tensor:
        """Returns the piece of a value, in the host's memory."""
        if self.rows is not None:
            rows = slice(self.rows.start, self.rows.stop)
            value = value[(slice(None),) * self.axis + (rows,)]
        return on_host(value)


def on_host(value: Any) -> tf.Tensor:
    """Returns a value as a tensor in the host's memory, without a copy if it is one."""
    with tf.device(HOST):
        return tf.raw_ops.Identity(input=value)  # `tf.identity` copies it


def find(directory: str) -> list[str]:
    """Returns the paths of all checkpoints, the latest first."""
    try:
        names = {*os.listdir(directory)}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(
            f"Cannot read the checkpoints in {directory}: {error.strerror}; choose "
            "another directory."
        ) from error
    # Where a save was killed, only the checkpoint that it should replace may exist.
    replaced = {name + _REPLACED for name in names}
    paths = [
        os.path.join(directory, name)
        for name in names - replaced
        if _NAME.fullmatch(name)
    ]
    # A link may lead anywhere; this module makes none.
    paths = [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]
    return sorted(paths, key=position, reverse=True)


def is_one(path: str) -> bool:
    """Tells whether a path has a checkpoint's name, and is a folder."""
    return bool(_NAME.fullmatch(os.path.basename(path))) and os.path.isdir(path)


def position(path: str) -> Position:
    """Returns the position in a checkpoint's name."""
    epoch, batch, _ = _NAME.fullmatch(os.path.basename(path)).groups()
    return Position(int(epoch), int(batch))


def save(
    directory: str, at: Position, contents: Contents, discarded: Sequence[str] = ()
) -> str:
    """Writes a checkpoint, which gets its name only when it is whole.

    Args:
        directory: The folder of the checkpoints; created if it does not exist.
        at: The position, which names the checkpoint. An older one of that name stays
            until the new one has the name.
        contents: The contents. Each value is read once, in order.
        discarded: Checkpoints to remove once this one is whole, before it has its name.

    Returns:
        Its path.

    Raises:
        OSError: It cannot be written, or does not read back as it was written.
    """
    path = os.path.join(directory, f"ckpt-{at.epoch}-{at.batch}")
    unfinished = os.path.join(directory, _UNFINISHED)
    try:
        os.makedirs(directory, exist_ok=True)
        _settle(directory)
        _clear(unfinished)
        os.mkdir(unfinished)
        _write(os.path.join(unfinished, _FILES), at, contents)
        whole_file.flush_all(unfinished)
        load(unfinished)
        for old_path in discarded:
            remove(old_path)
        if os.path.lexists(path):
            os.rename(path, path + _REPLACED)
        os.rename(unfinished, path)
        whole_file.flush(directory)
    except tf.errors.OpError as error:
        raise OSError(reason(error)) from error
    except DamagedError as error:
        why = reason(error.__cause__)
        raise OSError(f"it is not read back as it was written: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            _clear(unfinished)
            _settle(directory)
    return path


def _settle(directory):
    """Removes replaced checkpoints; restores the name of one without a successor."""
    for name in os.listdir(directory):
        if not (_NAME.fullmatch(name) and name.endswith(_REPLACED)):
            continue
        path = os.path.join(directory, name)
        successor = path.removesuffix(_REPLACED)
        if os.path.lexists(successor):
            remove(path)
        else:
            os.rename(path, successor)


def load(path: str) -> Contents:
    """Reads a checkpoint whole, to verify each of its checksums.

    No value is kept: each is read again when it is requested.

    Raises:
        DamagedError: The path is no checkpoint, or its files have changed. Reading a
            value raises it, too, if that is no longer possible.
    """
    with _reading(path) as prefix:
        reader = tf.train.load_checkpoint(prefix)
        about = _parse(path, reader.get_tensor(_ABOUT))
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
        most_bytes = about.get(_PIECES_OF, math.inf)
        pieces = itertools.chain.from_iterable(
            _cut(_Piece(name, tuple(shape), dtypes[name]), most_bytes)
            for name, shape in shapes.items()
        )
        for group in _grouped((piece, None) for piece in pieces):
            _restore(prefix, [piece for piece, _ in group])
        values = {
            part: OnDemand(
                functools.partial(_read_value, path),
                [
                    _Piece(name, tuple(shapes[name]), dtypes[name])
                    for name in (f"{part}/{i}" for i in range(count))
                ],
            )
            for part, count in about["parts"].items()
        }
    return Contents(values, about)


def _read_value(path, whole):
    with _reading(path) as prefix:
        (value,) = _restore(prefix, [whole])
    return value


def _restore(prefix, pieces):
    with tf.device(HOST):
        return tf.raw_ops.RestoreV2(
            prefix=prefix,
            tensor_names=[piece.name for piece in pieces],
            shape_and_slices=[piece.slice_spec for piece in pieces],
            dtypes=[piece.dtype for piece in pieces],
        )


def load_about(path: str) -> dict[str, Any]:
    """Reads the description of a checkpoint, and none of its values.

    Raises:
        DamagedError: As for `load`.
    """
    with _reading(path) as prefix:
        return _parse(path, tf.train.load_variable(prefix, _ABOUT))


def remove(path: str) -> None:
    """Removes a checkpoint that `find` has returned."""
    # Renamed first, as half a checkpoint would look like a damaged one.
    unfinished = os.path.join(os.path.dirname(path), f"{_UNFINISHED}-removal")
    with contextlib.suppress(OSError):
        _clear(unfinished)
        os.rename(path, unfinished)
        whole_file.remove(unfinished)


def remove_all(directory: str) -> None:
    """Removes all files that this module has written, and no others."""
    for path in find(directory):
        remove(path + _REPLACED)
        remove(path)
    for name in (_UNFINISHED, f"{_UNFINISHED}-removal"):
        _clear(os.path.join(directory, name))


def _clear(path):
    with contextlib.suppress(OSError):
        whole_file.remove(path)


def _write(prefix, at, contents):
    about = {
        "format": _FORMAT,
        "parts": {part: len(values) for part, values in contents.values.items()},
        **contents.about,
        "position": dataclasses.astuple(at),
        _PIECES_OF: _PIECE_BYTES,
    }
    written = []
    for group in _grouped(_all_pieces(json.dumps(about), contents.values)):
        written.append(f"{prefix}-{len(written)}")
        pieces, tensors = zip(*group, strict=True)
        with tf.device(HOST):
            tf.raw_ops.SaveV2(
                prefix=written[-1],
                tensor_names=[piece.name for piece in pieces],
                shape_and_slices=[piece.slice_spec for piece in pieces],
                tensors=tensors,
            )
        group.clear()  # before more is read
        del tensors
    # This renames the files, and writes one index for all.
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=False
    )


def _all_pieces(about, values):
    """Yields the pieces of a checkpoint, each with its tensor."""
    yield from pieces_of(_ABOUT, tf.constant(about))
    for part, of_part in values.items():
        for i, value in enumerate(of_part):
            yield from pieces_of(f"{part}/{i}", value)


def pieces_of(name: str, value: Any) -> Iterator[tuple[_Piece, tf.Tensor]]:
    """Cuts a value into pieces, each in the host's memory, one after another."""
    whole = _Piece(name, tuple(value.shape), tf.as_dtype(value.dtype))
    for piece in _cut(whole, _PIECE_BYTES):
        yield piece, piece.cut_from(value)


def _cut(whole, most_bytes):
    """Cuts a value into slices of at most `most_bytes`, or of one row."""
    axis = next((k for k, size in enumerate(whole.shape) if size > 1), None)
    if axis is None or whole.nbytes <= most_bytes or whole.dtype not in _CAN_BE_CUT:
        return [whole]
    rows = range(whole.shape[axis])
    step = max(1, int(len(rows) * most_bytes // whole.nbytes))
    return [
        dataclasses.replace(whole, axis=axis, rows=rows[start : start + step])
        for start in rows[::step]
    ]


def _grouped(pieces):
    """Yields lists of pieces, each with about the bytes of a large piece."""
    group, nbytes = [], 0
    for piece, tensor in pieces:
        if group and nbytes + piece.nbytes > _PIECE_BYTES:
            yield group
            group, nbytes = [], 0
        group.append((piece, tensor))
        nbytes += piece.nbytes
    yield group


def _parse(path, about):
    about = json.loads(about)
    if about["format"] != _FORMAT:
        raise ValueError("it is of another version")
    # A checkpoint that is being written has no name yet; older ones lack the position.
    if _NAME.fullmatch(os.path.basename(path)) and "position" in about:
        at = Position(*about["position"])
        if at != position(path):
            raise ValueError(
                f"it is of epoch {at.epoch}, batch {at.batch}: it was renamed"
            )
    return about


@contextlib.contextmanager
def _reading(path):
    """A context that yields the prefix of a checkpoint's files, and explains errors."""
    try:
        for name in os.listdir(path):
            # TensorFlow would wait for ever for a writer to a pipe.
            if not os.path.isfile(os.path.join(path, name)):
                raise ValueError(f"{name} is no regular file")
        with _not_a_pattern(path) as folder:
            yield os.path.join(folder, _FILES)
    # A short file is an IndexError; another program's file lacks these names.
    except (
        *(tf.errors.OpError, ValueError, IndexError, KeyError, TypeError),
        *(AttributeError, OSError, RuntimeError),
    ) as error:
        raise DamagedError(
            f"Cannot read the checkpoint {path}: {reason(error)}; choose another "
            "directory, or remove it."
        ) from error


@contextlib.contextmanager
def _not_a_pattern(path):
    """Returns another path to a folder whose path TensorFlow takes for a pattern."""
    if not re.search(r"[][\\]", path) or not os.path.isdir(_OPENED):
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield f"{_OPENED}/{descriptor}"
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """Returns a message's first line, without TensorFlow's operation around it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = line.partition(" [Op:")[0].rpartition("}} ")[2]
    line = re.sub(rf"{_OPENED}/\d+/", "", line)
    # The part before it is the name of a file that only TensorFlow knows.
    return line.rpartition("; ")[2]


def is_finite(value: Any) -> bool:
    """Tells whether no number of a tensor is infinite, or not a number."""
    dtype = tf.as_dtype(value.dtype)
    if not dtype.is_floating and not dtype.is_complex:
        return True
    return all(np.isfinite(piece.numpy()).all() for _, piece in pieces_of("", value))

"""Checkpoints on the disk: whole, verified and in order, or not there at all.

A checkpoint is a folder, `ckpt-EPOCH-BATCH`, of TensorFlow's own files, which
`tf.train.load_checkpoint` reads. (To write a ResNet-20, `tf.train.Checkpoint` takes 45
ms, for its graph of objects; the operation under it takes 6.) It is written under
another name, flushed to the disk, read back, and only then renamed.
There is no list of them that could be wrong (`tf.train.CheckpointManager` removes what
its list names, wherever that is): the folders are the list.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_NAME = re.compile(r"ckpt-(\d+)-(\d+)")
_UNFINISHED = ".unfinished"
_FILES = "variables"
_ABOUT = "about"
_FORMAT = 1
# Where Linux has the folders that a process has opened.
_OPENED = "/proc/self/fd"


class DamagedError(ValueError):
    """A checkpoint that cannot be read; the message says which, and why."""


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """How far a run has come.

    Attributes:
        epoch: Number of the epoch, from 0.
        batch: Batches of it that have been trained on.
    """

    epoch: int
    batch: int = 0


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a checkpoint holds.

    Attributes:
        values: The values of variables, in order, by the name of their part.
        about: What else there is to say, as JSON has it.
    """

    values: Mapping[str, Sequence[Any]]
    about: Mapping[str, Any]


def find(directory: str) -> list[str]:
    """Returns the paths of all checkpoints, the latest first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DamagedError(
            f"Cannot read the checkpoints in {directory}: {error.strerror}; choose "
            "another directory."
        ) from error
    paths = [os.path.join(directory, name) for name in names if _NAME.fullmatch(name)]
    # A link may lead anywhere; we make none.
    paths = [path for path in paths if os.path.isdir(path) and not os.path.islink(path)]
    return sorted(paths, key=position, reverse=True)


def is_one(path: str) -> bool:
    """Tells whether a path has a checkpoint's name, and is a folder."""
    return bool(_NAME.fullmatch(os.path.basename(path))) and os.path.isdir(path)


def position(path: str) -> Position:
    """Reads the position from a checkpoint's name."""
    return Position(*map(int, _NAME.fullmatch(os.path.basename(path)).groups()))


def save(directory: str, at: Position, contents: Contents) -> str:
    """Writes a checkpoint; until it is whole, there is none of that name.

    Args:
        directory: Where the checkpoints lie; made if there is none.
        at: Its position, which names it. One of that name is replaced.
        contents: What to write.

    Returns:
        Its path.

    Raises:
        OSError: It cannot be written, or is not read back as it was.
    """
    path = os.path.join(directory, f"ckpt-{at.epoch}-{at.batch}")
    unfinished = os.path.join(directory, _UNFINISHED)
    try:
        os.makedirs(directory, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        os.mkdir(unfinished)
        _write(os.path.join(unfinished, _FILES), at, contents)
        for name in os.listdir(unfinished):
            _sync(os.path.join(unfinished, name))
        _sync(unfinished)
        load(unfinished)
        if os.path.lexists(path):
            os.rename(path, os.path.join(unfinished, "replaced"))
        os.rename(unfinished, path)
        shutil.rmtree(os.path.join(path, "replaced"), ignore_errors=True)
        _sync(directory)
    except tf.errors.OpError as error:
        raise OSError(reason(error)) from error
    except DamagedError as error:
        why = reason(error.__cause__)
        raise OSError(f"it is not read back as it was written: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(unfinished)
    return path


def load(path: str) -> Contents:
    """Reads a checkpoint whole, so that each of its checksums is looked at.

    Raises:
        DamagedError: It is not one, or not as it was written.
    """
    with _reading(path) as prefix:
        reader = tf.train.load_checkpoint(prefix)
        names = reader.get_variable_to_shape_map()
        found = {name: reader.get_tensor(name) for name in names}
        about = _parse(path, found[_ABOUT])
        values = {
            part: [found[f"{part}/{i}"] for i in range(count)]
            for part, count in about["parts"].items()
        }
    return Contents(values, about)


def load_about(path: str) -> dict[str, Any]:
    """Reads what a checkpoint says of itself, and none of its values.

    Raises:
        DamagedError: As for `load`.
    """
    with _reading(path) as prefix:
        return _parse(path, tf.train.load_variable(prefix, _ABOUT))


def remove(path: str) -> None:
    """Removes a checkpoint that `find` has found."""
    # Renamed first: half of one would be taken for a damaged one.
    unfinished = os.path.join(os.path.dirname(path), f"{_UNFINISHED}-removal")
    with contextlib.suppress(OSError):
        shutil.rmtree(unfinished, ignore_errors=True)
        os.rename(path, unfinished)
        shutil.rmtree(unfinished)


def remove_all(directory: str) -> None:
    """Removes all that this module has written, and nothing else."""
    for path in find(directory):
        remove(path)
    for name in (_UNFINISHED, f"{_UNFINISHED}-removal"):
        shutil.rmtree(os.path.join(directory, name), ignore_errors=True)


def _write(prefix, at, contents):
    about = {
        "format": _FORMAT,
        "parts": {part: len(values) for part, values in contents.values.items()},
        **contents.about,
        "position": dataclasses.astuple(at),
    }
    tensors = {_ABOUT: tf.constant(json.dumps(about))}
    for part, values in contents.values.items():
        tensors |= {f"{part}/{i}": value for i, value in enumerate(values)}
    with tf.device("/CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[*tensors],
            shape_and_slices=[""] * len(tensors),
            tensors=[*tensors.values()],
        )


def _parse(path, about):
    about = json.loads(about)
    if about["format"] != _FORMAT:
        raise ValueError("it is of another version")
    # The one that is being written has no name yet, and older ones do not say it.
    if _NAME.fullmatch(os.path.basename(path)) and "position" in about:
        at = Position(*about["position"])
        if at != position(path):
            raise ValueError(
                f"it is of epoch {at.epoch}, batch {at.batch}: it was renamed"
            )
    return about


@contextlib.contextmanager
def _reading(path):
    """Gives the prefix of a checkpoint's files, and says why they cannot be read."""
    try:
        with _not_a_pattern(path) as folder:
            yield os.path.join(folder, _FILES)
    # A short file is an IndexError; another program's has no such names.
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
    """Another path to a folder, where TensorFlow's readers would not find its own."""
    if not re.search(r"[][\\]", path) or not os.path.isdir(_OPENED):
        yield path
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield f"{_OPENED}/{descriptor}"
    finally:
        os.close(descriptor)


def _sync(path):
    """Waits until a file, or the list of files of a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason(error: Exception) -> str:
    """Returns a message's first line, without TensorFlow's operation around it."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = line.partition(" [Op:")[0].rpartition("}} ")[2]
    line = re.sub(rf"{_OPENED}/\d+/", "", line)
    # Before it, the name of a file that only TensorFlow knows.
    return line.rpartition("; ")[2]


def is_finite(value: Any) -> bool:
    """Tells whether no number of a tensor is infinite, or not a number."""
    dtype = tf.as_dtype(value.dtype)
    if not dtype.is_floating and not dtype.is_complex:
        return True
    return bool(np.isfinite(np.asarray(value)).all())

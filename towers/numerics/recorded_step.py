"""Keeps a stopped step in a file, with all that is needed to compute it again."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.program import whole_file

_DATA = "x", "y", "sample_weight"


class RecordedStep(NamedTuple):
    """A stopped step, with all that is needed to compute it again.

    Attributes:
        step: The number of the step.
        data: (x, y, sample_weight), as the model sees them, each a nest of tensors.
        variables: Values of the model's variables, trainable ones first.
        split_ratios: The relative sizes of the towers' local batches.
        first: The index of the first of these towers.
        towers: The number of all towers.
        micro_batches: How many of these towers are micro-batches of one tower.
    """

    step: int
    data: tuple[Any, Any, Any]
    variables: Sequence[Any]
    split_ratios: tuple[int, ...] = (1,)
    first: int = 0
    towers: int = 1
    micro_batches: int = 1


def named(data: tuple[Any, Any, Any]) -> dict[str, Any]:
    """Returns the tensors of (x, y, sample_weight) by the names that a reader uses."""
    parts = dict(zip(_DATA, data, strict=True))
    return {
        path[0] + "".join(f"[{key!r}]" for key in path[1:]): tensor
        for path, tensor in keras.tree.flatten_with_path(parts)
        if tensor is not None
    }


def write(file: str, recorded: RecordedStep) -> None:
    """Writes a step to a file, for `locate`.

    Args:
        file: The file; its folders are created.
        recorded: The step.

    Raises:
        OSError: The file cannot be written.
        ValueError: The batch has ragged or sparse tensors.
    """
    arrays, paths = {}, []
    parts = dict(zip(_DATA, recorded.data, strict=True))
    for path, tensor in keras.tree.flatten_with_path(parts):
        if tensor is None:
            continue
        if not isinstance(tensor, tf.Tensor):
            raise ValueError("the batch has ragged or sparse tensors")
        arrays[f"data_{len(paths)}"] = _as_array(tensor)
        paths.append([*path, tensor.dtype.name])
    for i, value in enumerate(recorded.variables):
        arrays[f"variable_{i}"] = np.asarray(value)
    about = recorded._replace(data=paths, variables=len(recorded.variables))._asdict()
    arrays["about"] = np.array(json.dumps(about))
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with whole_file.opened(file, "wb") as written:
        np.savez(written, **arrays)


def read(file: str | os.PathLike) -> RecordedStep:
    """Reads a step that `write` has written.

    Raises:
        ValueError: The file does not hold a step.
    """
    try:
        with np.load(file) as arrays:
            about = json.loads(str(arrays["about"]))
            data = {}
            for i, (*path, dtype) in enumerate(about["data"]):
                tensor = tf.cast(tf.constant(arrays[f"data_{i}"]), dtype)
                _put(data, path, tensor)
            values = [arrays[f"variable_{i}"] for i in range(about["variables"])]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Received the file {os.fspath(file)}, which cannot be read ({error}); "
            "expected one that was written when a step was stopped by check_numerics."
        ) from error
    x, y, sample_weight = (_as_lists(data.get(name)) for name in _DATA)
    about |= {"data": (x, y, sample_weight), "variables": values}
    # Files of 0.2 tell where the loss was computed.
    about.pop("gathered", None)
    ratios = tuple(about.pop("split_ratios"))
    return RecordedStep(split_ratios=ratios, **about)


def _as_array(tensor):
    if tensor.dtype == tf.string:
        return np.asarray(tensor).astype(bytes)
    if tensor.dtype == tf.bfloat16:  # which NumPy's files do not know
        tensor = tf.cast(tensor, tf.float32)
    return np.asarray(tensor)


def _put(nest, path, tensor):
    for key in path[:-1]:
        nest = nest.setdefault(key, {})
    nest[path[-1]] = tensor


def _as_lists(nest):
    """Converts dictionaries with numbers for keys to lists."""
    if not isinstance(nest, dict):
        return nest
    parts = {key: _as_lists(part) for key, part in nest.items()}
    numbered = all(isinstance(key, int) for key in parts)
    return [*parts.values()] if numbered else parts


def find_row(given: Mapping[str, Any], name: str, row: np.ndarray) -> list[int]:
    """Finds a row that is not finite in the arrays that the batch came from.

    Args:
        given: The data arguments of `fit`, by name: x, y and sample_weight.
        name: The name of the tensor; see `named`.
        row: The row.

    Returns:
        The positions of all equal rows; none if the data are not arrays.
    """
    array = named([given.get(part) for part in _DATA]).get(name)
    if not hasattr(array, "__array__"):
        return []
    array = np.asarray(array)
    flat = array.reshape(len(array), -1).astype(row.dtype)
    (suspects,) = np.nonzero(~np.isfinite(flat).all(axis=1))
    row = row.ravel()
    return [int(i) for i in suspects if np.array_equal(flat[i], row, equal_nan=True)]

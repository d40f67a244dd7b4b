"""Finds values that a graph knows before it runs, more than TensorFlow does."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

# They keep the values and their order.
_KEEP = "ExpandDims", "Identity", "Reshape", "Squeeze"
_ELEMENTS = {
    "AddV2": np.add,
    "FloorMod": np.mod,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Sub": np.subtract,
}


def integers(tensor: tf.Tensor) -> list[int] | None:
    """Returns the known values of integers, in order, `None` if one is not known."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value.ravel().tolist()
    op = tensor.op
    if op.type in ("Slice", "StridedSlice"):
        return _picked(op)
    if op.type in _KEEP:
        return integers(op.inputs[0])
    if op.type == "Range":
        start, limit, delta = map(integers, op.inputs)
        known = None not in (start, limit, delta)
        return [*range(*start, *limit, *delta)] if known else None
    parts = [*map(integers, _parts(op))]
    if not parts or None in parts:
        return None
    if op.type in _ELEMENTS:
        return _ELEMENTS[op.type](*(np.array(part, int) for part in parts)).tolist()
    return [number for part in parts for number in part]


def leading(tensor: tf.Tensor, count: int) -> list[int] | None:
    """Returns the first integers of a tensor, `None` if one of them is not known."""
    if (known := integers(tensor)) is not None:
        return known[:count]
    op, numbers = tensor.op, []
    if op.type in _KEEP:
        return leading(op.inputs[0], count)
    for part in _parts(op) if op.type in ("Pack", "ConcatV2") else ():
        values = leading(part, count - len(numbers))
        if values is None:
            return None
        numbers += values
        if len(numbers) == count:
            return numbers
    return None


def _parts(op: tf.Operation) -> Sequence[tf.Tensor]:
    """Returns the tensors that an operation combines, in pairs or in a row."""
    if op.type in _ELEMENTS and op.outputs[0].dtype.is_integer:
        # There is only one way to pair the elements of vectors.
        return op.inputs if op.outputs[0].shape.rank in (0, 1) else ()
    vector = op.outputs and op.outputs[0].shape.rank == 1
    if op.type == "Pack":
        return op.inputs if vector or op.get_attr("axis") == 0 else ()
    if op.type == "ConcatV2":
        along = vector or tf.get_static_value(op.inputs[-1]) == 0
        return op.inputs[:-1] if along else ()
    return ()


def _picked(op: tf.Operation) -> list[int] | None:
    """Returns the known values of a part of a vector, such as a tensor's shape."""
    source = op.inputs[0]
    positions = [*map(integers, op.inputs[1:])]
    values = integers(source) if source.shape.rank == 1 else None
    if source.op.type == "Shape" and source.op.inputs[0].shape.rank is not None:
        values = source.op.inputs[0].shape.as_list()
    if None in positions or values is None:
        return None
    if op.type == "Slice":
        (begin,), (size,) = positions
        picked = values[begin : None if size < 0 else begin + size]
    else:
        if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
            return None
        (begin,), (end,), (step,) = positions
        if op.get_attr("shrink_axis_mask"):
            picked = [values[begin]]
        else:
            begin = None if op.get_attr("begin_mask") else begin
            end = None if op.get_attr("end_mask") else end
            picked = values[begin:end:step]
    return None if None in picked else picked

"""Values that a graph knows before it runs, more of them than TensorFlow tells."""

import numpy as np
import tensorflow as tf


def integers(tensor: tf.Tensor) -> list[int] | None:
    """Returns the known value of a vector of integers, `None` if it is not known."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value.ravel().tolist()
    op = tensor.op
    if op.type in ("Slice", "StridedSlice") and op.inputs[0].op.type == "Shape":
        return _of_shape(op)
    if op.type in ("ExpandDims", "Identity", "Reshape", "Squeeze"):
        return integers(op.inputs[0])
    if op.type == "Range":
        start, limit, delta = map(integers, op.inputs)
        known = None not in (start, limit, delta)
        return [*range(*start, *limit, *delta)] if known else None
    if op.type not in ("Sub", "AddV2", "Pack", "ConcatV2"):
        return None
    parts = [integers(part) for part in op.inputs[: -1 if "tV2" in op.type else None]]
    if None in parts:
        return None
    if op.type in ("Sub", "AddV2"):
        sign = -1 if op.type == "Sub" else 1
        return [int(each) for each in np.add(parts[0], sign * np.array(parts[1], int))]
    return [each for part in parts for each in part]


def _of_shape(op: tf.Operation) -> list[int] | None:
    """The known value of a part of a tensor's shape."""
    shape = op.inputs[0].op.inputs[0].shape
    places = [*map(integers, op.inputs[1:])]
    if None in places or shape.rank is None:
        return None
    if op.type == "Slice":
        (begin,), (size,) = places
        found = shape[begin : None if size < 0 else begin + size].as_list()
    else:
        if op.get_attr("new_axis_mask") or op.get_attr("ellipsis_mask"):
            return None
        (begin,), (end,), (step,) = places
        if op.get_attr("shrink_axis_mask"):
            found = [shape[begin]]
        else:
            begin = None if op.get_attr("begin_mask") else begin
            end = None if op.get_attr("end_mask") else end
            found = shape.as_list()[begin:end:step]
    return None if None in found else found

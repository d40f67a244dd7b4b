"""Values that a graph knows before it runs, more of them than TensorFlow tells."""

import tensorflow as tf


def integers(tensor: tf.Tensor) -> list[int] | None:
    """Returns the known value of a vector of integers, `None` if it is not known."""
    value = tf.get_static_value(tensor)
    if value is not None:
        return value.ravel().tolist()
    op = tensor.op
    if op.type == "Slice" and op.inputs[0].op.type == "Shape":
        begin, size = map(integers, op.inputs[1:])
        shape = op.inputs[0].op.inputs[0].shape
        if begin is None or size is None or shape.rank is None:
            return None
        found = shape[begin[0] : begin[0] + size[0]].as_list()
        return None if None in found else found
    if op.type == "Range":
        start, limit, delta = map(integers, op.inputs)
        known = None not in (start, limit, delta)
        return [*range(*start, *limit, *delta)] if known else None
    if op.type not in ("Sub", "Pack", "ConcatV2"):
        return None
    parts = [integers(part) for part in op.inputs[: -1 if "V2" in op.type else None]]
    if None in parts:
        return None
    if op.type == "Sub":
        return [a - b for a, b in zip(*parts, strict=True)]
    return [each for part in parts for each in part]

"""Values that are linear in sums over rows, such as `0.9 * v + 0.1 * sum(rows)`.

Each tower adds its sum to its fraction of what the rows do not touch. The towers' parts
then add up to the value of the whole batch.
"""

import tensorflow as tf

from towers.analysis.dependence import Reader
from towers.analysis.kinds import MEAN, NONE, SIZE, SUM

# Whether a value is weighted by the tower's fraction; or that of each of what it is
# made of.
Weights = bool | list["Weights"]

_ADDS = {"Add": tf.add, "AddV2": tf.add, "Sub": tf.subtract}
# Linear in the first one alone, and in the second one of a product.
_SCALES = {"Mul": tf.multiply, "RealDiv": tf.divide}
_PASSES = "Identity", "StopGradient"


def weights(reader: Reader, value: tf.Tensor) -> Weights | None:
    """Returns how a tower's parts of a value are weighted; `None` if it is not linear.

    Args:
        reader: Tells how tensors depend on the rows.
        value: A tensor of the graph that is read.
    """
    kind, op = reader.of(value), value.op
    if kind in (SUM, SIZE):
        return False
    if kind in (NONE, MEAN):
        return True
    if op.type not in (*_ADDS, *_SCALES, *_PASSES):
        return None
    found = [weights(reader, each) for each in op.inputs]
    if op.type in _SCALES:
        # One of the factors has to be alike on all towers, and stays as it is.
        alike = [reader.of(each) is NONE for each in op.inputs]
        if op.type == "RealDiv" and not alike[1]:
            return None
        if not any(alike):
            return None
        found[alike.index(True)] = False
    return None if None in found else found


def weighted(value: tf.Tensor, how: Weights, fraction: tf.Tensor) -> tf.Tensor:
    """Returns a tower's part of a value; the parts of all towers add up.

    Args:
        value: A tensor of the graph that is traced.
        how: What `weights` has returned, of this graph or of another trace.
        fraction: Which part of the batch the tower has.
    """
    if how is True:
        return value * tf.cast(fraction, value.dtype)
    if how is False:
        return value
    parts = [
        weighted(each, one, fraction)
        for each, one in zip(value.op.inputs, how, strict=True)
    ]
    compute = (_ADDS | _SCALES).get(value.op.type)
    return compute(*parts) if compute else parts[0]

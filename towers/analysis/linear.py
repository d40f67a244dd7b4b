"""Values that are linear in sums over rows, such as `0.9 * v + 0.1 * sum(rows)`.

Each tower adds its sum to its fraction of what the rows do not touch. The towers' parts
then add up to the value of the whole batch.
"""

import tensorflow as tf

from towers.analysis.dependence import Reader
from towers.analysis.kinds import MEAN, NONE, SIZE, SUM
from towers.analysis.layer_calls import key

# The terms of a value, each behind those that it is computed from. Of such a term, the
# places of its inputs, `None` for a factor that stays as it is. Of any other, whether
# it is multiplied by the tower's fraction.
Weights = list[bool | tuple[int | None, ...]]

_ADDS = {"Add": tf.add, "AddV2": tf.add, "Sub": tf.subtract}
# Linear in the first one alone, and in the second one of a product.
_SCALES = {"Mul": tf.multiply, "RealDiv": tf.divide}
_PASSES = dict.fromkeys(("Identity", "StopGradient"), tf.identity)
_COMPUTE = _ADDS | _SCALES | _PASSES


def weights(reader: Reader, value: tf.Tensor) -> Weights | None:
    """Returns how a tower's parts of a value are weighted; `None` if it is not linear.

    Args:
        reader: Tells how tensors depend on the rows.
        value: A tensor of the graph that is read.
    """
    terms, places, waiting = [], {}, [value]
    # No recursion: a sum may be longer than Python's stack is deep.
    while waiting:
        tensor = waiting[-1]
        kind = reader.of(tensor)
        if kind in (SUM, SIZE, NONE, MEAN):
            term = kind in (NONE, MEAN)
        else:
            inputs = _linear_inputs(reader, tensor.op)
            if inputs is None:
                return None
            known = [part is None or key(part) in places for part in inputs]
            if not all(known):
                waiting.append(inputs[known.index(False)])
                continue
            term = tuple(part if part is None else places[key(part)] for part in inputs)
        waiting.pop()
        places[key(tensor)] = len(terms)
        terms.append(term)
    return terms


def _linear_inputs(reader, op):
    """Returns the inputs in which an operation is linear; `None` if there is none.

    `None` stands in the place of a factor.
    """
    if op.type in (*_ADDS, *_PASSES):
        return op.inputs
    if op.type not in _SCALES:
        return None
    # One of the factors has to be alike on all towers, and stays as it is.
    first, second = op.inputs
    if reader.of(second) is NONE:
        return first, None
    if op.type == "Mul" and reader.of(first) is NONE:
        return None, second
    return None


def weighted(value: tf.Tensor, terms: Weights, fraction: tf.Tensor) -> tf.Tensor:
    """Returns a tower's part of a value; the parts of all towers add up.

    Args:
        value: A tensor of the graph that is traced.
        terms: The weights that `weights` has returned, of this graph or another trace.
        fraction: The part of the batch that the tower has.
    """
    # From the value back to what it is computed from, which is numbered before it.
    tensors = {len(terms) - 1: value}
    for place in reversed(range(len(terms))):
        if isinstance(terms[place], tuple):
            tensors |= zip(terms[place], tensors[place].op.inputs, strict=True)
    parts = []
    for place, term in enumerate(terms):
        tensor = tensors[place]
        if isinstance(term, tuple):
            op = tensor.op
            inputs = [
                factor if part is None else parts[part]
                for part, factor in zip(term, op.inputs, strict=True)
            ]
            tensor = _COMPUTE[op.type](*inputs)
        elif term:
            tensor = tensor * tf.cast(fraction, tensor.dtype)
        parts.append(tensor)
    return parts[-1]

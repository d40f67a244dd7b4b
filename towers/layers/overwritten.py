"""Variables that are overwritten with their gradient, as Keras's float8 has them.

Where a layer computes in 8 bits, it keeps a scale and a history of largest absolute
values, for its inputs, its kernel and its outputs' gradient (delayed scaling, as in
NVIDIA's Transformer Engine). Their new values come as their gradients. The scale is
made of the old history, so it is the same on all towers. The new history is the old one
with the largest absolute value of the batch, which is the largest of the towers'. A
tower's gradients have the size that they have on one device (see `trace.py`), so this
holds for their histories, too. Keras also takes the largest when it accumulates
gradients.

If a model uses a layer twice, one device adds up what both uses return. So a tower
keeps the uses apart: the largest is taken for each, and then they are added.
"""

import keras
import tensorflow as tf

from towers.keras_adapter.layers import layers_of

_FLOAT8 = [
    f"{of}_{what}"
    for of in ("inputs", "kernel", "outputs_grad")
    for what in ("scale", "amax_history")
]


def others(model: keras.Model) -> list[keras.Variable]:
    """Returns those that are not of Keras's float8: how they combine is unknown."""
    known = {
        id(getattr(layer, name, None))
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.Dense | keras.layers.EinsumDense)
        for name in _FLOAT8
    }
    variables = model.trainable_variables
    return [v for v in variables if v.overwrite_with_gradient and id(v) not in known]


def each_use(gradient: tf.Tensor) -> list[tf.Tensor]:
    """Returns what each use of a variable returned for it, as a largest value.

    Args:
        gradient: The sum of all uses, in a graph.
    """
    waiting, found = [gradient], []
    while waiting:
        current = waiting.pop()
        if current.op.type in ("AddN", "AddV2", "Identity"):
            waiting += current.op.inputs
        else:
            found.append(tf.reduce_max(current[tf.newaxis], axis=0))
    return found

"""A small tower, traced and cut."""

import keras
import tensorflow as tf

from towers.analysis.layer_calls import key
from towers.keras_adapter.graphs import made_in
from towers.layers.pipeline import LayerPlacement, Pipeline
from towers.partition.trace import Labels
from towers.stages.staged import Staged


def cut(model, stages, placement="auto", recompute="none"):
    """Traces and cuts a tower that returns outputs, and a sum's gradients."""
    placed = LayerPlacement(model, stages, placement)
    pipeline = Pipeline(stages, 2, "1f1b", recompute, placed)
    x = [tf.TensorSpec(each.shape, each.dtype) for each in model.inputs]
    _, staged = traced(model, pipeline, x[0] if len(x) == 1 else x)
    return staged


def traced(model, pipeline, spec):
    """Returns the function of such a tower, and what it is cut into."""
    labels = Labels(pipeline.parts)

    trained = model.trainable_variables

    @tf.function(autograph=False)
    def tower(x, values):
        # TensorFlow traces once more what creates variables.
        labels.forget()
        mapping = [*zip(trained, values, strict=True)]
        with tf.GradientTape() as tape, keras.StatelessScope(mapping):
            tape.watch(values)
            outputs = model(x, training=True)
            floats = [t for t in tf.nest.flatten(outputs) if t.dtype.is_floating]
            sums = [tf.reduce_sum(tf.cast(t, tf.float32)) for t in floats]
            total = tf.add_n([tf.zeros([]), *sums])
        with made_in(total.graph) as made:
            gradients = tape.gradient(total, values)
        labels.note_gradients(made)
        gradients = [t for t in gradients if t is not None]
        return outputs, [*map(tf.convert_to_tensor, gradients)]

    specs = [tf.TensorSpec(each.shape, each.dtype) for each in trained]
    with labels.noting_layers():
        found = tower.get_concrete_function(spec, specs)
    graph, count = found.graph, len(found.inputs) - len(found.captured_inputs)
    inputs, known = found.inputs[:count], pipeline.parts_of_handles
    parts = {key(inside): known.get(id(outside)) for outside, inside in graph.captures}
    values = zip(inputs[count - len(specs) :], trained, strict=True)
    parts |= {key(t): known.get(id(v.value.handle)) for t, v in values}
    return found, Staged(graph, inputs, found.outputs, labels, pipeline, parts)

"""The `parameter_server` builder: variables at home, updated once a step.

Each step, every tower gets the variables' values from home and computes its part of the
gradient; the parts are added on one device, and the optimizer is applied once. The
recipe is that of the CIFAR-10 multi-GPU tutorial and of tf_cnn_benchmarks'
`variable_update=parameter_server`.
"""

import functools
import warnings
from typing import Any

import keras
import tensorflow as tf

from towers import reduce, tower
from towers.builders.base import Builder
from towers.loss import is_separable


class ParameterServer(Builder):
    """Towers that fetch the variables and send back gradients, synchronously."""

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch; see `Builder.train_step`."""
        self.build(data)
        data = keras.utils.unpack_x_y_sample_weight(data)
        values = self.read()
        with tf.device(self.home):
            scale = tf.ones([])
            if self.model.optimizer is not None:
                scale = self.model.optimizer.scale_loss(scale)

        results = self._separate(values, data, scale)
        if results is None:
            results, outputs, loss = self._gathered(values, data, scale)
        else:
            outputs, loss = self._sum_losses(results, data)

        self._update_weights(results)
        self.update_state(results, data[0])
        with tf.device(self.home):
            return self.update_metrics(data, outputs, loss)

    def _separate(self, values, data, scale):
        """Computes the loss on the towers; returns `None` if it cannot be cut."""
        if not is_separable(self.model):
            return None
        function = functools.partial(tower.forward_backward, self.model)
        results = self.run(function, *values, data, scale)
        # What the outputs are like shows only now. Nothing was assigned, so results can
        # be dropped; the graph leaves out what nobody uses.
        return results if _counts_equally(results[0]) else None

    def _sum_losses(self, results, data):
        """Adds the towers' parts of the loss, and tracks it."""
        outputs = self.gather(results, data[0])
        with tf.device(self.home):
            loss = tf.add_n([result.loss for result in results])
            losses = self.model._compile_loss
            if losses is not None and losses.metrics:
                # With several outputs Keras also tracks each one's loss. A tower
                # cannot, so this is done once more for the whole batch.
                losses(data[1], outputs, data[2])
        return outputs, loss

    def _gathered(self, values, data, scale):
        """Computes the loss at home, from the outputs of all towers.

        The towers run forward; home computes the loss and its gradient for the outputs;
        the towers carry that gradient back.
        """
        x = data[0]
        results = self.run(self.forward(training=True), *values, x)
        outputs = self.gather(results, x)
        with tf.device(self.home):
            losses = self.sum_layer_losses(results)
            targets = tf.nest.flatten(outputs)
            with tf.GradientTape() as tape:
                tape.watch([targets, losses])
                loss = self.whole_loss(data, outputs, losses, training=True)
                scaled = loss * tf.cast(scale, loss.dtype)
            wanted = tape.gradient(scaled, [targets, losses])
            for_outputs, for_losses = tf.nest.map_structure(_dense, wanted)
        function = functools.partial(tower.backward, self.model)
        back = self.run(function, *values, (x, for_outputs), for_losses)
        results = [
            result._replace(gradients=again.gradients)
            for result, again in zip(results, back, strict=True)
        ]
        return results, outputs, loss

    def _update_weights(self, results):
        variables = self.model.trainable_variables
        if not variables:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
            return
        with tf.device(self.merge), tf.name_scope("reduce"):
            gradients = reduce.sum_gradients([r.gradients for r in results])
        with tf.device(self.home), tf.name_scope("apply"):
            self.model.optimizer.apply(gradients, variables)


def _counts_equally(result):
    """Whether each example weighs the same in the loss of these outputs.

    With a mask it does not. Without a second axis, Keras takes the examples themselves
    for the values of one.
    """
    masks = tf.nest.flatten(result.masks)
    ranks = [output.shape.rank for output in tf.nest.flatten(result.outputs)]
    return all(mask is None for mask in masks) and all(
        rank is not None and rank > 1 for rank in ranks
    )


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)

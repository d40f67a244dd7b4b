"""What all builders share: running the towers, test and predict steps, metrics.

A builder is three steps, those of a Keras model: each takes one global batch. How often
they are called, and what becomes of their results, is Keras's business.
"""

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers import batch, reduce, tower
from towers.tower import TowerResult


class Builder(abc.ABC):
    """Builds the steps that K towers take together.

    Subclasses say how the variables are updated, in `train_step`.

    Attributes:
        model: The user's model; its variables are the shared variables.
        devices: One device string for each tower.
        home: The device of the shared variables: updates, losses of gathered outputs
            and metrics are computed there.
        merge: The device on which gradients are added.
    """

    def __init__(
        self, model: keras.Model, devices: Sequence[str], home: str, merge: str
    ):
        self.model = model
        self.devices = tuple(devices)
        self.home = home
        self.merge = merge

    @abc.abstractmethod
    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch.

        Args:
            data: What Keras's `train_step` gets: x, (x, y) or (x, y, sample_weight),
                nests of tensors with one row an example.

        Returns:
            The model's metrics, by name.
        """

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch: forward on the towers, loss and metrics at home.

        Args:
            data: As for `train_step`.

        Returns:
            The model's metrics, by name.
        """
        self.build(data)
        data = keras.utils.unpack_x_y_sample_weight(data)
        results = self.run(self.forward(training=False), *self.read(), data[0])
        outputs = self.gather(results, data[0])
        self.update_state(results, data[0])
        with tf.device(self.home):
            losses = self.sum_layer_losses(results)
            loss = self.whole_loss(data, outputs, losses, training=False)
            return self.update_metrics(data, outputs, loss)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch.

        Args:
            data: As for `train_step`; only x is used.

        Returns:
            The model's outputs: a nest of tensors, one row an example, in order.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        if not self.model.built:
            with tf.init_scope(), tf.device(self.home):
                self.model(_symbolic(x))
        results = self.run(self.forward(training=False), *self.read(), x)
        self.update_state(results, x)
        return self.gather(results, x)

    def build(self, data: Any) -> None:
        """Creates what Keras creates late: variables of model, metrics and optimizer.

        A tower cannot create a variable, so all have to exist before one is traced.

        Args:
            data: A batch; only its shapes and types are used.
        """
        with tf.init_scope(), tf.device(self.home):
            self.model._symbolic_build(data_batch=_symbolic(data))

    def forward(self, training: bool) -> Callable[..., TowerResult]:
        """Returns the tower function that only computes outputs."""
        return functools.partial(tower.forward, self.model, training)

    def read(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Reads parameters and state, once for all towers.

        Returns:
            The values of the trainable and of the non-trainable variables, at home.
        """
        with tf.device(self.home), tf.name_scope("read"):
            return (
                [tf.convert_to_tensor(v.value) for v in self.model.trainable_variables],
                [
                    tf.convert_to_tensor(v.value)
                    for v in self.model.non_trainable_variables
                ],
            )

    def run(
        self,
        function: Callable[..., TowerResult],
        params: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        whole: Any,
        *extra: Any,
    ) -> list[TowerResult]:
        """Runs a tower function on all towers, each with its share of a batch.

        Args:
            function: A function of `towers.tower`, its model bound. It takes params,
                state, share, fraction and `extra`.
            params: Values of the trainable variables.
            state: Values of the non-trainable variables.
            whole: The batch to cut: a nest of tensors with one row an example.
            *extra: Tensors that all towers get alike.

        Returns:
            The results of the towers that have a share, or may have one.
        """
        if len(self.devices) > 1:
            tower.refuse_synchronized(self.model)
        size = batch.batch_size(whole)
        fractions = batch.fractions(whole, len(self.devices))
        if not self.model.run_eagerly:
            even = isinstance(size, int) and size % len(self.devices) == 0
            specs = [
                *_specs([params, state]),
                batch.share_spec(whole, size // len(self.devices) if even else None),
                tf.TensorSpec([], tf.float32),
                *_specs(extra),
            ]
            function = tower.Traced(function, specs, bool(self.model.jit_compile))

        def arguments(k, start, end):
            share = batch.take(whole, start, end)
            seeded = tower.own_seeds(self.model, state, k)
            return params, seeded, share, fractions[k], *extra

        return tower.run(function, self.devices, size, arguments)

    def gather(self, results: Sequence[TowerResult], whole: Any) -> Any:
        """Joins the towers' outputs at home, with their masks.

        Args:
            results: The towers' results.
            whole: The batch that was cut.

        Returns:
            The outputs for the whole batch: a nest of tensors, one row an example.
        """
        for output in tf.nest.flatten(results[0].outputs):
            if output is not None and output.shape.rank == 0:
                raise tower.ModelError(
                    f"Model '{self.model.name}' returns a scalar, which towers cannot "
                    "join; expected outputs with one row an example."
                )
        bounds = batch.share_bounds(batch.batch_size(whole), len(self.devices))
        sizes = [end - start for start, end in bounds[: len(results)]]
        with tf.device(self.home), tf.name_scope("gather"):
            outputs = batch.join([r.outputs for r in results], sizes)
            masks = batch.join([r.masks for r in results], sizes)
        for output, mask in zip(
            tf.nest.flatten(outputs), tf.nest.flatten(masks), strict=True
        ):
            if mask is not None:
                output._keras_mask = mask
        return outputs

    def sum_layer_losses(self, results: Sequence[TowerResult]) -> list[tf.Tensor]:
        """Adds the towers' parts of each loss that layers added."""
        by_loss = zip(*(result.losses for result in results), strict=True)
        return [tf.add_n(parts) for parts in by_loss]

    def update_state(self, results: Sequence[TowerResult], whole: Any) -> None:
        """Assigns what the towers made of the model's non-trainable variables.

        Args:
            results: The towers' results.
            whole: The batch that was cut.
        """
        fractions = batch.fractions(whole, len(self.devices))[: len(results)]
        with tf.device(self.home), tf.name_scope("state"):
            state = reduce.combine_states([r.state for r in results], fractions)
            for variable, value in zip(
                self.model.non_trainable_variables, state, strict=True
            ):
                if value is not None:
                    variable.assign(value)

    def whole_loss(
        self, data: Any, outputs: Any, losses: Sequence[tf.Tensor], training: bool
    ) -> tf.Tensor:
        """Computes the loss of a whole batch from gathered outputs, as Keras does.

        Args:
            data: (x, y, sample_weight) of the whole batch.
            outputs: The gathered outputs.
            losses: The losses that layers added, of the whole batch.
            training: Whether this is training.

        Returns:
            The loss, a scalar.
        """
        x, y, sample_weight = data
        override = self.model._losses_override
        override.extend(losses)
        try:
            return self.model._compute_loss(
                x, y, outputs, sample_weight, training=training
            )
        finally:
            override.clear()

    def update_metrics(
        self, data: Any, outputs: Any, loss: tf.Tensor
    ) -> dict[str, tf.Tensor]:
        """Updates the model's metrics with a whole batch, as Keras does.

        Args:
            data: (x, y, sample_weight) of the whole batch.
            outputs: The gathered outputs.
            loss: The loss of the whole batch.

        Returns:
            The metrics' results, by name.
        """
        x, y, sample_weight = data
        self.model._loss_tracker.update_state(loss, sample_weight=batch.batch_size(x))
        return self.model.compute_metrics(x, y, outputs, sample_weight)


def _symbolic(data):
    return tf.nest.map_structure(
        lambda t: None if t is None else _symbolic_tensor(t), data
    )


def _symbolic_tensor(tensor):
    return keras.KerasTensor(
        tensor.shape,
        tensor.dtype.name,
        sparse=isinstance(tensor, tf.SparseTensor),
        ragged=isinstance(tensor, tf.RaggedTensor),
    )


def _specs(tensors):
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec(t.shape, t.dtype), list(tensors)
    )

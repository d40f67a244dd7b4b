"""The passes of a tower: what a model computes on one device, for its local batch.

A tower is a pure function of parameters, state and local batch: it assigns no variable,
so it can be traced once, compiled, called on any device, K times side by side. It
returns *parts*: of the global batch's loss, and of its gradient, already divided by the
global weight; adding the towers' parts gives what one device computes. Cutting the
batch is `batch.py`'s business, adding parts `reduce.py`'s, and applying them a
builder's.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError, Rules
from towers.keras_adapter.layers import TAGS, has_training_argument, logits_of, tag
from towers.keras_adapter.models import compiled_loss, total_of_added_loss
from towers.tower.errors import ModelError
from towers.tower.scope import stateless


class TowerResult(NamedTuple):
    """What one tower returns.

    Attributes:
        outputs: The model's outputs for the local batch: a nest of tensors, one row an
            example.
        tags: What Keras keeps beside an output, for losses and metrics: for each of
            `TAGS`, the same nest, `None` where an output has no such tag.
        state: New values of the model's variables, trainable ones first; `None` for
            those that the model did not assign.
        loss: This tower's part of the global batch's loss: a scalar, `None` from
            `forward`.
        losses: This tower's parts of the losses that layers add (regularizers,
            `add_loss`): scalars. Empty from `forward_backward`, whose loss holds them.
        gradients: One part for each trainable variable: of the loss's gradient, sparse
            ones sparse, `None` where the loss does not depend on the variable. Of a
            variable that is overwritten with its gradient, each use's, stacked; see
            `overwritten.py`. Empty from `forward`.
        size: Number of examples in the local batch: an int or a scalar tensor. `run`
            fills it in.
        fraction: Size of the local batch over that of the global batch: a float32
            scalar. `run` fills it in.
        tower: Index of the tower. `run` fills it in.
    """

    outputs: Any = ()
    tags: Sequence[Any] = ()
    state: Sequence[tf.Tensor | None] = ()
    loss: tf.Tensor | None = None
    losses: Sequence[tf.Tensor] = ()
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None] = ()
    size: int | tf.Tensor | None = None
    fraction: tf.Tensor | None = None
    tower: int | None = None


def forward(
    model: keras.Model,
    training: bool,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    x: Any,
    fraction: tf.Tensor,
) -> TowerResult:
    """Computes the outputs of one local batch.

    Args:
        model: A built Keras model. Its variables are not read.
        training: Whether layers behave as in training.
        rules: How losses and state of all towers combine.
        params: Values of `model.trainable_variables`; `None` for tables of which rows
            are looked up, and nothing else (see `embeddings.py`).
        state: Values of `model.non_trainable_variables`.
        x: The local batch's inputs: a nest of tensors with one row an example.
        fraction: Size of the local batch over that of the global batch: a float32
            scalar.

    Returns:
        Outputs, tags, new state and the parts of the layers' losses.
    """
    with rules.reading(x), stateless(model, params, state) as scope:
        return _forward(model, training, rules, scope, x, fraction)


def forward_backward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    local_batch: Any,
    fraction: tf.Tensor,
    scale: tf.Tensor,
) -> TowerResult:
    """Computes one local batch's part of the loss and of its gradient.

    Dividing by the global weight happens here, once, at the loss: the values that flow
    back through the network are then those of one device with the whole batch, which
    matters where they are 16 bits wide.

    Here `local_batch` is (x, y, sample_weight), each a nest of tensors with one row an
    example, and `scale` the optimizer's loss scale, 1 without one: a float32 scalar.
    The other arguments are as for `forward`; the model is compiled.

    Returns:
        Outputs, tags, new state, the part of the loss (not scaled) and the parts of
        the gradients (scaled).

    Raises:
        NoRuleError: While tracing, if the loss cannot be put together from parts, or
            does more than compute.
    """
    x, y, sample_weight = local_batch
    with (
        rules.reading(local_batch),
        tf.GradientTape() as tape,
        stateless(model, params, state, tape) as scope,
    ):
        result = _forward(model, True, rules, scope, x, fraction)
        losses = [*result.losses]
        if (losses_of := compiled_loss(model)) is not None:
            with scope.without_effects():
                loss = losses_of(y, result.outputs, sample_weight)
            if loss.shape.rank != 0:
                raise NoRuleError("a loss with several values")
            losses.insert(0, rules.part("loss", loss, fraction))
        loss = tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses])
        scaled = loss * tf.cast(scale, loss.dtype)
    gradients = scope.gradients(scaled)
    return result._replace(loss=loss, losses=(), gradients=gradients)


def backward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    local_batch: Any,
    fraction: tf.Tensor,
    loss_gradients: Sequence[tf.Tensor | None],
) -> TowerResult:
    """Carries the gradient of gathered outputs back through one local batch.

    The forward pass runs once more; the tower is pure, so it gives the same values.
    That buys simplicity with time, in the rare case of a loss that cannot be cut.

    Here `local_batch` is (x, output_gradients): the inputs, and their rows of the
    loss's gradient for each of the `differentiable` outputs, grouped by example.
    `loss_gradients` has the loss's gradient for each of the layers' losses. The other
    arguments are the same as for `forward`.

    Returns:
        The parts of the gradients, and nothing else.
    """
    x, output_gradients = local_batch
    _, back = taped_forward(model, rules, params, state, x, fraction)
    return back(output_gradients, loss_gradients)


def taped_forward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    x: Any,
    fraction: tf.Tensor,
) -> tuple[TowerResult, Callable[..., TowerResult]]:
    """Computes the outputs of a local batch, and keeps what its gradient needs.

    Returns:
        What `forward` returns in training, of the same arguments; and a function that
        does, once, what `backward` does, of `output_gradients` and `loss_gradients`.
    """
    with tf.GradientTape() as tape, stateless(model, params, state, tape) as scope:
        result = _forward(model, True, rules, scope, x, fraction)

    def back(output_gradients, loss_gradients):
        targets = [*differentiable(result.outputs), *result.losses]
        seeds = [*output_gradients, *loss_gradients]
        used = [
            (target, tf.reshape(seed, tf.shape(target)))
            for target, seed in zip(targets, seeds, strict=True)
            if seed is not None
        ]
        targets, seeds = [t for t, _ in used], [s for _, s in used]
        gradients = scope.gradients(targets, seeds)
        return TowerResult(gradients=gradients)

    return result, back


def probe(
    model: keras.Model,
    training: bool,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    x: Any,
    fraction: tf.Tensor,
) -> TowerResult:
    """Computes the outputs of one local batch, and the gradient of a sum over its rows.

    The arguments are as for `forward`.

    Returns:
        Outputs, tags and gradients, and nothing else.
    """
    with tf.GradientTape() as tape, stateless(model, params, state, tape) as scope:
        result = _forward(model, training, Rules(1), scope, x, fraction)
        floats = [
            tf.cast(output, tf.float32)
            for output in tf.nest.flatten(result.outputs, expand_composites=True)
            if output.dtype.is_floating
        ]
        # Each element has a gradient of its own.
        target = tf.add_n([tf.reduce_sum(t * (1 + t / 2)) for t in floats or [0.0]])
    gradients = scope.gradients(target)
    return TowerResult(result.outputs, result.tags, gradients=gradients)


def differentiable(outputs: Any) -> list[tf.Tensor]:
    """Returns all that a loss of outputs may depend on: them, and their logits."""
    flat = tf.nest.flatten(outputs)
    return [*flat, *(logits for logits in map(logits_of, flat) if logits is not None)]


def _forward(model, training, rules, scope, x, fraction):
    outputs = call(model, x, training)
    rules.look_at([outputs, _tags(outputs)])
    added = len(scope.losses)
    losses = [
        # Behind those that calls have added come regularizers.
        _layer_loss(model, rules, f"loss {i}", loss, fraction, alike=i >= added)
        for i, loss in enumerate(model.losses)
    ]
    state = scope.new_state(rules)
    return TowerResult(outputs, _tags(outputs), state, losses=losses)


def call(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model as Keras's own steps do: it need not know `training`."""
    if has_training_argument(model):
        return model(x, training=training)
    return model(x)


def _layer_loss(model, rules, name, loss, fraction, alike):
    # Keras adds up a loss with several values.
    loss = total_of_added_loss(model, loss)
    try:
        return rules.part(name, loss, fraction, alike)
    except NoRuleError as error:
        raise ModelError(
            f"A layer of model '{model.name}' calls add_loss with a value that towers "
            f"cannot put together from their local batches, because of {error}; "
            "expected a mean or a sum over examples, so move the loss to "
            "`compile(loss=...)`, or pass loss_placement='tower' to multi_gpu_model if "
            "it is a mean all the same."
        ) from error


def _tags(outputs):
    return [
        tf.nest.map_structure(lambda tensor, name=name: tag(tensor, name), outputs)
        for name in TAGS
    ]

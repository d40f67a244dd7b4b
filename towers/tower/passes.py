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

from towers.analysis.rules import NoRuleError, Rules, loss_names
from towers.keras_adapter.layers import TAGS, has_training_argument, logits_of, tag
from towers.keras_adapter.models import (
    compiled_loss,
    losses_recorded,
    total_of_added_loss,
)
from towers.layers.labels import gradient_tape
from towers.layers.seeds import own_seeds
from towers.tower import metrics
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
        output_losses: Its parts of each output's loss: scalars, if there are several.
        metrics: What it adds to the variables of compiled metrics; see `metrics.py`.
        losses: This tower's parts of the losses that layers add (regularizers,
            `add_loss`): scalars. Empty from `forward_backward`, whose loss holds them.
        gradients: One part for each trainable variable, or each shard of it (see
            `sharded.targets`): of the loss's gradient, sparse ones sparse, `None` where
            the loss does not depend on the variable. Of a variable that is overwritten
            with its gradient, each use's, stacked; see `overwritten.py`. Empty from
            `forward`.
        size: Number of examples in the local batch: an int or a scalar tensor. `run`
            fills it in.
        fraction: Size of the local batch over that of the global batch: a float64
            scalar. `run` fills it in.
        tower: Index of the tower. `run` fills it in.
    """

    outputs: Any = ()
    tags: Sequence[Any] = ()
    state: Sequence[tf.Tensor | None] = ()
    loss: tf.Tensor | None = None
    output_losses: Sequence[tf.Tensor] = ()
    metrics: Sequence[tf.Tensor | None] = ()
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
        state: Values of `variables.not_trained`.
        x: The local batch's inputs: a nest of tensors with one row an example.
        fraction: Size of the local batch over that of the global batch: a float64
            scalar.

    Returns:
        Outputs, tags, new state and the parts of the layers' losses.
    """
    with (
        rules.reading(x, own_seeds(model, state)),
        stateless(model, params, state) as scope,
    ):
        return _forward(model, training, rules, scope, x, fraction)


def forward_backward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    local_batch: Any,
    fraction: tf.Tensor,
    scale: tf.Tensor,
    totals: Sequence[tf.Tensor],
) -> TowerResult:
    """Computes one local batch's part of the loss and of its gradient.

    Dividing by the global weight happens here, once, at the loss: the values that flow
    back through the network are then those of one device with the whole batch, which
    matters where they are 16 bits wide.

    Here `local_batch` is (x, y, sample_weight), each a nest of tensors with one row an
    example, and perhaps the y that metrics are to see. `scale` is the optimizer's loss
    scale, 1 without one: a float32 scalar. `totals` are those of the whole batch that
    `rules.loss_graph` takes. The other arguments are as for `forward`; the model is
    compiled.

    Returns:
        Outputs, tags, new state, changes of metrics, the part of the loss (not scaled)
        and the parts of the gradients (scaled).

    Raises:
        NoRuleError: While tracing, if the loss cannot be put together from parts, or
            does more than compute.
    """
    with (
        rules.reading(local_batch, own_seeds(model, state)),
        gradient_tape() as tape,
        stateless(model, params, state, tape) as scope,
    ):
        result = _forward(model, True, rules, scope, local_batch[0], fraction)
        loss = _Loss(model, rules, scope, local_batch, result, fraction, totals)
        scaled = loss.on_tape(scale)
        with tape.stop_recording():
            changes = _metrics(model, rules, local_batch, result)
    gradients = scope.gradients(*loss.targets(scaled, scale))
    return result._replace(
        loss=loss.total,
        output_losses=loss.of_outputs,
        losses=(),
        metrics=changes,
        gradients=gradients,
    )


def evaluate(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
    state: Sequence[tf.Tensor],
    local_batch: Any,
    fraction: tf.Tensor,
    totals: Sequence[tf.Tensor],
) -> TowerResult:
    """Computes one local batch's part of the loss, as `forward_backward` in inference.

    Returns:
        Outputs, tags, new state, changes of metrics, and the part of the loss.

    Raises:
        NoRuleError: As from `forward_backward`.
    """
    with (
        rules.reading(local_batch, own_seeds(model, state)),
        stateless(model, params, state) as scope,
    ):
        result = _forward(model, False, rules, scope, local_batch[0], fraction)
        loss = _Loss(model, rules, scope, local_batch, result, fraction, totals)
        changes = _metrics(model, rules, local_batch, result)
    return result._replace(
        loss=loss.total, output_losses=loss.of_outputs, losses=(), metrics=changes
    )


class _Loss:
    """A local batch's part of the loss, where towers compute it.

    Attributes:
        total: The part of the loss: a scalar.
        of_outputs: Its parts for each output, if there are several.
    """

    def __init__(self, model, rules, scope, local_batch, result, fraction, totals):
        self._added = [*result.losses]
        self._outputs = differentiable(result.outputs)
        self._on_tape = rules.loss_graph is None
        values = []
        if compiled_loss(model) is not None:
            _, y, sample_weight = local_batch[:3]
            outputs, others = result.outputs, [result.tags, y, sample_weight]
            if rules.loss_graph is not None:
                values = rules.loss_graph.values(outputs, others, totals)
            else:
                values = _compiled_losses(model, scope, outputs, y, sample_weight)
                rules.read_losses(values, outputs, others)
        parts = [
            rules.part(name, value, fraction)
            for name, value in zip(loss_names(len(values)), values, strict=True)
        ]
        self._compiled, self.of_outputs = parts[:1], parts[1:]
        self.total = _sum([*self._compiled, *self._added])

    def on_tape(self, scale):
        """The part of the scaled loss that the tape has recorded."""
        losses = [*self._compiled, *self._added] if self._on_tape else self._added
        return _sum(losses) * tf.cast(scale, losses[0].dtype) if losses else None

    def targets(self, scaled, scale):
        """What the tape is to differentiate, and with which gradients."""
        if self._on_tape:
            return scaled, None
        # The tape knows nothing of a graph that was copied.
        (loss,), outputs = self._compiled, self._outputs
        loss = loss * tf.cast(scale, loss.dtype)
        seeds = tf.gradients(loss, outputs, stop_gradients=outputs)
        pairs = [
            (output, tf.convert_to_tensor(seed))
            for output, seed in zip(outputs, seeds, strict=True)
            if seed is not None
        ]
        if scaled is not None:
            pairs.append((scaled, tf.ones_like(scaled)))
        return [target for target, _ in pairs], [seed for _, seed in pairs]


def _compiled_losses(model, scope, outputs, y, sample_weight):
    """The compiled loss, and behind it that of each output if there are several."""
    with scope.without_effects(), losses_recorded(model) as of_outputs:
        loss = compiled_loss(model)(y, outputs, sample_weight)
    if loss.shape.rank != 0:
        raise NoRuleError("a loss with several values")
    return [loss, *of_outputs]


def _sum(losses):
    return tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses])


def _metrics(model, rules, local_batch, result):
    """What the local batch adds to the metrics, where towers update them."""
    if not rules.measures or tf.executing_eagerly():
        return []
    # As they were before any preprocessing.
    y = local_batch[3] if len(local_batch) > 3 else local_batch[1]
    return metrics.changes(model, rules, y, result.outputs, local_batch[2])


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
    with gradient_tape() as tape, stateless(model, params, state, tape) as scope:
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
    with gradient_tape() as tape, stateless(model, params, state, tape) as scope:
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
    tags = _tags(outputs)
    rules.look_at([outputs, tags])
    added = len(scope.losses)
    losses = [
        # Behind those that calls have added come regularizers.
        _layer_loss(model, rules, f"loss {i}", loss, fraction, alike=i >= added)
        for i, loss in enumerate(model.losses)
    ]
    state = scope.new_state(rules, fraction)
    return TowerResult(outputs, tags, state, losses=losses)


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
        tf.nest.map_structure(
            lambda output, name=name: _for_each_row(output, tag(output, name)), outputs
        )
        for name in TAGS
    ]


def _for_each_row(output, value):
    """A tag with a row for each example, also where one stands for all.

    Such is the mask of the scores of causal attention.
    """
    if value is None or value.shape[:1] != [1] or output.shape[:1] == [1]:
        return value
    sizes = tf.shape(value)
    others = [sizes[i] if n is None else n for i, n in enumerate(value.shape)][1:]
    return tf.broadcast_to(value, tf.stack([tf.shape(output)[0], *others]))

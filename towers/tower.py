"""The tower: a model's computation on one device, for its share of the batch.

A tower is a pure function of parameters, state and share: it assigns no variable, so it
can be traced once, compiled, called on any device, K times side by side. It returns
*parts*: of the global batch's loss, and of its gradient, already divided by the global
weight; adding the towers' parts gives what one device computes. Cutting the
batch is `batch.py`'s business, adding parts `reduce.py`'s, and applying them a
builder's.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import batch, fused


class ModelError(ValueError):
    """A model does something that a tower, as a pure function, cannot do."""


class TowerResult(NamedTuple):
    """What one tower returns.

    Attributes:
        outputs: The model's outputs for the share: a nest of tensors, one row an
            example.
        masks: The Keras masks of the outputs: the same nest, `None` where an output has
            no mask.
        state: New values of the model's non-trainable variables, `None` for those that
            the tower did not change.
        loss: This tower's part of the global batch's loss: a scalar, `None` from
            `forward`.
        losses: This tower's parts of the losses that layers add (regularizers,
            `add_loss`): scalars. Empty from `forward_backward`, whose loss holds them.
        gradients: One part for each trainable variable: of the loss's gradient, sparse
            ones sparse, `None` where the loss does not depend on the variable. Empty
            from `forward`.
    """

    outputs: Any = ()
    masks: Any = ()
    state: Sequence[tf.Tensor | None] = ()
    loss: tf.Tensor | None = None
    losses: Sequence[tf.Tensor] = ()
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None] = ()


def forward(
    model: keras.Model,
    training: bool,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    x: Any,
    fraction: tf.Tensor,
) -> TowerResult:
    """Computes the outputs of one share.

    Args:
        model: A built Keras model. Its variables are not read.
        training: Whether layers behave as in training.
        params: Values of `model.trainable_variables`.
        state: Values of `model.non_trainable_variables`.
        x: The share's inputs: a nest of tensors with one row an example.
        fraction: Size of the share over that of the global batch: a float32 scalar.

    Returns:
        Outputs, masks, new state and the parts of the layers' losses.
    """
    with _stateless(model, params, state) as scope:
        outputs = _call(model, x, training)
        losses = [loss * tf.cast(fraction, loss.dtype) for loss in _layer_losses(model)]
        new_state = _new_state(model, params, state, scope)
    return TowerResult(outputs, _masks(outputs), new_state, losses=losses)


def forward_backward(
    model: keras.Model,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    share: Any,
    fraction: tf.Tensor,
    scale: tf.Tensor,
) -> TowerResult:
    """Computes one share's part of the loss and of its gradient.

    Dividing by the global weight happens here, once, at the loss: the values that flow
    back through the network are then those of one device with the whole batch, which
    matters where they are 16 bits wide.

    Args:
        model: A built, compiled Keras model. Its variables are not read.
        params: Values of `model.trainable_variables`.
        state: Values of `model.non_trainable_variables`.
        share: (x, y, sample_weight), each a nest of tensors with one row an example.
        fraction: Size of the share over that of the global batch: a float32 scalar.
        scale: The optimizer's loss scale, 1 without one: a float32 scalar.

    Returns:
        Outputs, masks, new state, the part of the loss (not scaled) and the parts of
        the gradients (scaled).
    """
    x, y, sample_weight = share
    with tf.GradientTape() as tape:
        tape.watch(params)
        with _stateless(model, params, state) as scope:
            outputs = _call(model, x, training=True)
            _layer_losses(model)
            loss = model._compute_loss(x, y, outputs, sample_weight, training=True)
            new_state = _new_state(model, params, state, scope)
        loss = loss * tf.cast(fraction, loss.dtype)
        scaled = loss * tf.cast(scale, loss.dtype)
    gradients = _gradients(tape, scaled, params)
    return TowerResult(outputs, _masks(outputs), new_state, loss, (), gradients)


def backward(
    model: keras.Model,
    params: Sequence[tf.Tensor],
    state: Sequence[tf.Tensor],
    share: Any,
    fraction: tf.Tensor,
    loss_gradients: Sequence[tf.Tensor | None],
) -> TowerResult:
    """Carries the gradient of gathered outputs back through one share.

    The forward pass runs once more; the tower is pure, so it gives the same values.
    That buys simplicity with time, in the rare case of a loss that cannot be cut.

    Args:
        model: A built Keras model. Its variables are not read.
        params: Values of `model.trainable_variables`.
        state: Values of `model.non_trainable_variables`, the same as for `forward`.
        share: (x, output_gradients): the share's inputs, and its rows of the loss's
            gradient for each output, flattened.
        fraction: Size of the share over that of the global batch: a float32 scalar.
        loss_gradients: The loss's gradient for each of the layers' losses.

    Returns:
        The parts of the gradients, and nothing else.
    """
    x, output_gradients = share
    with tf.GradientTape() as tape:
        tape.watch(params)
        again = forward(model, True, params, state, x, fraction)
    targets = [*tf.nest.flatten(again.outputs), *again.losses]
    seeds = [*output_gradients, *loss_gradients]
    used = [(t, s) for t, s in zip(targets, seeds, strict=True) if s is not None]
    gradients = _gradients(tape, [t for t, _ in used], params, [s for _, s in used])
    return TowerResult(gradients=gradients)


def _gradients(tape, targets, params, seeds=None):
    gradients = tape.gradient(targets, params, seeds)
    for gradient, param in zip(gradients, params, strict=True):
        # TensorFlow does not always infer it, and an idle tower has to know it.
        if isinstance(gradient, tf.IndexedSlices):
            gradient.values.set_shape([None, *param.shape[1:]])
        elif gradient is not None:
            gradient.set_shape(param.shape)
    return gradients


def _layer_losses(model):
    """The losses that layers add, which all have to be means over the examples."""
    losses = list(model.losses)
    for loss in losses:
        if loss.shape.rank != 0:
            raise ModelError(
                f"A layer of model '{model.name}' adds a loss of shape {loss.shape}; "
                "expected a scalar, the mean over the examples, so call "
                "`add_loss(ops.mean(loss))`."
            )
    return losses


def _call(model, x, training):
    # As Keras's own train_step does: a model need not have the argument.
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)


def _masks(outputs):
    return tf.nest.map_structure(lambda t: getattr(t, "_keras_mask", None), outputs)


@contextlib.contextmanager
def _stateless(model, params, state) -> Iterator[keras.StatelessScope]:
    """Inside, the model computes with the given values and assigns nothing."""
    mapping = [
        *zip(model.trainable_variables, params, strict=True),
        *zip(model.non_trainable_variables, state, strict=True),
    ]
    try:
        with (
            keras.StatelessScope(mapping, collect_losses=True) as scope,
            fused.batch_normalization(),
        ):
            yield scope
    except ValueError as error:
        if "stateless scope" not in str(error):
            raise
        raise ModelError(
            f"Model '{model.name}' creates a variable while it is called, which a "
            "tower cannot do; create all variables in `__init__` or `build`."
        ) from error


def _new_state(model, params, state, scope):
    """Reads from `scope` what the call made of the state."""
    _refuse_others(model, params, scope)
    seeds = _seed_ids(model)
    new_state = []
    for variable, old in zip(model.non_trainable_variables, state, strict=True):
        new = scope.get_current_value(variable)
        if new is old:
            new_state.append(None)
            continue
        if not new.dtype.is_floating and id(variable) not in seeds:
            raise ModelError(
                f"Model '{model.name}' changes the variable '{variable.path}' of type "
                f"{new.dtype.name} while it is called, and no rule combines the "
                "towers' values of it; expected a float variable, whose mean is taken."
            )
        new_state.append(new)
    return new_state


def refuse_synchronized(model: keras.Model) -> None:
    """Refuses layers that ask to be computed for all towers together.

    Args:
        model: A model that is to run on several towers.

    Raises:
        ModelError: If there is such a layer.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ModelError(
                f"The layer '{layer.name}' has synchronized=True, which towers cannot "
                "do yet; use synchronized=False, and each tower normalises its share."
            )


def _refuse_others(model, params, scope):
    """Raises if the call changed a variable that a tower does not carry."""
    for variable, old in zip(model.trainable_variables, params, strict=True):
        if scope.get_current_value(variable) is not old:
            raise ModelError(
                f"Model '{model.name}' assigns its trainable variable "
                f"'{variable.path}' while it is called, which towers cannot carry; "
                "leave trainable variables to the optimizer."
            )
    # Those of the compiled losses are updated again, for the whole batch.
    known = [*model.variables]
    known += model._compile_loss.variables if model._compile_loss else []
    unknown = scope.state_mapping.keys() - {id(variable) for variable in known}
    if not unknown:
        return
    for metric in model.metrics:
        if any(id(variable) in unknown for variable in metric.variables):
            raise ModelError(
                f"Model '{model.name}' updates its metric '{metric.name}' while it is "
                "called, which towers cannot carry; pass the metric to "
                "`compile(metrics=...)` instead."
            )
    raise ModelError(
        f"Model '{model.name}' changes a variable that is not among its own while it "
        "is called, such as Keras's global random seed; give each random op a "
        "`keras.random.SeedGenerator` that a layer creates in `__init__`, and create "
        "other variables with `add_weight`."
    )


def _seed_ids(model):
    return {
        id(generator.state)
        for layer in model._flatten_layers()
        for generator in layer._seed_generators
    }


def own_seeds(
    model: keras.Model, state: Sequence[tf.Tensor], tower: int
) -> list[tf.Tensor]:
    """Gives a tower random seeds of its own.

    The first tower keeps the model's seeds, so that one tower draws what plain Keras
    draws. All others add a constant to the key and leave the counter, which every tower
    advances alike.

    Args:
        model: The model that `state` belongs to.
        state: Values of `model.non_trainable_variables`.
        tower: Index of the tower.

    Returns:
        The state, with each random seed's changed.
    """
    if tower == 0:
        return list(state)
    seeds = _seed_ids(model)
    # Odd and large: towers and neighbouring seeds do not meet.
    shift = [tower * 0x9E3779B1, 0]
    return [
        value + tf.constant(shift, value.dtype) if id(variable) in seeds else value
        for variable, value in zip(model.non_trainable_variables, state, strict=True)
    ]


class Traced:
    """A tower traced once, to be called on any device for a share of any size."""

    def __init__(
        self, tower: Callable[..., TowerResult], specs: Sequence[Any], xla: bool
    ):
        """Traces `tower`.

        Args:
            tower: A tower function with its model bound, that takes tensors.
            specs: A `tf.TensorSpec` (or a nest of them) for each argument.
            xla: Whether XLA compiles the tower: once for each device and size of share.

        Raises:
            ModelError: If the model assigns a variable behind Keras's back.
        """
        # A trace remembers the device scope it was made in, and this one is for all.
        with tf.device(None):
            function = tf.function(tower, autograph=False, jit_compile=xla)
            self._concrete = function.get_concrete_function(*specs)
        _refuse_assignments(self._concrete.graph)

    def __call__(self, *arguments: Any) -> TowerResult:
        """Adds one call of the tower to the graph, on the device of the scope."""
        return self._concrete(*arguments)

    def idle(self, none: tf.Tensor) -> TowerResult:
        """Returns what a tower without examples contributes: zeros, and no rows.

        Args:
            none: A scalar that is 0 when the tower is idle. A constant would make the
                graph believe that this tower never has examples.
        """

        def nothing(tensor):
            if tensor is None:
                return None
            sizes = [none if size is None else size for size in tensor.shape]
            return tf.fill(
                tf.stack(sizes) if sizes else [], tf.cast(none, tensor.dtype)
            )

        return tf.nest.map_structure(
            nothing, self._concrete.structured_outputs, expand_composites=True
        )


def _refuse_assignments(graph):
    writers = [op for op in graph.get_operations() if op.type.startswith("Assign")]
    if writers:
        raise ModelError(
            f"The model assigns a tf.Variable while it is called "
            f"('{writers[0].name}'), which a tower cannot carry; make it a Keras "
            "variable with `self.add_weight(trainable=False)`, and assign that."
        )


def run(
    tower: Traced,
    devices: Sequence[str],
    size: int | tf.Tensor,
    arguments: Callable[[int, Any, Any], Sequence[Any]],
) -> list[TowerResult]:
    """Runs one tower on each device, each for its even share of a batch.

    Args:
        tower: The traced tower, or in eager execution its plain function.
        devices: One device string for each tower.
        size: Number of examples in the global batch: an int where it is known when
            the graph is built, else a scalar tensor.
        arguments: Given a tower's index and the bounds of its share, returns the
            arguments of its call. What it computes stays on the caller's device.

    Returns:
        The towers' results, in order. Towers known to be idle when the graph is built
        are left out; towers that turn out to be idle compute nothing and return zeros.
    """
    results = []
    bounds = batch.share_bounds(size, len(devices))
    for k, (device, (start, end)) in enumerate(zip(devices, bounds, strict=True)):
        if k > 0 and isinstance(size, int) and start == end:
            break
        values = arguments(k, start, end)
        call = functools.partial(tower, *values)
        with tf.name_scope(f"tower_{k}"), tf.device(device):
            # The first tower always has an example, unless there is none at all.
            if k == 0 or isinstance(size, int):
                results.append(call())
            else:
                idle = functools.partial(tower.idle, end - start)
                results.append(tf.cond(end > start, call, idle))
    return results

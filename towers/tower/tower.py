"""The tower: a model's computation on one device, for its share of the batch.

A tower is a pure function of parameters, state and share: it assigns no variable, so it
can be traced once, compiled, called on any device, K times side by side. It returns
*parts*: of the global batch's loss, and of its gradient, already divided by the global
weight; adding the towers' parts gives what one device computes. Cutting the
batch is `batch.py`'s business, adding parts `reduce.py`'s, and applying them a
builder's.
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from tensorflow.python.ops import custom_gradient

from towers.analysis import effects
from towers.analysis.rules import NoRuleError, Rules
from towers.collectives import reduce
from towers.collectives.placing import where_its_input_is
from towers.keras_adapter.replace import Replacement
from towers.layers import embeddings, fused, overwritten, seeds
from towers.layers.variables import seed_ids


class ModelError(ValueError):
    """A model does something that a tower, as a pure function, cannot do."""


# The mask of padded positions, and what a sigmoid or softmax was made of.
TAGS = "_keras_mask", "_keras_logits"


class UntraceableError(ModelError):
    """A model cannot be traced as a graph; the text says what hinders it."""


class TowerResult(NamedTuple):
    """What one tower returns.

    Attributes:
        outputs: The model's outputs for the share: a nest of tensors, one row an
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
        size: Number of examples in the share: an int or a scalar tensor. `run` fills it
            in.
        fraction: Size of the share over that of the global batch: a float32 scalar.
            `run` fills it in.
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
    """Computes the outputs of one share.

    Args:
        model: A built Keras model. Its variables are not read.
        training: Whether layers behave as in training.
        rules: How losses and state of all towers combine.
        params: Values of `model.trainable_variables`; `None` for tables of which rows
            are looked up, and nothing else (see `embeddings.py`).
        state: Values of `model.non_trainable_variables`.
        x: The share's inputs: a nest of tensors with one row an example.
        fraction: Size of the share over that of the global batch: a float32 scalar.

    Returns:
        Outputs, tags, new state and the parts of the layers' losses.
    """
    with rules.reading(x), _stateless(model, params, state) as scope:
        return _forward(model, training, rules, scope, x, fraction)


def forward_backward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
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
        rules: How losses and state of all towers combine.
        params: Values of `model.trainable_variables`; `None` for tables of which rows
            are looked up, and nothing else (see `embeddings.py`).
        state: Values of `model.non_trainable_variables`.
        share: (x, y, sample_weight), each a nest of tensors with one row an example.
        fraction: Size of the share over that of the global batch: a float32 scalar.
        scale: The optimizer's loss scale, 1 without one: a float32 scalar.

    Returns:
        Outputs, tags, new state, the part of the loss (not scaled) and the parts of
        the gradients (scaled).

    Raises:
        NoRuleError: While tracing, if the loss cannot be put together from parts, or
            does more than compute.
    """
    x, y, sample_weight = share
    with (
        rules.reading(share),
        tf.GradientTape() as tape,
        _stateless(model, params, state, tape) as scope,
    ):
        result = _forward(model, True, rules, scope, x, fraction)
        losses = [*result.losses]
        if model._compile_loss is not None:
            with _without_effects(model, scope):
                loss = model._compile_loss(y, result.outputs, sample_weight)
            if loss.shape.rank != 0:
                raise NoRuleError("a loss with several values")
            losses.insert(0, rules.part("loss", loss, fraction))
        loss = tf.add_n([tf.cast(loss, losses[0].dtype) for loss in losses])
        scaled = loss * tf.cast(scale, loss.dtype)
    gradients = _gradients(tape, scaled, model, scope)
    return result._replace(loss=loss, losses=(), gradients=gradients)


def backward(
    model: keras.Model,
    rules: Rules,
    params: Sequence[tf.Tensor | None],
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
        rules: How losses and state of all towers combine.
        params: Values of `model.trainable_variables`; `None` for tables of which rows
            are looked up, and nothing else (see `embeddings.py`).
        state: Values of `model.non_trainable_variables`, the same as for `forward`.
        share: (x, output_gradients): the share's inputs, and its rows of the loss's
            gradient for each of the `differentiable` outputs, grouped by example.
        fraction: Size of the share over that of the global batch: a float32 scalar.
        loss_gradients: The loss's gradient for each of the layers' losses.

    Returns:
        The parts of the gradients, and nothing else.
    """
    x, output_gradients = share
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
    """Computes the outputs of one share, and keeps what a gradient needs to go back.

    Args:
        model: As for `forward`, as are all others.
        rules: How losses and state of all towers combine.
        params: Values of `model.trainable_variables`.
        state: Values of `model.non_trainable_variables`.
        x: The share's inputs.
        fraction: Size of the share over that of the global batch.

    Returns:
        What `forward` returns in training; and a function that does, once, what
        `backward` does, of `output_gradients` and `loss_gradients`.
    """
    with tf.GradientTape() as tape, _stateless(model, params, state, tape) as scope:
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
        gradients = _gradients(tape, targets, model, scope, seeds)
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
    """Computes the outputs of one share, and the gradient of a sum over its rows.

    Args:
        model: A built Keras model. Its variables are not read.
        training: Whether layers behave as in training.
        params: Values of `model.trainable_variables`.
        state: Values of `model.non_trainable_variables`.
        x: The share's inputs: a nest of tensors with one row an example.
        fraction: Size of the share over that of the global batch: a float32 scalar.

    Returns:
        Outputs, tags and gradients, and nothing else.
    """
    with tf.GradientTape() as tape, _stateless(model, params, state, tape) as scope:
        result = _forward(model, training, Rules(1), scope, x, fraction)
        floats = [
            tf.cast(output, tf.float32)
            for output in tf.nest.flatten(result.outputs, expand_composites=True)
            if output.dtype.is_floating
        ]
        # Each element has a gradient of its own.
        target = tf.add_n([tf.reduce_sum(t * (1 + t / 2)) for t in floats or [0.0]])
    gradients = _gradients(tape, target, model, scope)
    return TowerResult(result.outputs, result.tags, gradients=gradients)


def differentiable(outputs: Any) -> list[tf.Tensor]:
    """Returns all that a loss of these outputs may depend on: them, and their logits.

    Args:
        outputs: The nest of tensors that a model returned.
    """
    flat = tf.nest.flatten(outputs)
    logits = [getattr(output, "_keras_logits", None) for output in flat]
    return [*flat, *(tensor for tensor in logits if tensor is not None)]


def _forward(model, training, rules, scope, x, fraction):
    outputs = call(model, x, training)
    rules.look_at([outputs, _tags(outputs)])
    added = len(scope.losses)
    losses = [
        # Behind those that calls have added come regularizers.
        _layer_loss(model, rules, f"loss {i}", loss, fraction, alike=i >= added)
        for i, loss in enumerate(model.losses)
    ]
    state = _new_state(model, rules, scope)
    return TowerResult(outputs, _tags(outputs), state, losses=losses)


def call(model: keras.Model, x: Any, training: bool) -> Any:
    """Calls a model as Keras's own steps do: it need not have the argument.

    Args:
        model: A Keras model.
        x: Its inputs.
        training: Whether layers behave as in training.

    Returns:
        The model's outputs.
    """
    if model._call_has_training_arg:
        return model(x, training=training)
    return model(x)


def _layer_loss(model, rules, name, loss, fraction, alike):
    # Keras adds up a loss with several values.
    loss = model._aggregate_additional_loss(loss)
    try:
        return rules.part(name, loss, fraction, alike)
    except NoRuleError as error:
        raise ModelError(
            f"A layer of model '{model.name}' calls add_loss with a value that towers "
            f"cannot put together from their shares of the batch, because of {error}; "
            "expected a mean or a sum over examples, so move the loss to "
            "`compile(loss=...)`, or pass loss_placement='tower' to multi_gpu_model if "
            "it is a mean all the same."
        ) from error


def _tags(outputs):
    return [
        tf.nest.map_structure(lambda t, name=name: getattr(t, name, None), outputs)
        for name in TAGS
    ]


class _Scope(keras.StatelessScope):
    """A stateless scope in which assigning means what it does to a variable."""

    def __init__(self, mapping, tape, tables=()):
        super().__init__(mapping, collect_losses=True)
        self._tape = tape
        self._tables = tables
        self._graph = tf.compat.v1.get_default_graph()
        # The values of the trainable variables, or what stands in for them.
        self.params = ()
        # By id of the variable: the values that it was assigned, in order, and the rows
        # that were looked up, with their indices.
        self.assigned = collections.defaultdict(list)
        self.looked_up = collections.defaultdict(list)
        # What each use of a variable got that is to be overwritten with its gradient.
        self.used = collections.defaultdict(list)

    def rows_of(self, variable, ids):
        """Looks up rows of a table in the variable itself; see `embeddings.py`.

        Returns `None` where the tower has the table as a value, or gradients would be
        lost: in a graph within the tower's, such as a branch of `tf.cond`.
        """
        inner = tf.compat.v1.get_default_graph() is not self._graph
        if inner or id(variable) not in self._tables:
            return None
        with tf.device(variable._value.device):
            ids = embeddings.not_negative(ids, variable._value)
            rows = tf.gather(variable._value, ids)
        if self._tape is not None:
            self._tape.watch(rows)
        self.looked_up[id(variable)].append((rows, ids))
        return rows

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        inner = tf.compat.v1.get_default_graph() is not self._graph
        if self._tape is None or inner or not variable.overwrite_with_gradient:
            return value
        value = tf.stop_gradient(value)
        self._tape.watch(value)
        self.used[id(variable)].append(value)
        return value

    def add_update(self, update):
        variable, value = update
        # No gradient flows through an assignment; it ends at the value assigned.
        value = tf.stop_gradient(value)
        if self._tape is not None and value.dtype.is_floating:
            self._tape.watch(value)
        self.assigned[id(variable)].append(value)
        super().add_update((variable, value))


@contextlib.contextmanager
def _stateless(model, params, state, tape=None) -> Iterator[_Scope]:
    """Inside, the model computes with the given values and assigns nothing."""
    variables = model.trainable_variables
    tables = {id(v) for v, p in zip(variables, params, strict=True) if p is None}
    params = _stand_in(model, params)
    if tape is not None:
        tape.watch(params)
    mapping = [
        *zip(variables, params, strict=True),
        *zip(model.non_trainable_variables, state, strict=True),
        # The loss of each output, which Keras tracks: home does so, of the whole batch.
        *((v, tf.zeros(v.shape, v.dtype)) for v in _of_loss(model)),
    ]
    try:
        with (
            seeds.sent_together(model, state),
            _Scope(mapping, tape, tables) as scope,
            fused.batch_normalization(),
        ):
            scope.params = params
            yield scope
    except ValueError as error:
        if "stateless scope" not in str(error):
            raise
        raise ModelError(
            f"Model '{model.name}' creates a variable while it is called, which a "
            "tower cannot do; create all variables in `__init__` or `build`."
        ) from error


def _of_loss(model):
    return model._compile_loss.variables if model._compile_loss else ()


@contextlib.contextmanager
def _without_effects(model, scope):
    """Inside, the compiled loss is computed: home does so if it does anything else."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = len(graph.get_operations()) if graph else 0
    assigned = {key: len(values) for key, values in scope.assigned.items()}
    yield
    for key in scope.assigned.keys() - {id(variable) for variable in _of_loss(model)}:
        if len(scope.assigned[key]) > assigned.get(key, 0):
            raise NoRuleError("a variable that it assigns")
    for effect in effects.of(graph.get_operations()[before:]) if graph else ():
        raise NoRuleError(str(effect))


_TABLE = "table_at_home"


def _stand_in(model, params):
    """Puts something that should not be used where a table stays at home."""
    return [
        tf.broadcast_to(tf.zeros([], v.dtype), v.shape, _TABLE) if p is None else p
        for v, p in zip(model.trainable_variables, params, strict=True)
    ]


def _gradients(tape, targets, model, scope, seeds=None):
    """The gradient for each trainable variable: of all the values that it has had."""
    variables, params = model.trainable_variables, scope.params
    values = [
        [param, *scope.assigned.get(id(variable), ())]
        for variable, param in zip(variables, params, strict=True)
    ]
    looked_up = [scope.looked_up[id(variable)] for variable in variables]
    rows = [[rows for rows, _ in each] for each in looked_up]
    used = [scope.used[id(variable)] for variable in variables]
    of_values, of_rows, of_uses = tape.gradient(targets, [values, rows, used], seeds)
    gradients = []
    for i, variable in enumerate(variables):
        if variable.overwrite_with_gradient:
            gradients.append(overwritten.stack([*of_values[i], *of_uses[i]]))
            continue
        if any(gradient is None for gradient in of_rows[i]):
            # It got lost, as in `vectorized_map`: the table itself is needed.
            tf.identity(params[i])
        tables = [
            _of_table(variable, gradient, ids)
            for gradient, (_, ids) in zip(of_rows[i], looked_up[i], strict=True)
        ]
        gradients.append(reduce.add([*of_values[i], *tables]))
    for variable, gradient, param in zip(variables, gradients, params, strict=True):
        # TensorFlow does not always infer it, and an idle tower has to know it.
        if isinstance(gradient, tf.IndexedSlices):
            gradient.values.set_shape([None, *param.shape[1:]])
        elif gradient is not None:
            uses = [gradient.shape[0]] if variable.overwrite_with_gradient else []
            gradient.set_shape([*uses, *param.shape])
    return gradients


def _of_table(variable, gradient, ids):
    """The gradient of a table, from that of its rows `ids`."""
    if gradient is None:
        return None
    with tf.device(ids.device):
        indices = tf.reshape(ids, [-1])
    return tf.IndexedSlices(
        values=tf.reshape(gradient, [-1, *variable.shape[1:]]),
        indices=indices,
        dense_shape=tf.constant(list(variable.shape), ids.dtype),
    )


def _new_state(model, rules, scope):
    """Reads what the call made of the model's variables, and finds the rules."""
    _refuse_others(model, scope)
    normalized = {
        id(variable)
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization)
        for variable in layer.non_trainable_variables
    }
    own_seeds = seed_ids(model)
    new_state = []
    variables = model.trainable_variables + model.non_trainable_variables
    for i, variable in enumerate(variables):
        assigned = scope.assigned.get(id(variable))
        new_state.append(assigned[-1] if assigned else None)
        if not assigned:
            continue
        # Of which TensorFlow may not know all, as of gradients.
        assigned[-1].set_shape(variable.shape)
        if id(variable) in normalized:
            rules.mean(f"state {i}")
            continue
        try:
            rules.state(f"state {i}", assigned[-1], alike=id(variable) in own_seeds)
        except NoRuleError as error:
            raise ModelError(
                f"Model '{model.name}' assigns '{variable.path}' a value that towers "
                f"cannot put together from their shares of the batch, because of "
                f"{error}; expected a mean or a sum over examples, or a mean added to "
                "what does not depend on them, so pass strict=False to multi_gpu_model "
                "to accept the mean of the towers' values."
            ) from error
    return new_state


def refuse_stateful(model: keras.Model) -> None:
    """Refuses layers that keep a state for each row of the batch.

    Args:
        model: A model that is to run on several towers.

    Raises:
        ModelError: If there is such a layer.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"The layer '{layer.name}' is stateful: it keeps a value for each row "
                "of the batch, which towers cannot cut; use stateful=False."
            )


def is_synchronized(model: keras.Model) -> bool:
    """Tells whether towers have to run together, as layers talk to one another."""
    return any(
        getattr(layer, "synchronized", False) for layer in model._flatten_layers()
    )


def _refuse_others(model, scope):
    """Raises if the call changed a variable that a tower does not carry."""
    known = [*model.variables, *_of_loss(model)]
    unknown = scope.assigned.keys() - {id(variable) for variable in known}
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


class Traced:
    """A traced tower, to be called on any device: for any share, or for one size."""

    def __init__(
        self,
        tower: Callable[..., TowerResult],
        specs: Sequence[Any],
        xla: bool,
        apart: bool,
        on_gpu: bool = False,
    ):
        """Traces `tower`.

        Args:
            tower: A tower function with its model bound, that takes tensors.
            specs: A `tf.TensorSpec` (or a nest of them) for each argument, which tell
                whether the number of examples is known.
            xla: Whether XLA compiles the tower: once for each device and size of share.
            apart: Whether the tower stays a function of its own. Otherwise TensorFlow
                copies it into the step's graph, once for each device, and optimises
                them all together: a longer start for a slightly faster step.
            on_gpu: Whether the tower is to run on a GPU.

        Raises:
            ModelError: If the model needs to know the number of examples.
        """
        self.specs = specs
        options = {"jit_compile": xla}
        if apart:
            options["experimental_attributes"] = {"_noinline": True}
        try:
            with contextlib.ExitStack() as elsewhere:
                # XLA compiles for one device: what is on another is not there for it.
                if not xla:
                    elsewhere.enter_context(embeddings.at_home(on_gpu))
                if on_gpu and not xla:
                    elsewhere.enter_context(seeds.on_the_host())
                self._concrete = _trace(tower, *specs, **options)
        except (TypeError, ValueError) as error:
            if isinstance(error, ModelError | NoRuleError) or "None" not in str(error):
                raise
            raise UntraceableError(
                "The model could not be called with an unknown number of examples, as "
                "towers do; expected no use of a static one, so write ops.shape(x)[0] "
                f"instead of x.shape[0]. It said: {error}"
            ) from error

    def __call__(self, *arguments: Any) -> TowerResult:
        """Adds one call of the tower to the graph, on the device of the scope."""
        return self._concrete(*arguments)

    def of_size(self, size: tf.Tensor, idle: bool, *arguments: Any) -> TowerResult:
        """Adds one call of the tower, for a share of a size that the graph finds out.

        Args:
            size: Number of examples in the share: an int32 scalar.
            idle: Whether there may be none, for which nothing is computed.
            *arguments: As for a call.
        """
        return self._guarded(size, *arguments) if idle else self(*arguments)

    @functools.cached_property
    def _guarded(self):
        # Traced once for all towers, too: an idle tower's branch is long.
        def guarded(size, *arguments):
            call = functools.partial(self._concrete, *arguments)
            return tf.cond(size > 0, call, functools.partial(self.idle, size))

        return _trace(guarded, tf.TensorSpec([], tf.int32), *self.specs)

    @property
    def needs_tables(self) -> bool:
        """Whether a table is used otherwise than to look up rows."""
        return any(
            op.name.startswith(_TABLE)
            and op.type == "BroadcastTo"
            and op.outputs[0].consumers()
            for op in self._concrete.graph.get_operations()
        )

    @property
    def effects(self) -> Iterator[effects.Effect]:
        """What it does besides computing."""
        return effects.of(self._concrete.graph.get_operations())

    @property
    def returned(self) -> TowerResult:
        """What a call returns, in shapes and types."""
        return self._concrete.structured_outputs

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
            text = tensor.dtype == tf.string
            value = tf.constant("") if text else tf.cast(none, tensor.dtype)
            return tf.fill(tf.stack(sizes) if sizes else [], value)

        return tf.nest.map_structure(nothing, self.returned, expand_composites=True)


class Sized:
    """A tower traced for the usual size of its share, and for all others."""

    def __init__(self, usual: Traced, other: Traced, rows: int):
        """Joins two traces of one tower.

        Args:
            usual: That for `rows` examples.
            other: That for any number of them.
            rows: The usual number.
        """
        self._usual, self._other, self._rows = usual, other, rows

    def of_size(self, size: tf.Tensor, idle: bool, *arguments: Any) -> TowerResult:
        """Adds one call of the tower; see `Traced.of_size`."""
        return (self._with_idle if idle else self._never_idle)(size, *arguments)

    @functools.cached_property
    def _with_idle(self):
        return self._choice(True)

    @functools.cached_property
    def _never_idle(self):
        return self._choice(False)

    def _choice(self, idle):
        def choose(size, *arguments):
            def usual():
                fixed = tf.nest.map_structure(
                    _of_shape, list(arguments), list(self._usual.specs)
                )
                return self._usual(*fixed)

            other = functools.partial(self._other.of_size, size, idle, *arguments)
            return tf.cond(tf.equal(size, self._rows), usual, other)

        return _trace(choose, tf.TensorSpec([], tf.int32), *self._other.specs)


def _of_shape(tensor, spec):
    if tensor is None or tensor.shape == spec.shape:
        return tensor
    # All of it. From `ensure_shape`, or `reshape`, TensorFlow would conclude that the
    # tensor has this shape in the other branch, too.
    sizes = [-1 if size is None else size for size in spec.shape]
    return tf.slice(tensor, [0] * len(sizes), sizes)


def _trace(function, *specs, **options):
    """Traces a function to be called on any device."""
    # A trace remembers the device scope that it was made in.
    placed = contextlib.nullcontext()
    if not tf.executing_eagerly():
        placed = tf.compat.v1.device(where_its_input_is)
    with tf.device(None), placed:
        function = tf.function(function, autograph=False, **options)
        return function.get_concrete_function(*specs)


class Share(NamedTuple):
    """What one tower is to compute.

    Attributes:
        device: Where, as a string.
        size: Number of its examples: an int where it is known when the graph is built,
            else a scalar tensor.
        fraction: Size over that of the global batch: a float32 scalar.
        arguments: The arguments of the tower function.
    """

    device: str
    size: int | tf.Tensor
    fraction: tf.Tensor
    arguments: Sequence[Any]


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Inside, calls that draw random numbers or check something wait for no other.

    TensorFlow would make towers wait for one another, in the order of the calls.
    """
    graph = tf.compat.v1.get_default_graph()
    manager = None if tf.executing_eagerly() else graph.experimental_acd_manager
    before = len(graph.get_operations()) if manager else 0
    yield
    for op in graph.get_operations()[before:] if manager else ():
        if op._is_stateful:
            manager.run_independently(op)


def run(towers: Sequence[Traced | Sized], shares: Sequence[Share]) -> list[TowerResult]:
    """Runs one tower on each device, none waiting for another.

    Args:
        towers: The traced towers, or in eager execution plain functions.
        shares: One for each tower.

    Returns:
        The towers' results, in order. Towers known to be idle when the graph is built
        are left out; towers that turn out to be idle compute nothing and return zeros.
    """
    results = []
    for k, (tower, share) in enumerate(zip(towers, shares, strict=True)):
        known = isinstance(share.size, int)
        # The first tower always has an example, unless there is none at all.
        if k > 0 and known and share.size == 0:
            continue
        with tf.name_scope(f"tower_{k}"), tf.device(share.device):
            if known:
                result = tower(*share.arguments)
            else:
                result = tower.of_size(share.size, k > 0, *share.arguments)
        about = {"size": share.size, "fraction": share.fraction, "tower": k}
        results.append(result._replace(**about))
    return results


def run_together(
    tower: Callable[..., TowerResult],
    traced: Traced | None,
    shares: Sequence[Share],
    whole: Callable[[], Share],
) -> list[TowerResult]:
    """Runs towers whose layers talk to one another, such as synchronized normalisation.

    `tf.distribute.MirroredStrategy` runs them, as replicas, for which Keras has written
    such layers. No variable is mirrored, as towers have none. A batch that would leave
    a tower idle is computed by one alone, as nobody would answer for the idle one.

    Args:
        tower: The plain tower function.
        traced: The same, traced; `None` in eager execution.
        shares: One for each tower.
        whole: Makes one of all of them.

    Returns:
        The towers' results, in order.
    """

    def together():
        return _replicated(tower, shares)

    def alone():
        with tf.name_scope("tower_0"), tf.device(shares[0].device):
            everything = whole()
            result = (traced or tower)(*everything.arguments)
        if traced is None:
            size, fraction = everything.size, everything.fraction
            return [result._replace(size=size, fraction=fraction)]
        idle = [traced.idle(tf.zeros([], tf.int32)) for _ in shares[1:]]
        weights = [(everything.size, everything.fraction)]
        weights += [(0, tf.zeros([]))] * len(idle)
        return [
            one._replace(size=tf.convert_to_tensor(size), fraction=fraction)
            for one, (size, fraction) in zip([result, *idle], weights, strict=True)
        ]

    sizes = [share.size for share in shares]
    if all(isinstance(size, int) for size in sizes):
        results = together() if min(sizes) > 0 else alone()
    else:
        results = tf.cond(tf.reduce_min(tf.stack(sizes)) > 0, together, alone)
    return [result._replace(tower=k) for k, result in enumerate(results)]


def _replicated(tower, shares):
    results = {}

    @tf.autograph.experimental.do_not_convert
    def replica():
        context = tf.distribute.get_replica_context()
        k = int(tf.get_static_value(context.replica_id_in_sync_group))
        # A replica is a thread.
        with tf.name_scope(f"tower_{k}"), _search.by(lambda search, **_: []):
            results[k] = tower(*shares[k].arguments)

    _strategy(tuple(share.device for share in shares)).run(replica)
    return [
        results[k]._replace(size=share.size, fraction=share.fraction)
        for k, share in enumerate(shares)
    ]


# Keras's all-reduce is a custom gradient; TensorFlow would search the graph behind each
# for variables, of which towers have none: minutes for a deep network.
_search = Replacement(custom_gradient, "_get_dependent_variables")


@functools.cache
def _strategy(devices):
    # NCCL would not take several logical devices of one GPU.
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

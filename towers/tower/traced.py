"""Traced towers: graphs for any device, and for local batches of any size or of one."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from towers.analysis import effects
from towers.analysis.rules import NoRuleError
from towers.collectives.placing import where_its_input_is
from towers.keras_adapter.graphs import is_placed
from towers.layers import embeddings, seeds
from towers.layers.labels import Labels
from towers.tower.errors import ModelError, UntraceableError
from towers.tower.passes import TowerResult
from towers.tower.scope import ROWS, TABLE


class Traced:
    """A traced tower: for any device, and for local batches of any size or of one."""

    def __init__(
        self,
        tower: Callable[..., TowerResult],
        specs: Sequence[Any],
        xla: bool,
        noinline: bool,
        on_gpu: bool = False,
        labels: Labels | None = None,
    ):
        """Traces `tower`.

        Args:
            tower: A tower function with its model bound, that takes tensors.
            specs: A `tf.TensorSpec` (or a nest of them) for each argument, which tell
                whether the number of examples is known.
            xla: Whether XLA compiles the tower: once for each device and size of local
                batch.
            noinline: Whether the tower stays a function of its own, if all of it runs
                on one device. If not, TensorFlow copies it into the step's graph, once
                for each device, and optimises them all together: a longer start for a
                slightly faster step.
            on_gpu: Whether the tower is to run on a GPU.
            labels: Notes what operations are made for, if anything does.

        Raises:
            ModelError: If the model needs to know the number of examples.
        """
        self.specs = specs
        try:
            with contextlib.ExitStack() as elsewhere:
                # XLA compiles for one device: what is on another is not there for it.
                if not xla:
                    elsewhere.enter_context(embeddings.at_home(on_gpu))
                if on_gpu and not xla:
                    elsewhere.enter_context(seeds.on_the_host())
                if labels is not None:
                    elsewhere.enter_context(labels.noting_layers())
                self._concrete = _trace(tower, *specs, jit_compile=xla)
        except (TypeError, ValueError) as error:
            if isinstance(error, ModelError | NoRuleError) or "None" not in str(error):
                raise
            raise UntraceableError(
                "The model could not be called with an unknown number of examples, as "
                "towers do; expected no use of a static one, so write ops.shape(x)[0] "
                f"instead of x.shape[0]. It said: {error}"
            ) from error
        self._function = traced = self._concrete
        if noinline and not is_placed(self.graph.as_graph_def()):
            self._function = _trace(
                lambda *arguments: traced(*arguments),
                *specs,
                experimental_attributes={"_noinline": True},
            )

    def __call__(self, *arguments: Any) -> TowerResult:
        """Adds one call of the tower to the graph, on the device of the scope."""
        return self._function(*arguments)

    def of_size(self, size: tf.Tensor, idle: bool, *arguments: Any) -> TowerResult:
        """Adds one call of the tower, for a local batch whose size the graph finds out.

        `idle` tells whether there may be none, for which nothing is computed.
        """
        return self._guarded(size, *arguments) if idle else self(*arguments)

    @functools.cached_property
    def _guarded(self):
        # Traced once for all towers, too: an idle tower's branch is long.
        def guarded(size, *arguments):
            call = functools.partial(self._function, *arguments)
            return tf.cond(size > 0, call, functools.partial(self.idle, size))

        return _trace(guarded, tf.TensorSpec([], tf.int32), *self.specs)

    @property
    def needs_tables(self) -> bool:
        """Whether a table is used otherwise than to look up rows."""
        return any(
            op.name.startswith(TABLE)
            and op.type == "BroadcastTo"
            and op.outputs[0].consumers()
            for op in self._concrete.graph.get_operations()
        )

    @property
    def depends_on_rows(self) -> bool:
        """Whether what it returns depends on rows that are not known yet."""
        flat = tf.nest.flatten(self.returned, expand_composites=True)
        todo, seen = [each.op for each in flat if each is not None], set()
        while todo:
            op = todo.pop()
            if op.type == "BroadcastTo" and ROWS in op.name:
                return True
            if op.name not in seen:
                seen.add(op.name)
                todo += [each.op for each in op.inputs]
        return False

    @property
    def effects(self) -> Iterator[effects.Effect]:
        """What it does besides computing."""
        return effects.of(self._concrete.graph.get_operations())

    @property
    def graph(self) -> tf.Graph:
        """Its graph."""
        return self._concrete.graph

    @property
    def inputs(self) -> list[tf.Tensor]:
        """What stands in the graph for the arguments, in order."""
        flat = tf.nest.flatten(self.specs, expand_composites=True)
        count = sum(spec is not None for spec in flat)
        return self._concrete.graph.inputs[:count]

    @property
    def returned(self) -> TowerResult:
        """What a call returns, in shapes and types."""
        return self._concrete.structured_outputs

    def idle(self, none: tf.Tensor) -> TowerResult:
        """Returns what a tower without examples contributes: zeros, and no rows.

        The scalar `none` is 0 when the tower is idle. A constant would make the graph
        believe that this tower never has examples.
        """
        nothing = functools.partial(nothing_like, none=none)
        zeros = tf.nest.map_structure(nothing, self.returned, expand_composites=True)
        gradients = tf.nest.map_structure(
            with_shape_of, zeros.gradients, self.returned.gradients
        )
        return zeros._replace(gradients=gradients)


def with_shape_of(
    gradient: tf.Tensor | tf.IndexedSlices | None,
    traced: tf.Tensor | tf.IndexedSlices | None,
) -> tf.Tensor | tf.IndexedSlices | None:
    """Returns a gradient with the variable's shape, if it is of rows.

    Args:
        gradient: A tower's, whose `dense_shape` is zeros if the tower was idle.
        traced: The gradient in the tower's graph, where that shape is a constant.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    shape = tf.constant(tf.get_static_value(traced.dense_shape))
    return tf.IndexedSlices(gradient.values, gradient.indices, shape)


def nothing_like(tensor: tf.Tensor | None, none: tf.Tensor) -> tf.Tensor | None:
    """Returns zeros like a tensor, without rows where their number is not known.

    `none` is 0; see `Traced.idle`.
    """
    if tensor is None:
        return None
    if tensor.dtype == tf.variant:
        return tf.raw_ops.EmptyTensorList(
            element_shape=-1, max_num_elements=none, element_dtype=tf.float32
        )
    shape = [None] if tensor.shape.rank is None else tensor.shape
    sizes = [none if size is None else size for size in shape]
    text = tensor.dtype == tf.string
    value = tf.constant("") if text else tf.cast(none, tensor.dtype)
    return tf.fill(tf.stack(sizes) if sizes else [], value)


class Sized:
    """A tower traced twice: for `rows` examples, as usual, and for any number."""

    def __init__(self, usual: Traced, other: Traced, rows: int):
        self._usual, self._other, self._rows = usual, other, rows

    def of_size(self, size: tf.Tensor, idle: bool, *arguments: Any) -> TowerResult:
        """Adds one call of the tower; see `Traced.of_size`."""
        return (self._with_idle if idle else self._never_idle)(size, *arguments)

    def idle(self, none: tf.Tensor) -> TowerResult:
        """Returns what a tower without examples contributes; see `Traced.idle`."""
        return self._other.idle(none)

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

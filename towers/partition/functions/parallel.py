"""Functions of a batch on several devices, with or without Keras."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis import effects
from towers.analysis.kinds import ROWS
from towers.collectives import batch
from towers.collectives.joined_hosts import this_host
from towers.devices.names import HOST, is_gpu
from towers.devices.resolved import resolve
from towers.keras_adapter.graphs import has_tangents
from towers.keras_adapter.variables import value_behind
from towers.loop.loop import flat, pack
from towers.partition.call import Copied
from towers.partition.functions.placed import PlacedBatch, place, same_batch
from towers.partition.partitioned import NOT_SHARED, Partitioned, judge
from towers.plan import Plan
from towers.program.features import feature
from towers.program.voice import say
from towers.tower.errors import where

# Excludes a method from AutoGraph when a user's tf.function calls it.
as_it_is = tf.autograph.experimental.do_not_convert


def parallelize(
    function: Callable[..., Any],
    gpus: int | Sequence[int] | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a batch compute on several devices, as on one.

    The function is traced once, with an unknown number of rows. Operations with one row
    an example run on each device, with its rows; sums and means over examples are
    added. Operations that mix examples run on one device, with all rows, and a line
    says so. Variables that the function assigns get the values of the whole batch.

    If several hosts train together, each host is given the whole batch, computes the
    rows of its own devices, and returns the result of one device. Variables start with
    the first host's values.

    Examples:
        >>> add = towers.parallelize(tf.add, gpus=2)
        >>> add(tf.range(5), tf.range(5))
        <tf.Tensor: shape=(5,), dtype=int32, numpy=array([0, 2, 4, 6, 8], dtype=int32)>

    Args:
        function: Takes nests of tensors, with one row an example, and of scalars, which
            each device gets unchanged. It returns a nest of tensors of any shape.
            TensorFlow traces it, so Python in it runs once.
        gpus: Number of GPUs, a list of their indices, or a list of device strings. By
            default all GPUs. Without a GPU, logical CPUs are used.

    Returns:
        A function with the same arguments and results. It may be called eagerly or in a
        `tf.function`. It may be differentiated, unless it assigns variables or draws
        random numbers.

    Raises:
        ValueError: A device does not exist; or on several hosts, a loop of the
            function draws random numbers of `tf.random` and also changes a variable.
    """
    return Parallel(function, plan_of(gpus))


class Parallel:
    """A function of a batch on the towers of a plan, traced for each structure."""

    def __init__(
        self,
        function: Callable[..., Any],
        plan: Plan,
        loss_placement: str = "auto",
        copied: Copied | None = None,
    ):
        """Traces nothing yet; `loss_placement` and `copied` are as for `judge`."""
        self._function, self._plan = function, plan
        self._loss_placement, self._copied = loss_placement, copied
        self._partitioned: dict[str, Partitioned] = {}
        self._followed: dict[int, tf.Variable] = {}
        # By ranks: a single tf.function would merge several ranks into an unknown one.
        self._in_graph: dict[Sequence[int | None], Callable] = {}
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__

    @as_it_is
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Computes the function; see `parallelize`."""
        return self.on_copies(*batch, **named)[0]

    @as_it_is
    def on_copies(self, *batch: Any, **named: Any) -> list[Any]:
        """Computes the function; returns the results of `Partitioned.on_copies`."""
        if named:
            batch = self._in_order(batch, named)
        batch = tf.nest.map_structure(_tensor, batch)
        if tf.executing_eagerly():
            ranks = tuple(
                t if t is None else t.shape.rank for t in tf.nest.flatten(batch)
            )
            if ranks not in self._in_graph:
                # TensorFlow would take a method of several objects for one function,
                # and warn of too many retraces.
                self._in_graph[ranks] = tf.function(
                    functools.partial(self._compute),
                    autograph=False,
                    reduce_retracing=True,
                )
            return self._in_graph[ranks](*batch)
        placed = len(batch) == 1 and isinstance(batch[0], PlacedBatch)
        partitioned = self._partition(batch[0].local_batches[0] if placed else batch)
        variables = partitioned.trace.concrete.variables
        if has_tangents(
            tf.convert_to_tensor(variable.handle) for variable in variables
        ):
            # TensorFlow would silently drop the variables' part of the tangent.
            raise self._accumulated()
        return self._compute(*batch)

    def _in_order(self, batch, named):
        """Returns all arguments by position."""
        bound = inspect.signature(self._function).bind(*batch, **named)
        if bound.kwargs:
            raise ValueError(
                f"Received {[*bound.kwargs]} by name for '{self.__name__}', which "
                "takes them only so, or behind others that are left out; expected "
                "arguments that may be given by position."
            )
        return bound.args

    def _compute(self, *data):
        if len(data) == 1 and isinstance(data[0], PlacedBatch):
            return self._of_placed(data[0])
        batch.check_rows(data)
        partitioned, everywhere = self._partition(data), []

        @tf.custom_gradient
        def call(*tensors):
            for variable in partitioned.trace.concrete.variables:
                # The read tells an outer tape that the function depends on the
                # variable.
                tf.convert_to_tensor(variable)
            everywhere[:] = self._of_placed(place(self._plan, data), data)

            def gradient(*upstream, variables=()):
                before = self._gradient(partitioned, data, upstream, variables)
                count = len(tensors)
                return (before[:count], before[count:]) if variables else before

            return flat(everywhere[0]), gradient

        tensors = call(*flat(data))
        # Only home's results pass the custom gradient: TensorFlow would copy those of
        # other devices home and back.
        return [pack(everywhere[0], tensors), *everywhere[1:]]

    def _check_repeatable(self, placement):
        """Raises if recomputing the forward pass for a gradient would have effects."""
        for effect in effects.of(placement.order):
            if effect.type not in effects.REPEATED:
                (op,) = [op for op in placement.order if op.name == effect.name]
                raise ValueError(
                    f"Received '{self.__name__}' to differentiate, which assigns a "
                    f"variable, draws random numbers or alike, by {effect}{where(op)}. "
                    "The gradient would do so again; expected the tape inside of the "
                    "function, or a call outside of the tape."
                )

    def _accumulated(self):
        return ValueError(
            f"Received a call of '{self.__name__}' within a "
            "tf.autodiff.ForwardAccumulator, which TensorFlow cannot differentiate so; "
            "expected none around it, so use the accumulator inside of the function."
        )

    def _of_placed(self, placed, whole=None):
        partitioned, plan = self._partition(placed.local_batches[0]), self._plan
        if plan.hosts.count == 1:
            return partitioned.on_copies(
                plan, placed.local_batches, placed.size, whole=whole
            )
        for line in partitioned.draws_of_host:
            raise ValueError(
                f"Received '{self.__name__}', which draws random numbers of "
                f"TensorFlow's own state{line}, {NOT_SHARED}; expected a draw outside "
                "of it, or keras.random with a seed generator."
            )
        with tf.control_dependencies([same_batch(plan.hosts, placed)]):
            return partitioned.on_copies(
                plan, placed.local_batches, placed.size, whole=whole
            )

    def _partition(self, data):
        spec = batch.local_spec(data, None)
        if str(spec) in self._partitioned:
            return self._partitioned[str(spec)]
        verdict = judge(
            lambda local: self._function(*local),
            spec,
            lambda trace: self._copied,
            self._loss_placement,
        )
        # A ForwardAccumulator around an enclosing `tf.function` differentiates the
        # calls.
        partitioned = Partitioned(verdict, differentiable=True)
        for line in partitioned.lines(f"The function '{self.__name__}'"):
            say(line)
        self._follow_first_host(partitioned.trace)
        if not any(
            tf.is_symbolic_tensor(outside)
            for outside, _ in partitioned.trace.graph.captures
        ):
            # A trace that captures tensors of an outer tf.function holds for one call.
            self._partitioned[str(spec)] = partitioned
        return partitioned

    def _follow_first_host(self, trace):
        """Gives variables that were not read before the first host's values."""
        # TensorFlow's order of the variables differs between hosts.
        known = {id(variable.handle): variable for variable in trace.concrete.variables}
        captured = [known.get(id(outside)) for outside, _ in trace.graph.captures]
        new = [v for v in captured if v is not None and id(v) not in self._followed]
        self._followed |= {id(variable): variable for variable in new}
        if self._plan.hosts.count > 1:
            with tf.init_scope():
                follow = feature("collectives.first_host").follow_first_host
                follow(self._plan.hosts, new)

    def _gradient(self, partitioned, data, upstream, variables):
        """Returns the gradient for a batch and variables; recomputes the forward pass.

        TensorFlow cannot differentiate a copied custom gradient.
        """
        returned, placement = partitioned.trace.returned, partitioned.placement
        rows = [i for i, t in enumerate(returned) if placement.kind(t) is ROWS]
        self._check_repeatable(placement)
        if any(placement.blocks(returned[i]) for i in rows):
            raise ValueError(
                f"Received a gradient of '{self.__name__}', which returns several rows "
                "for each example; expected one row an example, or a sum or mean, so "
                "take the gradient inside of the function."
            )

        def backward(given):
            local, of_rows = given
            seeds = [*upstream]
            for i, local_seed in zip(rows, of_rows, strict=True):
                seeds[i] = local_seed
            with tf.GradientTape() as tape:
                sources = flat(local)
                tape.watch([source for source in sources if source.dtype.is_floating])
                targets = flat(self._function(*local))
            if len(targets) != len(seeds):
                # In a ForwardAccumulator, TensorFlow finds no gradients of gradients.
                raise self._accumulated()
            pairs = [
                (target, seed)
                for target, seed in zip(targets, seeds, strict=True)
                if target.dtype.is_floating
            ]
            targets, seeds = [t for t, _ in pairs], [s for _, s in pairs]
            return tape.gradient(targets, [*sources, *variables], seeds)

        given = data, [upstream[i] for i in rows]
        spec, placement_of_loss = batch.local_spec(given, None), self._loss_placement
        verdict = judge(backward, spec, loss_placement=placement_of_loss)
        gradient = Partitioned(verdict, differentiable=True)
        local_batches, size, _ = place(self._plan, given)

        def call():
            return gradient(self._plan, local_batches, size)

        # TensorFlow orders operations with effects, as exchanges of hosts, in functions
        # only.
        alone = self._plan.hosts.count == 1
        return call() if alone else tf.function(call, autograph=False)()


def _tensor(value):
    return None if value is None else _as_tensor(value)


def _as_tensor(value):
    composite = isinstance(value, tf.RaggedTensor | tf.SparseTensor)
    return value if composite else tf.convert_to_tensor(value)


def plan_of(
    gpus: int | Sequence[int] | Sequence[str] | None,
    variables: Sequence[keras.Variable | tf.Variable] = (),
) -> Plan:
    """Returns the plan of a function that reads some variables, on all hosts.

    Raises:
        ValueError: A device does not exist.
    """
    towers = resolve(gpus)
    home = towers[0] if is_gpu(towers[0]) else HOST
    for variable in variables[:1]:
        home = variable_behind(variable).device
    return Plan.of(towers, [1] * len(towers), home, hosts=this_host())


def variable_behind(variable: keras.Variable | tf.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a variable."""
    return variable if isinstance(variable, tf.Variable) else value_behind(variable)

"""Functions and loops of one's own on several devices, with or without Keras."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import devices
from towers.analysis import effects
from towers.analysis.kinds import ROWS
from towers.collectives import batch
from towers.collectives.hosts import this_host
from towers.devices import HOST, is_gpu
from towers.keras_adapter.graphs import has_tangents
from towers.keras_adapter.variables import value_behind
from towers.layers import fused
from towers.loop.loop import flat, pack
from towers.partition.errors import where
from towers.partition.partitioned import Partitioned
from towers.partition.placed import PlacedBatch, place, prefetch, same_batch
from towers.plan import Plan
from towers.program.voice import say

# Called in a user's tf.function, it is none of AutoGraph's.
_as_it_is = tf.autograph.experimental.do_not_convert


def parallelize(
    function: Callable[..., Any],
    gpus: int | Sequence[int] | Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Makes a function of a batch compute on several devices, as on one.

    The function is traced once, with an unknown number of rows. What has one row an
    example is computed on each device, with its rows; sums and means over examples are
    added. What lets examples meet is computed on one device, with all rows, and a line
    says so. Variables that the function assigns get the values of the whole batch.

    If several hosts train together, each is given the whole batch, computes its own
    devices' rows of it, and returns what one device would.

    Examples:
        >>> add = towers.parallelize(tf.add, gpus=2)
        >>> add(tf.range(5), tf.range(5))
        <tf.Tensor: shape=(5,), dtype=int32, numpy=array([0, 2, 4, 6, 8], dtype=int32)>

    Args:
        function: Takes nests of tensors, with one row an example, and of scalars, which
            each device gets as they are. It returns a nest of tensors of any shape.
            TensorFlow traces it, so Python in it runs once.
        gpus: Number of GPUs, a list of their indices, or a list of device strings. By
            default all GPUs. Without a GPU, logical CPUs are used.

    Returns:
        A function with the same arguments, by position, and the same results. It may
        be called eagerly or in a `tf.function`. It may be differentiated, unless it
        assigns variables or draws random numbers.

    Raises:
        ValueError: A device does not exist; or on several hosts, the function draws
            random numbers of TensorFlow's own state.
    """
    return _Parallel(function, _plan(gpus))


class GradientStep(NamedTuple):
    """What a step of `GradientTowers` computes.

    Attributes:
        loss: The loss of the whole batch: a scalar.
        gradients: Its gradient for each variable; `None` where it does not depend on
            the variable.
        aux: What the loss function returns beside the loss, or `None`.
    """

    loss: tf.Tensor
    gradients: list[tf.Tensor | tf.IndexedSlices | None]
    aux: Any


class GradientTowers:
    """Computes loss and gradients of a batch on several devices, as on one.

    It is the tower loop of TensorFlow's multi-GPU tutorials, with one model and one set
    of variables: gradients of each device's rows are added, and then applied once.

    Examples:
        >>> def loss_fn(x, y):
        ...     return tf.reduce_mean(tf.square(model(x) - y))
        >>> step = towers.GradientTowers(loss_fn, model.trainable_variables, gpus=2)
        >>> for x, y in dataset:
        ...     loss, gradients, _ = step(x, y)
        ...     step.apply(optimizer, gradients)

    `prefetch` copies batches to the devices while a step runs.

    If several hosts train together, each makes a `GradientTowers`, and calls it with
    the same batches. Variables begin with the first host's values, and all hosts get
    the same gradients. Each host builds the same optimizers.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        variables: Sequence[keras.Variable | tf.Variable],
        gpus: int | Sequence[int] | Sequence[str] | None = None,
        loss_placement: str = "auto",
    ):
        """Traces nothing yet.

        Args:
            loss_fn: Takes a batch: nests of tensors with one row an example. Returns
                the loss, a scalar; or the loss and a nest of other tensors.
            variables: What to differentiate for, created by now.
            gpus: As for `parallelize`.
            loss_placement: Where examples meet, as in a loss over pairs. "auto": on one
                device, with all rows. "tower": on each device, which takes its rows for
                the batch; loss and gradients are then weighted means of the devices'.

        Raises:
            ValueError: There is no variable, or something else in their place, or an
                unknown `loss_placement`; or as `parallelize`.
        """
        if loss_placement not in ("auto", "tower"):
            raise ValueError(
                f"Received loss_placement={loss_placement!r}; expected 'auto', which "
                "gathers what lets examples meet, or 'tower'."
            )
        self.variables = [*variables]
        for each in self.variables:
            if not isinstance(each, keras.Variable | tf.Variable):
                raise ValueError(
                    f"Received a {type(each).__name__} among the variables; expected a "
                    "list of variables, such as `model.trainable_variables`."
                )
        if not self.variables:
            raise ValueError(
                "Received no variables to differentiate for; expected some, so build "
                "the model before, and pass `model.trainable_variables`."
            )
        self._loss_fn, self._plan = loss_fn, _plan(gpus, self.variables)
        self._follow_first_host()
        self._step = _Parallel(self._compute, self._plan, loss_placement)
        self._step.__name__ = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        self._applies: dict[int, tuple[Any, Callable]] = {}

    @_as_it_is
    def __call__(self, *batch: Any) -> GradientStep:
        """Computes the loss of a batch, and its gradients.

        Raises:
            ValueError: The loss is no scalar tensor.
        """
        return self._step(*batch)

    def prefetch(
        self, dataset: Iterable[Any], count: int = 2
    ) -> Iterator[tuple[PlacedBatch]]:
        """Yields batches whose rows are copied to the devices ahead of their use.

        On GPUs, copying then takes place while a step runs.

        Examples:
            >>> for batch in step.prefetch(dataset):
            ...     loss, gradients, _ = step(*batch)
            ...     step.apply(optimizer, gradients)

        Args:
            dataset: A `tf.data.Dataset`, or anything else that yields batches.
            count: How many batches are copied ahead.
        """
        return prefetch(self._plan, dataset, count)

    @_as_it_is
    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    ) -> None:
        """Updates the variables once, where they are.

        Args:
            optimizer: A Keras optimizer. Several may take turns.
            gradients: One for each variable, in order.
        """
        with tf.device(self._plan.home):
            if not optimizer.built:
                with tf.init_scope():
                    optimizer.build(self.variables)
            if not tf.executing_eagerly():
                self._update(optimizer, gradients)
                return
            if id(optimizer) not in self._applies:

                def update(gradients):
                    self._update(optimizer, gradients)

                update = tf.function(update, autograph=False, reduce_retracing=True)
                found = optimizer, update
                self._applies[id(optimizer)] = found
            self._applies[id(optimizer)][1]([*gradients])

    def _follow_first_host(self):
        hosts = self._plan.hosts
        if hosts.count > 1:
            values = [tf.convert_to_tensor(each) for each in self.variables]
            for each, value in zip(
                self.variables, hosts.first(values, "variables"), strict=True
            ):
                each.assign(value)

    def _update(self, optimizer, gradients):
        with fused.updates():
            optimizer.apply(gradients, self.variables)

    def _compute(self, *batch):
        with tf.GradientTape() as tape:
            found = self._loss_fn(*batch)
            if isinstance(found, tuple) and len(found) == 2:
                loss, aux = found
            else:
                loss, aux = found, None
        if not tf.is_tensor(loss):
            raise ValueError(
                f"Received a {type(loss).__name__} from loss_fn; expected the loss, a "
                "scalar tensor, or a tuple of the loss and a nest of other tensors."
            )
        if loss.shape.rank != 0:
            raise ValueError(
                f"Received a loss of shape {loss.shape} from loss_fn; expected a "
                "scalar, such as `tf.reduce_mean` of one value an example."
            )
        return GradientStep(loss, tape.gradient(loss, self.variables), aux)


class _Parallel:
    """A function of a batch on the towers of a plan; it is traced for each kind."""

    def __init__(self, function, plan, loss_placement="auto"):
        self._function, self._plan = function, plan
        self._loss_placement = loss_placement
        self._partitioned: dict[str, Partitioned] = {}
        # By ranks; else TensorFlow takes several for an unknown one.
        self._in_graph: dict[Sequence[int | None], Callable] = {}
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__

    @_as_it_is
    def __call__(self, *batch: Any) -> Any:
        batch = tf.nest.map_structure(_tensor, batch)
        if tf.executing_eagerly():
            ranks = tuple(
                t if t is None else t.shape.rank for t in tf.nest.flatten(batch)
            )
            if ranks not in self._in_graph:
                self._in_graph[ranks] = tf.function(
                    self._compute, autograph=False, reduce_retracing=True
                )
            return self._in_graph[ranks](*batch)
        placed = len(batch) == 1 and isinstance(batch[0], PlacedBatch)
        found = self._partition(batch[0].local_batches[0] if placed else batch)
        variables = found.trace.concrete.variables
        if has_tangents(tf.convert_to_tensor(each.handle) for each in variables):
            # TensorFlow would lose the variables' part without a word.
            raise self._accumulated()
        return self._compute(*batch)

    def _compute(self, *data):
        if len(data) == 1 and isinstance(data[0], PlacedBatch):
            return self._of_placed(data[0])
        batch.check_rows(data)
        found = self._partition(data)

        @tf.custom_gradient
        def call(*tensors):
            for variable in found.trace.concrete.variables:
                # So that a tape outside knows that it was read.
                tf.convert_to_tensor(variable)
            returned = flat(self._of_placed(place(self._plan, data)))

            def gradient(*upstream, variables=()):
                before = self._gradient(found, data, upstream, variables)
                count = len(tensors)
                return (before[:count], before[count:]) if variables else before

            return returned, gradient

        return pack(found.trace.concrete.structured_outputs, call(*flat(data)))

    def _check_repeatable(self, placement):
        """Refuses a gradient if computing forward again would change a number."""
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

    def _of_placed(self, placed):
        found, plan = self._partition(placed.local_batches[0]), self._plan
        if plan.hosts.count == 1:
            return found(plan, placed.local_batches, placed.size)
        for line in found.stateful_draws:
            raise ValueError(
                f"Received '{self.__name__}', which draws random numbers of "
                f"TensorFlow's own state{line}, on {plan.hosts.count} hosts, where "
                "each has another; expected keras.random with a seed generator, or "
                "tf.random.stateless_*."
            )
        with tf.control_dependencies([same_batch(plan.hosts, placed)]):
            return found(plan, placed.local_batches, placed.size)

    def _partition(self, data):
        spec = batch.local_spec(data, None)
        if str(spec) not in self._partitioned:
            found = Partitioned(
                lambda local: self._function(*local),
                spec,
                loss_placement=self._loss_placement,
            )
            self._partitioned[str(spec)] = found
            for line in found.lines(f"The function '{self.__name__}'"):
                say(line)
        return self._partitioned[str(spec)]

    def _gradient(self, found, data, upstream, variables):
        """The gradient for the batch and some variables; it computes forward again.

        TensorFlow could not differentiate a custom gradient that was copied.
        """
        returned, placement = found.trace.returned, found.placement
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
            for i, mine in zip(rows, of_rows, strict=True):
                seeds[i] = mine
            with tf.GradientTape() as tape:
                sources = flat(local)
                tape.watch([each for each in sources if each.dtype.is_floating])
                targets = flat(self._function(*local))
            if len(targets) != len(seeds):
                # Within an accumulator, TensorFlow finds no gradients of gradients.
                raise self._accumulated()
            pairs = [
                (target, seed)
                for target, seed in zip(targets, seeds, strict=True)
                if target.dtype.is_floating
            ]
            targets, seeds = [t for t, _ in pairs], [s for _, s in pairs]
            return tape.gradient(targets, [*sources, *variables], seeds)

        given = data, [upstream[i] for i in rows]
        spec, way = batch.local_spec(given, None), self._loss_placement
        partitioned = Partitioned(backward, spec, loss_placement=way)
        local_batches, size, _ = place(self._plan, given)

        def call():
            return partitioned(self._plan, local_batches, size)

        # TensorFlow orders what has effects, as what hosts exchange, in functions only.
        alone = self._plan.hosts.count == 1
        return call() if alone else tf.function(call, autograph=False)()


def _tensor(value):
    return None if value is None else _as_tensor(value)


def _as_tensor(value):
    composite = isinstance(value, tf.RaggedTensor | tf.SparseTensor)
    return value if composite else tf.convert_to_tensor(value)


def _plan(gpus, variables=()):
    towers = devices.resolve(gpus)
    home = towers[0] if is_gpu(towers[0]) else HOST
    for variable in variables[:1]:
        plain = isinstance(variable, tf.Variable)
        home = (variable if plain else value_behind(variable)).device
    return Plan.of(towers, [1] * len(towers), home, hosts=this_host())

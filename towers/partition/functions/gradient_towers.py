"""Gradients of a batch on several devices, for custom training loops."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.collectives import reduce
from towers.devices.resolved import resolve
from towers.loop import alike
from towers.partition.call import Copied
from towers.partition.functions.parallel import (
    Parallel,
    as_it_is,
    plan_of,
    variable_behind,
)
from towers.partition.functions.placed import PlacedBatch, prefetch
from towers.partition.functions.update import Update
from towers.partition.functions.variable_copies import VariableCopies
from towers.program.features import feature


class GradientStep(NamedTuple):
    """The results of a step of `GradientTowers`.

    Attributes:
        loss: The loss of the whole batch: a scalar.
        gradients: The gradient of the loss for each variable; `None` where the loss
            does not depend on the variable.
        aux: The second result of the loss function, or `None`.
    """

    loss: tf.Tensor
    gradients: list[tf.Tensor | tf.IndexedSlices | None]
    aux: Any


class GradientTowers:
    """Computes loss and gradients of a batch on several devices, as on one.

    This is the tower loop of TensorFlow's multi-GPU tutorials, with one model: the
    gradients of each device's rows are added, and then applied.

    Examples:
        >>> def loss_fn(x, y):
        ...     return tf.reduce_mean(tf.square(model(x) - y))
        >>> step = towers.GradientTowers(loss_fn, model.trainable_variables, gpus=2)
        >>> for x, y in dataset:
        ...     loss, gradients, _ = step(x, y)
        ...     step.apply(optimizer, gradients)

    `prefetch` copies batches to the devices while a step runs.

    If several hosts train together, each host creates a `GradientTowers`, and calls it
    with the same batches. Variables start with the first host's values, and all hosts
    get the same gradients. Each host builds the same optimizers.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        variables: Sequence[keras.Variable | tf.Variable],
        gpus: int | Sequence[int] | Sequence[str] | None = None,
        loss_placement: str = "auto",
        variable_update: str = "parameter_server",
        all_reduce_alg: str = "auto",
    ):
        """Checks the arguments, and creates the copies for "replicated".

        Args:
            loss_fn: Takes a batch: nests of tensors with one row an example. Returns
                the loss, a scalar; or the loss and a nest of other tensors. TensorFlow
                traces the function, so Python in it runs once; pass a number that
                changes as an argument.
            variables: The variables to differentiate for, which must exist already.
            gpus: As for `parallelize`.
            loss_placement: Where operations that mix examples run, as in a loss over
                pairs. "auto": on one device, with all rows. "tower": on each device,
                which takes its rows for the batch; loss and gradients are then weighted
                means of the devices'.
            variable_update: "parameter_server": variables stay where they were created,
                and each device reads them from there. "replicated": each device has a
                copy, which `apply` updates; gradients are sent instead of variables. If
                other code assigns the variables, the copies get the new values in the
                next call.
            all_reduce_alg: How "replicated" adds gradients: on the "cpu"; on the first
                "device"; in a "ring", where each device adds a part; or by "nccl", for
                devices with a GPU each. "auto" is "nccl" on GPUs of several hosts,
                "device" on those of one, and "cpu" otherwise.

        Raises:
            ValueError: There are no variables, other objects in their place, or an
                unknown choice; or as for `parallelize`.
        """
        self.variables = [*variables]
        _check(self.variables, loss_placement, variable_update)
        self._loss_fn, self._plan = loss_fn, plan_of(gpus, self.variables)
        if all_reduce_alg != "auto":
            reduce.check_all_reduce(all_reduce_alg, variable_update, self._plan.devices)
        if self._plan.hosts.count > 1:
            options = {"variable_update": variable_update, "all_reduce": all_reduce_alg}
            alike.check(self._plan.hosts, {"GradientTowers()": options})
            follow = feature("collectives.first_host").follow_first_host
            follow(self._plan.hosts, self.variables)
        self._copies, copied = None, None
        if variable_update == "replicated":
            self._check_copies()
            originals = map(variable_behind, self.variables)
            self._copies = VariableCopies(originals, self._plan.devices)
            algorithm = self._plan.algorithm_for(all_reduce_alg)
            copied = Copied(self._copies.handles(), algorithm)
            refresh = functools.partial(self._copies.refresh)
            self._refresh = tf.function(refresh, autograph=False)
        self._step = Parallel(self._compute, self._plan, loss_placement, copied)
        self._step.__name__ = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        # The gradients of a step that are not applied yet, on each device.
        self._latest: list[Sequence[Any]] = []
        self._updates: dict[int, Update] = {}

    @as_it_is
    def __call__(self, *batch: Any) -> GradientStep:
        """Computes the loss of a batch, and its gradients.

        Raises:
            ValueError: The loss is not a scalar tensor.
        """
        if self._copies is None:
            return self._step(*batch)
        self._refresh()
        of_copies = self._step.on_copies(*batch)
        self._latest = [results.gradients for results in of_copies]
        return of_copies[0]

    def prefetch(
        self, dataset: Iterable[Any], count: int = 2
    ) -> Iterator[tuple[PlacedBatch]]:
        """Yields batches whose rows are copied to the devices ahead of their use.

        On GPUs, batches are copied while a step runs.

        Examples:
            >>> for batch in step.prefetch(dataset):
            ...     loss, gradients, _ = step(*batch)
            ...     step.apply(optimizer, gradients)

        Args:
            dataset: A `tf.data.Dataset`, or any other iterable of batches.
            count: The number of batches that are copied ahead.
        """
        return prefetch(self._plan, dataset, count)

    @as_it_is
    def apply(
        self,
        optimizer: keras.optimizers.Optimizer,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    ) -> None:
        """Updates the variables, and their copies if any.

        TensorFlow traces the optimizer, and traces it again if its settings have
        changed, such as `optimizer.momentum`.

        Args:
            optimizer: A Keras optimizer. Several optimizers may take turns.
            gradients: One gradient for each variable, in order.

        Raises:
            ValueError: The number of gradients is not that of the variables; or
                `optimizer` is not a Keras optimizer.
        """
        if len(gradients) != len(self.variables):
            raise ValueError(
                f"Received {len(gradients)} gradients for {len(self.variables)} "
                "variables; expected one for each, in the order of `variables`."
            )
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ValueError(
                f"Received {optimizer!r} as the optimizer; expected one of Keras's, "
                "such as `keras.optimizers.Adam()`."
            )
        if id(optimizer) not in self._updates:
            with tf.init_scope(), tf.device(self._plan.home):
                if not optimizer.built:
                    optimizer.build(self.variables)
                update = Update(optimizer, self.variables, self._plan, self._copies)
            self._updates[id(optimizer)] = update
        update = self._updates[id(optimizer)]
        others = self._on_others(gradients)
        if tf.executing_eagerly():
            update.in_graph([*gradients], others, update.settings())
        else:
            update([*gradients], others)

    def _on_others(self, gradients):
        """Returns the gradients on the other devices, if the last step made these."""
        first, *others = self._latest or [()]
        self._latest = []
        same = [a is b for a, b in zip(first, gradients, strict=False)]
        return others if others and all([*same, len(same) == len(gradients)]) else None

    def _check_copies(self):
        """Raises if variables cannot be copied from the first device."""
        first = self._plan.devices[0]
        for variable in self.variables:
            shape = tf.TensorShape(variable.shape)
            if variable.dtype == tf.string or not shape.is_fully_defined():
                raise ValueError(
                    f"Received variable_update='replicated', and variable "
                    f"'{variable.name}' of shape {shape} and {variable.dtype}; "
                    "expected numbers of a known shape, or "
                    "variable_update='parameter_server'."
                )
            (home,) = resolve([variable_behind(variable).device])
            if home != first:
                raise ValueError(
                    f"Received variable_update='replicated', and variable "
                    f"'{variable.name}' on {home}; expected all on the first device, "
                    f"{first}, so create them within `tf.device('{first}')`."
                )

    def _compute(self, *batch):
        with tf.GradientTape() as tape:
            outputs = self._loss_fn(*batch)
            if isinstance(outputs, tuple) and len(outputs) == 2:
                loss, aux = outputs
            else:
                loss, aux = outputs, None
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


def _check(variables, loss_placement, variable_update):
    if loss_placement not in ("auto", "tower"):
        raise ValueError(
            f"Received loss_placement={loss_placement!r}; expected 'auto', which "
            "gathers what lets examples meet, or 'tower'."
        )
    if variable_update not in ("parameter_server", "replicated"):
        raise ValueError(
            f"Received variable_update={variable_update!r}; expected "
            "'parameter_server' or 'replicated'."
        )
    for variable in variables:
        if not isinstance(variable, keras.Variable | tf.Variable):
            raise ValueError(
                f"Received a {type(variable).__name__} among the variables; expected a "
                "list of variables, such as `model.trainable_variables`."
            )
    if not variables:
        raise ValueError(
            "Received no variables to differentiate for; expected some, so build "
            "the model before, and pass `model.trainable_variables`."
        )

"""The steps of a Keras model on towers: train, test and predict, each a page."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError
from towers.builders.common import Pieces
from towers.builders.pieces.executor import TowerFunction
from towers.builders.pieces.loss import StepOutputs
from towers.builders.pieces.metrics import Measured
from towers.builders.pieces.reader import CopyReader, TowerInputs, VariableReader
from towers.builders.pieces.reducer import Reducer
from towers.cluster import process_group
from towers.collectives import batch, reduce
from towers.layers import overwritten, sharded
from towers.loop import loop
from towers.tower import passes
from towers.tower.errors import ModelError

Scope = Callable[[], contextlib.AbstractContextManager]


@dataclasses.dataclass
class TrainStep:
    """Trains on one global batch: read, compute, reduce, guard, assign, update.

    Attributes:
        pieces: What all ways to update variables have in common.
        reader: Reads what the towers train on.
        reducer: Adds the towers' gradients.
    """

    pieces: Pieces
    reader: VariableReader | CopyReader
    reducer: Reducer

    def train_step(
        self, data: Any, local_batches: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains all towers on one global batch.

        Args:
            data: What Keras's `train_step` gets: x, (x, y) or (x, y, sample_weight),
                nests of tensors with one row an example.
            local_batches: What became of it on its way to the towers, if it is there.

        Returns:
            The model's metrics, by name.
        """
        self.pieces.creator.create_variables(data)
        data = self.pieces.context.begin("train", data)
        outputs = self.pieces.loss.compute(data, self.read(), local_batches)
        return self.apply(data, outputs)

    def train_function(self, scope: Scope) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls; see `train_function`."""
        return train_function(self.pieces, self.train_step, scope)

    def read(self) -> TowerInputs:
        """Reads what the towers compute with."""
        context = self.pieces.context
        optimizer = context.model.optimizer
        with tf.device(context.plan.home):
            scale = tf.ones([])
            if optimizer is not None:
                scale = optimizer.scale_loss(scale)
        return TowerInputs(self.reader.read_variables(), scale)

    def apply(self, data: Any, outputs: StepOutputs) -> dict[str, tf.Tensor]:
        """Updates variables and metrics with what `LossAndGradients` made of it."""
        data = keras.utils.unpack_x_y_sample_weight(data)
        metrics, size = self.pieces.metrics, batch.batch_size(data[0])
        gather = functools.partial(metrics.gather, outputs.results, size)
        outputs, sums, packed, told = self._reduce(data, outputs)
        loss = outputs.measured.loss
        with (
            self._together(told),
            self._whole(sums, outputs),
            self._unless_stopped(data, loss, sums, packed),
        ):
            if told is not None:
                self.pieces.context.agreement.hear(
                    told, self.pieces.context.timers.hosts
                )
            # In this order, as on one device: layers assign before the optimizer does.
            self.pieces.state.assign_state(outputs.state)
            if sums:
                self.pieces.updater.update_weights(sums)
            return metrics.update_metrics(data, outputs.measured, gather)

    def _reduce(self, data, outputs):
        """Adds all that is to be added, over towers and hosts.

        Returns:
            The outputs, the gradients' sums for each copy, what travelled packed, and
            what hosts say of the batch, if there are several.
        """
        model, plan = self.pieces.context.model, self.pieces.context.plan
        agreement = self.pieces.context.agreement
        timers, told = self.pieces.context.timers, None
        if agreement is not None:
            told = agreement.of_batch(data, timers.hosts)
        # Of micro-batches, one has the gradients of all.
        of_towers = [r for r in outputs.results if r.gradients] or outputs.results
        gradients = [result.gradients for result in of_towers]
        if outputs.direct:
            with tf.device(plan.home):
                _refuse_direct(model, outputs.direct[0])
                direct = [_once(plan.hosts, each) for each in outputs.direct]
                gradients[0] = reduce.sum_gradients([gradients[0], *direct])
        if not model.trainable_variables:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
            outputs, told = outputs.sum_over(plan.hosts, told)
            return outputs, [], [], told
        packed, over_hosts = [], None
        if agreement is not None:

            def over_hosts(sums, scatter=tuple):
                nonlocal outputs, told
                mine = sums, told

                def add():
                    found, more = outputs.sum_over(plan.hosts, mine, sums)
                    return found, (more, scatter())

                outputs, ((sums, told), parts) = timers.over_hosts(add, sums)
                return sums, parts

        with tf.name_scope("reduce"):
            sources = [result.tower for result in of_towers]
            sums = self.reducer.sum_gradients(
                gradients, sources, packed.append, over_hosts
            )
        return outputs, sums, packed, told

    def _whole(self, sums, outputs):
        """Inside, all of a step is there: no host assigns some and then loses others.

        Whoever is left, where hosts come and go, then has all of a step or nothing.
        """
        if process_group.member() is None or tf.executing_eagerly():
            return contextlib.nullcontext()
        every = tf.nest.flatten([sums, outputs.state, outputs.measured.loss], True)
        return tf.control_dependencies([each for each in every if each is not None])

    def _together(self, told):
        if told is None:
            return contextlib.nullcontext()
        return self.pieces.context.agreement.before(told)

    def _unless_stopped(self, data, loss, sums, packed):
        context, plan = self.pieces.context, self.pieces.context.plan
        if context.guard is None:
            return contextlib.nullcontext()
        gradients = self.reducer.together(sums)
        if plan.hosts.count > 1 or not any(map(plan.packs, plan.devices)):
            # Towers share memory and cores: to look at the sums is the least work. And
            # all hosts have the same sums, so that all find the same.
            packed = ()
        # All hosts stop together, and look at the whole batch.
        whole = functools.partial(self.pieces.batches.whole, data)
        return context.guard.before(
            whole, loss, gradients, context.model.optimizer, packed
        )


def _once(hosts, gradients):
    """Gradients that each host has computed alike, as its part of their sum."""
    if hosts.index == 0:
        return gradients
    return [
        None if g is None else tf.math.scalar_mul(tf.zeros([], g.dtype), g)
        for g in gradients
    ]


def _refuse_direct(model, direct):
    """Refuses what only Keras's float8 could do, where a loss calls the model."""
    variables = sharded.targets(model.trainable_variables)
    for i in overwritten.places(model):
        if direct[i] is not None:
            raise ModelError(
                f"The loss of model '{model.name}' uses the variable "
                f"'{variables[i].path}' past the model's outputs, "
                "which is to be overwritten with its gradient; expected a loss that "
                "does not call layers in float8."
            )


def train_function(
    pieces: Pieces,
    train_step: Callable[[Any, Any], dict[str, tf.Tensor]],
    scope: Scope,
    create_variables: Callable[[Any], None] | None = None,
) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Makes the function that Keras's `fit` calls with an iterator over batches.

    Args:
        pieces: Create variables, place batches, give copies of variables their values.
        train_step: Trains on a batch, and on the local batches that were placed.
        scope: Makes the context that steps are traced and run in.
        create_variables: Creates variables, instead of the pieces.

    Returns:
        A function that takes as many batches as the model has steps in a call, and
        returns the logs of the last; see `loop.train_function`.
    """
    context, copies = pieces.context, pieces.copies

    def step(data, local_batches, fetched):
        if not tf.executing_eagerly():
            context.found.graph = tf.compat.v1.get_default_graph()
        with scope(), context.timers.step(data, local_batches, fetched):
            return train_step(data, local_batches)

    def cut(data):
        with scope():
            return pieces.batches.cut(data)

    def create(spec):
        with scope():
            (create_variables or pieces.creator.create_variables)(spec)

    steps, eagerly = context.model.steps_per_execution, context.model.run_eagerly
    placing = loop.Placing(cut, pieces.batches.copy_each)
    train = loop.train_function(create, placing, step, steps, eagerly, context.prefetch)
    follow, broadcast = copies.follow_first_host, copies.broadcast
    if not eagerly:
        follow = tf.function(follow, autograph=False)
        broadcast = tf.function(broadcast, autograph=False)

    def function(iterator):
        # What callbacks do between two batches, they do on all hosts.
        if copies.stale and context.plan.hosts.count > 1:
            # A host that has just arrived has to have what the others have.
            loop.create_for(create, iterator)
            with scope():
                follow()
        if copies.differ():
            with scope():
                broadcast()
        copies.stale = False
        copies.hosts_parts.begin_step()
        if context.callbacks_may_write:
            context.found.proofs.forget()
        context.timers.reads(iterator)
        return train(iterator)

    return function


@dataclasses.dataclass
class Evaluation:
    """The steps that train nothing: forward on the towers, all else at home."""

    pieces: Pieces

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch, as for `TrainStep`; returns metrics by name."""
        pieces = self.pieces
        # Targets are not cut.
        batch.check_rows(data)
        pieces.creator.create_variables(data)
        data = pieces.context.begin("test", data)
        with self._together(data):
            return self._evaluate(keras.utils.unpack_x_y_sample_weight(data))

    def _evaluate(self, data):
        pieces, loss = self.pieces, self.pieces.loss
        measured = None
        if loss.evaluates_on_towers() and loss.place_loss("test") == "tower":
            try:
                measured, results = self._on_towers(data)
            except NoRuleError as error:
                loss.gather_loss("test", str(error))
        if measured is None:
            measured, results = self._at_home(data)
        size = batch.batch_size(data[0])
        gather = functools.partial(pieces.metrics.gather, results, size)
        return pieces.metrics.update_metrics(data, measured, gather)

    def _on_towers(self, data):
        """Has each tower compute its part of loss and metrics."""
        pieces = self.pieces
        local, _ = pieces.loss.prepare(data, training=False)
        function = functools.partial(passes.evaluate, pieces.context.model)
        local_x = local and [each[0] for each in local]
        values = pieces.reader.read_variables()
        values = pieces.rows.fetch(values, data[0], local_x)
        results, rules = pieces.loss.on_towers("test", function, values, data, local)
        state = pieces.state.combine_state(results, rules)
        measured = pieces.metrics.combine(results, rules)
        outputs = StepOutputs(results, state, measured, [])
        outputs, _ = outputs.sum_over(pieces.context.plan.hosts)
        pieces.state.assign_state(outputs.state)
        return outputs.measured, results

    def _at_home(self, data):
        """Computes the loss of gathered outputs."""
        metrics = self.pieces.metrics
        results, outputs, seen = self._forward("test", data)
        with tf.device(self.pieces.context.plan.home):
            losses = metrics.sum_layer_losses(results)
            losses = self.pieces.context.plan.hosts.sum(losses, "losses of layers")
            loss = metrics.whole_loss(seen(), outputs, losses, training=False)
        return Measured(loss), results

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch, of which only x is used.

        Returns a nest of tensors, one row an example, in order.
        """
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        batch.check_rows((x,))
        self.pieces.creator.create_for_prediction(x)
        x = self.pieces.context.begin("predict", x)
        with self._together(x):
            _, outputs, _ = self._forward("predict", (x, None, None))
        return outputs

    def _together(self, data):
        agreement = self.pieces.context.agreement
        if agreement is None:
            return contextlib.nullcontext()
        return agreement.evaluates(data)

    def _forward(self, step, data):
        """Runs the towers forward; returns results, outputs, and the batch they saw."""
        x, pieces, context = data[0], self.pieces, self.pieces.context
        rules = context.rules(step, x)
        forward = functools.partial(passes.forward, context.model, False, rules)
        local, seen = pieces.loss.prepare(data, training=False)
        local_x = [each[0] for each in local or pieces.batches.place((x,))]
        values = pieces.reader.read_variables()
        towers = TowerFunction(forward, rules)
        values = pieces.rows.fetch(values, x, local_x)
        results = pieces.executor.run_towers(towers, values, x, local_x)
        outputs = pieces.metrics.gather(results, batch.batch_size(x))
        state = pieces.state.combine_state(results, rules)
        pieces.state.assign_state(context.plan.hosts.sum(state, "state"))
        return results, outputs, seen

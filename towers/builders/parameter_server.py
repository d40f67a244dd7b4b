"""The `parameter_server` builder: variables at home, updated once a step.

Each step, every tower gets the variables' values from home and computes its part of the
gradient; the parts are added on one device, and the optimizer is applied once. The
recipe is that of the CIFAR-10 multi-GPU tutorial and of tf_cnn_benchmarks'
`variable_update=parameter_server`.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.analysis.rules import NoRuleError
from towers.builders.base import Builder, Values
from towers.collectives import batch, reduce
from towers.keras_adapter.models import compiled_loss
from towers.layers import fused, overwritten
from towers.tower import passes
from towers.tower.errors import ModelError
from towers.tower.passes import TowerResult


class StepOutputs(NamedTuple):
    """What the towers made of a batch, before anything is updated.

    Attributes:
        results: The towers' results.
        state: The new values of the model's variables, combined; see
            `Builder.combine_state`.
        loss: The loss of the whole batch, a scalar.
        direct: Gradients that come from the loss itself, past the outputs: none, or one
            list as `TowerResult.gradients`.
        y: The whole batch's y, if towers have preprocessed it.
    """

    results: Sequence[TowerResult]
    state: Sequence[tf.Tensor | None]
    loss: tf.Tensor
    direct: Sequence[Sequence[tf.Tensor | tf.IndexedSlices | None]]
    y: Any = None


class TowerInputs(NamedTuple):
    """What the towers compute with.

    Attributes:
        values: The variables' values for each tower; see `Builder.read_variables`.
        scale: The optimizer's loss scale, 1 without one: a float32 scalar.
    """

    values: Sequence[Values]
    scale: tf.Tensor


class ParameterServer(Builder):
    """Towers that fetch the variables and send back gradients, synchronously."""

    def train_step(
        self, data: Any, shares: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains on one global batch; see `Builder.train_step`."""
        self.create_variables(data)
        return self.apply(data, self.compute(data, shares))

    def pull(self) -> TowerInputs:
        """Reads what the towers compute with."""
        with tf.device(self.home):
            scale = tf.ones([])
            if self.model.optimizer is not None:
                scale = self.model.optimizer.scale_loss(scale)
        return TowerInputs(self.read_for_training(), scale)

    def compute(
        self,
        data: Any,
        shares: Sequence[Any] | None = None,
        pulled: TowerInputs | None = None,
    ) -> StepOutputs:
        """Computes loss and gradients, changing nothing.

        Args:
            data: A global batch; see `train_step`.
            shares: What `place` made of it, if that was done ahead.
            pulled: What `pull` returned, if that was done ahead.

        Returns:
            What the towers returned, and the loss.
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        shares = shares and [keras.utils.unpack_x_y_sample_weight(s) for s in shares]
        values, scale = self.pull() if pulled is None else pulled
        sent = zip(values, self.devices, strict=True)
        self.timers.received([each for each, device in sent if self.packs(device)])
        shares, seen = self.preprocess_batch(data, training=True, placed=shares)
        y = None if self.preprocess is None else seen[1]
        run = functools.partial(self.run_towers, training=True)
        if self.place_loss() == "tower":
            rules = self.rules("train", data)
            function = functools.partial(passes.forward_backward, self.model, rules)
            try:
                results = run(function, rules, values, data, scale, placed=shares)
            except NoRuleError as error:
                self.gather_loss(str(error))
            else:
                self.timers.computed([(r.loss, r.gradients) for r in results])
                with tf.device(self.home):
                    loss = tf.add_n([result.loss for result in results])
                state = self.combine_state(results, rules)
                return StepOutputs(results, state, loss, [], y)
        return self._gathered(values, data, seen, scale, shares)._replace(y=y)

    def read_for_training(self) -> list[Values]:
        """Returns the values that towers train on; see `Builder.read_variables`."""
        return self.read_variables()

    def apply(self, data: Any, computed: StepOutputs) -> dict[str, tf.Tensor]:
        """Updates variables and metrics.

        Args:
            data: The batch; see `train_step`.
            computed: What `compute` made of it.

        Returns:
            The model's metrics, by name.
        """
        data = keras.utils.unpack_x_y_sample_weight(data)
        results, state, loss, direct, _ = computed
        outputs = self.gather(results)
        gradients = [result.gradients for result in results]
        if direct:
            with tf.device(self.home):
                self._refuse_direct(direct[0])
                gradients[0] = reduce.sum_gradients([gradients[0], *direct])
        sums, packed = [], []
        if self.model.trainable_variables:
            with tf.name_scope("reduce"):
                sources = [self.devices[result.tower] for result in results]
                sums = self.sum_gradients(gradients, sources, packed.append)
        else:
            warnings.warn(
                "The model does not have any trainable weights.", stacklevel=2
            )
        with self._unless_stopped(data, loss, sums, packed):
            # In this order, as on one device: layers assign before the optimizer does.
            self.assign_state(state)
            if sums:
                self.update_weights(sums)
            return self._update_metrics(data, outputs, computed)

    def _refuse_direct(self, direct):
        """Refuses what only Keras's float8 could do, where a loss calls the model."""
        for i in overwritten.places(self.model):
            if direct[i] is not None:
                raise ModelError(
                    f"The loss of model '{self.model.name}' uses the variable "
                    f"'{self.model.trainable_variables[i].path}' past the model's "
                    "outputs, which is to be overwritten with its gradient; expected a "
                    "loss that does not call layers in float8."
                )

    def _unless_stopped(self, data, loss, sums, packed):
        if self.guard is None:
            return contextlib.nullcontext()
        gradients = sums[0] if sums else []
        if not any(map(self.packs, self.devices)):
            # Towers share memory and cores: to look at the sums is the least work.
            packed = ()
        return self.guard.before(data, loss, gradients, self.model.optimizer, packed)

    def _update_metrics(self, data, outputs, computed):
        with tf.device(self.home):
            losses = compiled_loss(self.model)
            if self.loss_placed == "tower" and losses is not None and losses.metrics:
                # With several outputs Keras also tracks each one's loss. A tower
                # cannot, so this is done once more for the whole batch.
                y = data[1] if self.preprocess is None else computed.y
                losses(y, outputs, data[2])
            return self.update_metrics(data, outputs, computed.loss)

    def _gathered(self, values, data, seen, scale, shares):
        """Computes the loss at home, from the outputs of all towers.

        The towers run forward; home computes the loss and its gradient for the outputs;
        the towers carry that gradient back. Where the loss looks at variables, too,
        there is a gradient of home's own.
        """
        if shares is None:
            batch.check_rows(data)  # of which x alone is cut
        x = data[0]
        x_shares = shares and [share[0] for share in shares]
        rules = self.rules("train, gathered", x)
        run = functools.partial(self.run_towers, training=True)
        forward = functools.partial(passes.forward, self.model, True, rules)
        # Python is called once, so what it has computed is kept.
        backs, keeps = [], self.model.run_eagerly and not self.together

        def kept(*arguments):
            result, back = passes.taped_forward(self.model, rules, *arguments)
            backs.append(back)
            return result

        results = run(forward, rules, values, x, placed=x_shares, eagerly=kept)
        outputs = self.gather(results)
        state = self.combine_state(results, rules)
        with tf.device(self.home):
            losses = self.sum_layer_losses(results)
            targets = passes.differentiable(outputs)
            with tf.GradientTape() as tape, _Home(self.model, state, tape) as home:
                tape.watch([targets, losses])
                loss = self.whole_loss(seen, outputs, losses, training=True)
                scaled = loss * tf.cast(scale, loss.dtype)
            state = home.finish()
            wanted = tape.gradient(scaled, [targets, losses, home.values])
            for_outputs, for_losses = tf.nest.map_structure(_dense, wanted[:2])
            size = batch.batch_size(x)
            for target, rows in zip(targets, for_outputs, strict=True):
                if rows is not None:
                    rows.set_shape(target.shape)  # which Python in a graph loses
            for_outputs = [batch.by_example(rows, size) for rows in for_outputs]
        carried = self.place((x, for_outputs))
        if shares:
            # The same rows as on the way forward.
            carried = [
                (rows, gradients)
                for rows, (_, gradients) in zip(x_shares, carried, strict=True)
            ]
        if keeps:
            back = self._carry(backs, results, carried, for_losses)
        else:
            backward = functools.partial(passes.backward, self.model, rules)
            whole = x, for_outputs
            back = run(backward, rules, values, whole, for_losses, placed=carried)
        self.timers.computed([result.gradients for result in back])
        results = [
            result._replace(gradients=again.gradients)
            for result, again in zip(results, back, strict=True)
        ]
        return StepOutputs(results, state, loss, [list(map(reduce.add, wanted[2]))])

    def _carry(self, backs, results, carried, for_losses):
        """Carries gradients back through towers that have kept their forward passes."""
        carried_back = []
        for back, result in zip(backs, results, strict=True):
            k = result.tower
            with tf.name_scope(f"tower_{k}"), tf.device(self.devices[k]):
                carried_back.append(back(carried[k][1], for_losses))
        return carried_back

    def sum_gradients(
        self,
        gradients: Sequence[Sequence[reduce.Gradient]],
        sources: Sequence[str],
        seen: Callable[[reduce.Packed], None] | None = None,
    ) -> list[list[reduce.Gradient]]:
        """Adds the towers' gradients.

        Args:
            gradients: Lists of gradients; see `TowerResult.gradients`.
            sources: The devices that they are on.
            seen: Is told of what has travelled packed; see `reduce.all_reduce`.

        Returns:
            The sums, once for each copy of the variables.
        """
        largest = overwritten.places(self.model)
        if any(map(self.packs, sources)):
            sums = reduce.sum_packed(
                gradients, sources, self.merge, self.home, largest, seen
            )
            return [sums]
        with tf.device(self.merge):
            return [reduce.sum_gradients(gradients, largest)]

    def update_weights(self, sums: Sequence[Sequence[reduce.Gradient]]) -> None:
        """Applies the optimizer.

        Args:
            sums: What `sum_gradients` returned.
        """
        with tf.device(self.home), tf.name_scope("apply"):
            self.apply_optimizer(sums[0])

    def apply_optimizer(self, gradients: Sequence[reduce.Gradient]) -> None:
        """Applies the model's optimizer where it is called.

        Args:
            gradients: A gradient for each trainable variable.
        """

        def update(gradients):
            with fused.updates():
                model.optimizer.apply(gradients, model.trainable_variables)

        model = self.model
        if gradients and all(each is None for each in gradients):
            raise ModelError(
                f"No variable of model '{model.name}' has a gradient; expected a loss "
                "that depends on one, so look for integers, argmax or stop_gradient "
                "between the variables and the outputs."
            )
        if self.xla or (self.compiles_update and self._may_compile(gradients)):
            update = tf.function(update, autograph=False, jit_compile=True)
        update(gradients)

    def _may_compile(self, gradients):
        """Whether XLA may compile an update that nobody asked it for."""
        sparse = any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients)
        if sparse:
            line = (
                f"XLA does not compile the update of model '{self.model.name}', as it "
                "would do so anew for each size of its sparse gradients."
            )
            self.say([line])
        return not sparse


class _Home(keras.StatelessScope):
    """Inside, home computes a loss behind the towers, and changes no variable.

    A loss of the user's may call the model again, which then changes its state.
    """

    def __init__(
        self,
        model: keras.Model,
        state: Sequence[tf.Tensor | None],
        tape: tf.GradientTape,
    ):
        self._variables = [*model.trainable_variables, *model.non_trainable_variables]
        self._tape = tape
        self._others = {}
        # Of each trainable variable, all values that it has.
        self.values = [[variable.value] for variable in model.trainable_variables]
        self._place = {id(variable): i for i, variable in enumerate(self._variables)}
        super().__init__()
        for variable, value in zip(self._variables, state, strict=True):
            if value is not None:
                self.add_update((variable, value))

    def add_update(self, update):
        variable, value = update
        # No gradient flows through an assignment; it ends at the value assigned.
        value = tf.stop_gradient(value)
        place = self._place.get(id(variable))
        if place is None:
            self._others[id(variable)] = variable
        elif place < len(self.values):
            self._tape.watch(value)
            self.values[place].append(value)
        super().add_update((variable, value))

    def finish(self) -> list[tf.Tensor | None]:
        """Returns the model's new state, and gives others, of metrics, their values."""
        for variable in self._others.values():
            variable.assign(self.get_current_value(variable))
        return [self.get_current_value(variable) for variable in self._variables]


def _dense(gradient):
    return None if gradient is None else tf.convert_to_tensor(gradient)

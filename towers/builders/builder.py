"""A builder runs the steps of a Keras model on towers; `model/` calls it.

`model/` calls `create_variables` once the data are known. Then it calls
`train_function`, for the function that `fit` calls, or `train_step` from a user's own
loop; `test_step` and `predict_step`; `mark_copies_stale` where variables may have been
changed from outside; and `reset_traces` where the model has changed. Keras decides how
often steps are called and how their results are used.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from towers.builders.context import Context, ModelFacts
from towers.builders.pieces import Pieces
from towers.builders.steps import Steps
from towers.builders.train_function import Scope
from towers.keras_adapter.models import overrides


class Composed(NamedTuple):
    """The composed parts of a builder.

    Attributes:
        pieces: The pieces that all ways to update variables share.
        training: Trains: `Steps`, or `AsynchronousTraining`.
        evaluation: Evaluates and predicts.
        train_function: Makes the function that `fit` calls; see `train_function.py`.
    """

    pieces: Pieces
    training: Any
    evaluation: Steps
    train_function: Callable[[Scope], Callable[[Any], dict[str, tf.Tensor]]]


class Builder:
    """Trains, evaluates and predicts on towers.

    Attributes:
        name: Name of the way to update variables; see `strategies.py`.
        context: The state that all pieces share: the user's options, and the facts that
            steps have shown.
        pieces: The pieces that the builder is composed of.
        training: Trains.
        evaluation: Evaluates and predicts.
        model: The user's model.
        plan: Says which towers compute, and where variables live.
        guard: Stops training steps that are not finite, with `check_numerics`.
        timers: Measure how the time of training steps is spent.
        say: Prints lines that have not been printed before.
        staleness: Measures how stale updates are; `None` for synchronous training.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        compose: Callable[[], Composed],
        staleness: Any = None,
    ):
        """Composes the builder.

        Args:
            name: See `Builder`.
            context: See `Builder`.
            compose: Makes the parts, which know nothing of the model yet.
            staleness: See `Builder`.
        """
        self.name, self.context, self.staleness = name, context, staleness
        self.model, self.plan = context.model, context.plan
        self.guard, self.timers, self.say = context.guard, context.timers, context.say
        self._compose = compose
        self.reset_traces()

    def reset_traces(self) -> None:
        """Drops all traces, and the facts they have shown, after the model changed."""
        self.context.facts = ModelFacts()
        composed = self._compose()
        self.pieces, self.training = composed.pieces, composed.training
        self.evaluation = composed.evaluation
        self._train_function = composed.train_function

    def train_function(self, scope: Scope) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls; see `train_function`."""
        return self._train_function(scope)

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on one global batch; see `Steps.train_step`."""
        return self.training.train_step(data)

    def test_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Evaluates one global batch; see `Steps.test_step`."""
        return self.evaluation.test_step(data)

    def predict_step(self, data: Any) -> Any:
        """Computes the outputs of one global batch; see `Steps.predict_step`."""
        return self.evaluation.predict_step(data)

    def create_variables(self, data: Any) -> None:
        """Creates variables that Keras creates late; see `Steps.create_variables`."""
        self.training.create_variables(data)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables; see `VariableCreator.build_optimizer`.

        A model with its own `train_step` builds the optimizers that it uses.
        """
        if not overrides(self.model, "train_step"):
            self.pieces.creator.build_optimizer()

    def preprocess_batch(self, data: Any, training: bool) -> Any:
        """Returns a global batch as the loss sees it; see `LocalBatches`."""
        return self.pieces.batches.preprocess(data, training)

    def mark_copies_stale(self) -> None:
        """Marks copies as stale, as variables may have been changed from outside."""
        self.pieces.store.stale = True

    def broadcast_variables(self) -> None:
        """Copies the first host's values to the model's variables and their copies."""
        self.follow_first_host()
        self.pieces.store.broadcast()

    def follow_first_host(self) -> None:
        """Assigns the values of the first host's variables to the model."""
        self.pieces.store.follow_first_host()

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of the variables, if there are any."""
        return self.pieces.store.copies()

    @property
    def loss_placed(self) -> str | None:
        """The placement of the loss, "tower" or "gathered"; `None` before a step."""
        return self.context.facts.loss_placed

    @property
    def graph(self) -> tf.Graph | None:
        """The latest graph of a step of `train_function`, if any."""
        return self.context.facts.graph

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the update; see `Context.compiles_update`."""
        return self.context.compiles_update

    @property
    def xla(self) -> bool:
        """Whether XLA compiles towers and update.

        `None`, the default, does not compile the towers, and compiles the update where
        that is known to be faster; False compiles neither.
        """
        return self.context.xla

    @xla.setter
    def xla(self, value: bool | None) -> None:
        if value and not self.plan.pipeline.alone:
            line = (
                f"XLA does not compile model '{self.model.name}', as it computes in "
                "stages or micro-batches."
            )
            self.say([line])
        self.context.facts.asked_xla = value

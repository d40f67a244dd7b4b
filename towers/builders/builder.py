"""A builder: the steps of a Keras model on towers, as the Keras door calls them.

The door (`model/`) calls, in this order: `create_variables` once the data are known,
`train_function` for the function that `fit` calls, or `train_step` from a loop of the
user's; `test_step` and `predict_step`; `mark_copies_stale` where variables may have
been changed from outside; and `reset_traces` where the model has changed. How often
steps are called, and what becomes of their results, is Keras's business.
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
    """The pieces of a builder, and the two that make its steps.

    Attributes:
        pieces: What all ways to update variables have in common.
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
        name: The name of its way to update variables; see `strategies.py`.
        context: What its pieces share: the user's wishes, and what was found out.
        pieces: What it is put together of.
        training: Trains.
        evaluation: Evaluates and predicts.
        model: The user's model.
        plan: Which towers compute, and where variables live.
        guard: Stops a step of training that is not finite, if anything does.
        timers: Measure what the time of the steps of `train_function` goes to.
        say: Says lines that have not been said before.
        staleness: Measures how stale updates are; `None` if towers wait.
    """

    def __init__(
        self,
        name: str,
        context: Context,
        compose: Callable[[], Composed],
        staleness: Any = None,
    ):
        """Puts a builder together.

        What `compose` makes knows nothing of the model yet.
        """
        self.name, self.context, self.staleness = name, context, staleness
        self.model, self.plan = context.model, context.plan
        self.guard, self.timers, self.say = context.guard, context.timers, context.say
        self._compose = compose
        self.reset_traces()

    def reset_traces(self) -> None:
        """Forgets what steps have shown about the model, which has changed."""
        self.context.facts = ModelFacts()
        composed = self._compose()
        self.pieces, self.training, self.evaluation = composed[:3]
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
        """Creates what Keras creates late; see `Steps.create_variables`."""
        self.training.create_variables(data)

    def build_optimizer(self) -> None:
        """Creates the optimizer's variables; see `VariableCreator.build_optimizer`.

        A step of the model's own builds those that it makes use of.
        """
        if not overrides(self.model, "train_step"):
            self.pieces.creator.build_optimizer()

    def preprocess_batch(self, data: Any, training: bool) -> Any:
        """Returns a whole batch as the loss sees it; see `LocalBatches`."""
        return self.pieces.batches.preprocess(data, training)

    def mark_copies_stale(self) -> None:
        """Has copies renewed, as variables may have been changed from outside."""
        self.pieces.store.stale = True

    def broadcast_variables(self) -> None:
        """Gives copies of the variables, on any host, the first host's values."""
        self.follow_first_host()
        self.pieces.store.broadcast()

    def follow_first_host(self) -> None:
        """Gives the model the values of the first host's variables."""
        self.pieces.store.follow_first_host()

    def copies(self) -> list[tf.Variable]:
        """Returns the copies of the variables, if there are any."""
        return self.pieces.store.copies()

    @property
    def loss_placed(self) -> str | None:
        """Where the loss is computed, "tower" or "gathered"; `None` before a step."""
        return self.context.facts.loss_placed

    @property
    def graph(self) -> tf.Graph | None:
        """The graph that a step of `train_function` was last made in, if any."""
        return self.context.facts.graph

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the update; see `Context.compiles_update`."""
        return self.context.compiles_update

    @property
    def xla(self) -> bool:
        """Whether XLA compiles towers and update.

        `None`, the default, leaves the towers as they are, and has the update compiled
        where that is known to pay; False leaves both.
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

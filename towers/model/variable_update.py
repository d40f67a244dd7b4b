"""How the variables of a model are updated: by which builder, and whether by XLA."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.builder import Builder
from towers.collectives import batch
from towers.devices import HOST
from towers.keras_adapter.models import compile_config
from towers.keras_adapter.runtime import is_deterministic
from towers.layers import variables
from towers.model.auto import Choice
from towers.model.replayable import ReplayableBatches
from towers.tower.errors import explained_leaks
from towers.tower.run import is_synchronized


class XlaWish:
    """What `compile` was told of XLA, by the argument `jit_compile`."""

    def __init__(self, model: keras.Model):
        self._model = model
        # What was told, and what shows whether that was the last time.
        self._told = self._config = None

    def tell(self, jit_compile: Any) -> None:
        """Is told the wish, when the model has been compiled with it."""
        self._told, self._config = jit_compile, compile_config(self._model)

    def wanted(self, say: Callable[[Sequence[str]], None]) -> bool | None:
        """Tells whether XLA is to compile towers and update; `None`: what is faster.

        Keras's own "auto" turns it on as soon as there is a GPU. Towers would be
        compiled for each device and each size of a local batch, so here it is tried.
        """
        model, told = self._model, self._told
        wanted = model.compiled and model.jit_compile
        if self._config is not compile_config(model):
            # Compiled without us: Keras keeps only what it has made of the wish.
            told = wanted
            if wanted and tf.config.list_physical_devices("GPU"):
                told = "auto"
                line = (
                    f"Model '{model.name}' was compiled before multi_gpu_model() got "
                    "it, and Keras turns XLA on by itself where there is a GPU, so "
                    "the towers go without; if XLA is wanted, compile what "
                    "multi_gpu_model() returns, with jit_compile=True."
                )
                say([line])
        if told is None or told == "auto":
            return None
        return bool(told and wanted)


class VariableUpdate:
    """How the variables are updated.

    With variable_update="auto", the first call of training chooses (`first_call.py`).
    After the model has been compiled again, the next call chooses again.

    Attributes:
        model: The user's model.
        builder: The builder in use.
        choice: What the builder was made for.
        chosen: Whether nothing is left to choose.
        file: Where to keep what was chosen, if anywhere.
        xla: Whether XLA compiles towers and update where the choice does not say so;
            `None` for the update alone where that pays.
        xla_wish: What the user wants of XLA.
    """

    def __init__(
        self,
        model: keras.Model,
        make: Callable[[Choice], Builder],
        choice: Choice,
        ways: Callable[..., list[Choice]] | None = None,
        file: str | None = None,
    ):
        """Makes the first builder.

        Args:
            model: See the attributes.
            make: Makes the builder of a choice.
            choice: The first choice.
            ways: Lists the choices. It takes whether XLA is wanted, and whether the
                model is synchronized. `None` if there is only one choice.
            file: See the attributes.
        """
        self.model, self.choice, self.file = model, choice, file
        self.builder = make(choice)
        self.chosen = ways is None
        self.xla: bool | None = None
        self.xla_wish = XlaWish(model)
        self._make, self._ways = make, ways
        self._seen: list[Any] = []

    def reset_if_changed(self) -> bool:
        """Starts anew if the model was compiled or moved, through whichever object.

        Returns:
            Whether it was.
        """
        self.builder.mark_copies_stale()
        if not self.differs(self._seen):
            return False
        self._seen = self.state()
        self.builder.reset_traces()
        self.xla = self.builder.xla = self.xla_wish.wanted(self.builder.say)
        self.chosen = self._ways is None
        # A step count, a learning rate and means were created where the user was.
        variables.move(self.model, self.builder.pieces.copies.home_of)
        return True

    def expect_change(self) -> None:
        """Has `reset_if_changed` start anew."""
        self._seen = []

    def state(self) -> list[Any]:
        """Returns objects that are others when the model is compiled or moved."""
        return [compile_config(self.model), *(v.value for v in self.model.variables)]

    def differs(self, before: list[Any]) -> bool:
        """Tells whether `state` has changed."""
        now = self.state()
        return len(now) != len(before) or any(map(operator.is_not, now, before))

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Inside, a step is traced or run, or variables are created for it."""
        # Where TensorFlow is not told, it would choose the first GPU: for cutting a
        # batch that is on the host, and has to go to all of them.
        with tf.device(HOST), explained_leaks(self.model):
            yield
            # What was built in the meantime is not a change.
            self._seen = self.state()

    @property
    def needs_first_call(self) -> bool:
        """Whether the next call may fail, has to choose, or needs to know its batch."""
        builder = self.builder
        in_stages = builder.plan.pipeline.stages > 1
        may_fail = builder.plan.on_gpus or builder.compiles_update
        return may_fail or in_stages or not self.chosen

    def ways(self) -> list[Choice]:
        """Lists the ways to choose from; none where nothing may hang on time."""
        if self.chosen or self.model.run_eagerly or is_deterministic():
            return []
        wanted = self.xla_wish.wanted(self.builder.say)
        return self._ways(wanted, is_synchronized(self.model))

    def install(self, choice: Choice, batches: ReplayableBatches) -> None:
        """Puts another builder in use, during the first call, which holds `batches`."""
        watched = self.builder.context.callbacks_may_write
        self.choice = choice
        self.builder = self._make(choice)
        self.builder.xla = choice.xla or self.xla
        self.builder.context.callbacks_may_write = watched
        self.create_first(batches)

    def create_first(self, batches: ReplayableBatches) -> None:
        """Creates the variables for the first call; its batches have the usual size."""
        self.create_variables(batches.first)
        first = tf.nest.map_structure(batch.as_tensor, batches.first)
        self.builder.context.usual_rows = int(batch.batch_size(first))

    def create_variables(self, data: Any) -> None:
        """Creates missing variables; `data` is a batch or its `tf.TypeSpec`s."""
        with self.step_scope():
            self.builder.create_variables(data)

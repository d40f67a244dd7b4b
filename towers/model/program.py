"""A model in training: its current builder, and those kept for other layouts.

Each layout of towers has its own builder. The graphs of the last eight layouts are
kept, as tracing takes longer than many steps. Copies on devices that are not in use are
emptied, and allocated again when a layout returns.
"""

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.builders.builder import Builder
from towers.builders.context import Context
from towers.builders.guard import Guard
from towers.builders.steps import is_synchronized
from towers.builders.strategies import STRATEGIES
from towers.collectives import batch
from towers.collectives.joined_hosts import this_host
from towers.devices.names import HOST, is_gpu
from towers.keras_adapter.models import already, compile_config
from towers.keras_adapter.runtime import is_deterministic
from towers.keras_adapter.variables import (
    empty,
    give_room,
    put_behind,
    value_behind,
)
from towers.layers import variables
from towers.loop import alike
from towers.model import auto, placing
from towers.model.auto import Choice
from towers.model.options import UPDATES, Auto, Config, Layout, Replicated
from towers.program.features import feature
from towers.tower.errors import explained_leaks
from towers.tower.preprocess import Preprocess

# Number of layouts whose graphs are kept, besides the current one.
_MOST_KEPT = 8


class Program:
    """The state of one model in training: its builder, and how that was chosen.

    With variable_update="auto", the first calls of training choose (`first_calls.py`).
    On GPUs it also chooses whether XLA compiles the towers, unless `compile` was told.
    After the model has been compiled again, the next call chooses again.

    The object holds what changes during training; the user's options are in `config`.

    Attributes:
        model: The user's model.
        config: The user's options.
        layout: The current towers.
        builder: The current builder.
        choice: The choice that the builder was made for.
        told: The way that the user has set; `None` for the fastest.
        chosen: Whether nothing is left to choose.
        xla: Whether XLA compiles towers and update if the choice leaves it open; `None`
            for the update alone, where that is faster.
    """

    def __init__(self, model: keras.Model, config: Config, layout: Layout):
        """Makes the first builder; all hosts that train together call it.

        Raises:
            ValueError: The model cannot be trained with these options.
            HostsDifferError: Other hosts have other options.
        """
        self.model, self.config, self.layout = model, config, layout
        self._pipeline = placing.pipeline_of(model, config)
        # `None` for the first tower's device in any layout.
        self._home = placing.find_home(model, config, layout)
        self._guard = Guard() if config.check_numerics else None
        self._preprocess = config.preprocess and Preprocess(config.preprocess)
        # Lines printed about the model, by any builder.
        self._said: set[Any] = set()
        self._hosts = this_host()
        config.check_hosts(self._hosts.count)
        self._compare(self._hosts)
        self._agree()
        self.told = None
        if not isinstance(config.variable_update, Auto):
            self.told = Choice.of(config.variable_update)
        ways = self._choices(xla=False, synchronized=False)
        self.choice = self.told or auto.of_all_hosts(ways, self._hosts)[0]
        self.builder = self._make_builder(self.choice)
        self.chosen = not _may_choose(self.told, layout)
        self.xla: bool | None = None
        # The `jit_compile` of `compile`, and an object that shows if it is the latest.
        self._jit_compile = self._compile_config = None
        self._seen: list[Any] = []
        self._kept: dict[Layout, _Kept] = {}

    def reset_if_changed(self) -> bool:
        """Resets traces and choices if the model was compiled or moved.

        Returns:
            Whether it was compiled or moved.
        """
        self.builder.mark_copies_stale()
        if not self.has_changed:
            return False
        self._seen = self.state()
        self.builder.reset_traces()
        self.xla = self.builder.xla = self.wanted_xla()
        self.chosen = not _may_choose(self.told, self.layout)
        self._kept.clear()
        placing.bring_home(self.model, self.builder.plan, self.config)
        # Step count, learning rate and metrics were created in the user's device scope.
        variables.move(self.model, self.builder.plan.home_of)
        return True

    @property
    def has_changed(self) -> bool:
        """Whether the model was compiled or moved since it was reset or trained."""
        return self.differs(self._seen)

    def expect_change(self) -> None:
        """Makes the next `reset_if_changed` reset."""
        self._seen = []

    def state(self) -> list[Any]:
        """Returns objects whose identity changes as the model is compiled or moved."""
        own = already(self.model, "variables")
        return [compile_config(self.model), *(v.value for v in own)]

    def differs(self, before: list[Any]) -> bool:
        """Returns whether `state` has changed."""
        return _differ(before, self.state())

    @contextlib.contextmanager
    def step_scope(self) -> Iterator[None]:
        """Inside, a step is traced or run, or variables are created for it."""
        # By default, TensorFlow would choose the first GPU to cut a batch, which is on
        # the host and goes to all GPUs.
        with tf.device(HOST), explained_leaks(self.model):
            yield
            # Variables that were built inside are not a change.
            self._seen = self.state()

    @property
    def needs_first_call(self) -> bool:
        """Whether the next call may fail, chooses a way, or needs its batch size."""
        builder = self.builder
        in_stages = builder.plan.pipeline.stages > 1
        may_fail = builder.plan.on_gpus or builder.compiles_update
        return may_fail or in_stages or not self.chosen

    def ways(self) -> list[Choice]:
        """Lists the ways to choose from; empty if results must not depend on time."""
        if self.chosen or self.model.run_eagerly or is_deterministic():
            return []
        wanted = self.wanted_xla()
        return self._choices(wanted, is_synchronized(self.model))

    def set_xla(self, jit_compile: Any) -> None:
        """Stores the argument of `compile`, after the model was compiled with it."""
        self._jit_compile = jit_compile
        self._compile_config = compile_config(self.model)

    def wanted_xla(self) -> bool | None:
        """Returns whether XLA is to compile towers and update; `None` for the faster.

        Keras's own "auto" turns XLA on if there is a GPU. Towers would be compiled for
        each device and each size of a local batch, so here it is measured.
        """
        model, setting = self.model, self._jit_compile
        wanted = model.compiled and model.jit_compile
        if self._compile_config is not compile_config(model):
            # Compiled on the original model: Keras keeps only the resulting setting.
            setting = wanted
            if wanted and tf.config.list_physical_devices("GPU"):
                setting = "auto"
                line = (
                    f"Model '{model.name}' was compiled before multi_gpu_model() got "
                    "it, and Keras turns XLA on by itself where there is a GPU, so "
                    "the towers go without; if XLA is wanted, compile what "
                    "multi_gpu_model() returns, with jit_compile=True."
                )
                self.builder.say([line])
        if setting is None or setting == "auto":
            return None
        return bool(setting and wanted)

    def _choices(self, xla, synchronized):
        """Lists the candidates; see `auto.candidates`."""
        firsts, asked = self.layout.firsts, self.config.device is not None
        alone, connected = self._hosts.count == 1, self._hosts.connects_devices
        nccl = self.layout.nccl_fits and (alone or connected)
        return auto.candidates(
            firsts,
            nccl,
            xla,
            synchronized,
            stays=asked and self._home not in (None, firsts[0]),
            in_stages=not self._pipeline.alone,
            told=self.told,
            across_hosts=connected,
        )

    def _make_builder(self, choice):
        """Makes a builder, and moves the variables to the devices it needs."""
        model, config, layout = self.model, self.config, self.layout
        copied = choice.variable_update == Replicated.name
        plan = placing.plan_of(
            config,
            self._pipeline,
            layout,
            None if copied else self._home,
            self._hosts,
        )
        placing.place(model, plan, config, copied)
        context = Context(
            model,
            plan,
            loss_placement=config.loss_placement,
            strict=config.strict,
            preprocess=self._preprocess,
            prefetch=config.batches_ahead(layout.firsts),
            guard=self._guard,
            agreement=self._agreement,
            shard_embeddings=config.tables,
            said=self._said,
        )
        # A way that `Auto` has chosen has no options but the all-reduce algorithm.
        update = config.variable_update
        if isinstance(update, Auto):
            update = UPDATES[choice.variable_update]()
        options = update.builder_options(choice.all_reduce_alg)
        return STRATEGIES[choice.variable_update](context, **options)

    def install(self, choice: Choice, first: Any, on_trial: bool = False) -> None:
        """Installs another builder during the first call.

        Args:
            choice: The way to update the variables.
            first: The first batch of the call.
            on_trial: Whether to hold back the builder's lines; see `Context.hold`.
        """
        self._install(choice)
        if on_trial:
            self.builder.context.hold()
        self.create_first(first)

    def _install(self, choice):
        builder = self._make_builder(choice)
        builder.xla = choice.xla or self.xla
        builder.context.usual_rows = self.builder.context.usual_rows
        self.use(choice, builder)

    def use(self, choice: Choice, builder: Builder) -> None:
        """Continues with a builder, whose copies follow the model's variables."""
        may_write = self.builder.context.callbacks_may_write
        self.choice, self.builder = choice, builder
        builder.context.callbacks_may_write = may_write
        builder.mark_copies_stale()

    def change_layout(
        self, layout: Layout, functions: dict[str, Any]
    ) -> dict[str, Any]:
        """Installs a builder for another layout, between two calls.

        Traces for a layout are kept for the next time, unless the variables have moved
        since. Devices that are no longer used keep no copies of variables.

        Args:
            layout: The layout.
            functions: Functions of the current builder, by name.

        Returns:
            Earlier functions of the new builder, by name; empty if it is new.
        """
        before, kept = self.layout, self._kept.pop(layout, None)
        now = _Kept(self.builder, self.choice, functions, self._places())
        for copy in _copies(now.builder):
            empty(copy)
        if kept is not None and not _differ(kept.places, now.places):
            self.layout = layout
            self.use(kept.choice, kept.builder)
            for copy in _copies(self.builder):
                give_room(copy)
            functions = kept.functions
        else:
            functions = {}
            self._make(layout, now.places)
        self._keep(before, now)
        return functions

    def _make(self, layout, places):
        """Makes a builder for another layout; on failure, restores the current one."""
        before, choice = self.layout, self.choice
        if choice.all_reduce_alg == "nccl" and not layout.nccl_fits:
            choice = choice._replace(all_reduce_alg="auto")
        self.layout = layout
        try:
            self._install(choice)
        except BaseException:
            self.layout = before
            # Some variables may have moved; their old values are still there.
            for variable, value in zip(variables.of(self.model), places, strict=True):
                put_behind(variable, value)
            self._seen = self.state()
            for copy in _copies(self.builder):
                give_room(copy)
            self.builder.mark_copies_stale()
            raise
        # Moved variables are not a change by the user.
        self._seen = self.state()

    def _keep(self, layout, kept):
        """Keeps builders that may be used again; others would pin old variables."""
        self._kept[layout] = kept
        current = self._places()
        self._kept = {
            other_layout: kept_builder
            for other_layout, kept_builder in self._kept.items()
            if not _differ(kept_builder.places, current)
        }
        _limit(self._kept)

    def _compare(self, hosts):
        """Sets the hosts, after a check that all have the same options."""
        self._hosts = hosts.compressing(self.config.gradient_compression)
        if hosts.count > 1:
            alike.check(self._hosts, {"multi_gpu_model()": self.config.given})

    def _agree(self):
        """Sets up the agreement on batches, if several hosts train together."""
        self._agreement = None
        if self._hosts.count > 1:
            agreement = feature("loop.agreement").Agreement
            self._agreement = agreement(self._hosts, self.model)

    def layout_of(
        self,
        gpus: int | Sequence[int] | Sequence[str] | None,
        split_ratios: Sequence[int] | None,
    ) -> Layout:
        """Makes a layout of the arguments of `TowerModel.resize`.

        Raises:
            ValueError: A device does not exist, or cannot have a tower.
        """
        layout = Layout.of(gpus, self.config.stages.count, split_ratios)
        self.config.variable_update.check_towers(layout.firsts)
        return layout

    def _places(self):
        """Returns the TensorFlow value behind each variable that a step may use."""
        return [*map(value_behind, variables.of(self.model))]

    def create_first(self, first: Any) -> None:
        """Creates the variables for the first call; its batches have the usual size.

        Args:
            first: The first batch of the call.
        """
        tensors = tf.nest.map_structure(batch.as_tensor, first)
        self.builder.context.usual_rows = int(batch.batch_size(tensors))
        self.create_variables(first)

    def create_variables(self, data: Any) -> None:
        """Creates missing variables; `data` is a batch or its `tf.TypeSpec`s."""
        with self.step_scope():
            self.builder.create_variables(data)


def _may_choose(told, layout):
    """Returns whether the first call may have a choice; see `Program.told`."""
    if told is None:
        return True
    return told.variable_update != "asynchronous" and is_gpu(layout.firsts[0])


class _Kept(NamedTuple):
    """A builder that is not in use.

    Attributes:
        builder: The builder.
        choice: The choice that it was made for.
        functions: The functions that it has made, by name.
        places: The TensorFlow value behind each variable at that time.
    """

    builder: Builder
    choice: Choice
    functions: dict[str, Any]
    places: list[Any]


def _limit(kept):
    """Drops the builders that were not used for longest."""
    while len(kept) > _MOST_KEPT:
        kept.pop(next(iter(kept)))


def _differ(before, now):
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def _copies(builder):
    """Returns the variables that need memory on devices only while these compute."""
    return builder.pieces.store.copies()

"""How the variables of a model are updated: by which builder, and whether by XLA.

Other towers are another builder. The graphs of the last eight layouts are kept, as
tracing takes longer than many steps. Copies on devices that are left are emptied, and
given room again.
"""

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.builders.builder import Builder
from towers.builders.context import Context
from towers.builders.guard import Guard
from towers.builders.steps import is_synchronized
from towers.builders.strategies import STRATEGIES
from towers.collectives import batch
from towers.collectives.membership import this_host
from towers.collectives.world import World
from towers.devices.names import HOST, is_gpu
from towers.hosts import group
from towers.hosts.group import Membership
from towers.keras_adapter.models import already, compile_config
from towers.keras_adapter.runtime import is_deterministic
from towers.keras_adapter.variables import (
    empty,
    give_room,
    put_behind,
    value_behind,
)
from towers.layers import variables
from towers.loop import alike, loop
from towers.model.options import UPDATES, Auto, Config, Layout, Replicated
from towers.model.update import auto, placing
from towers.model.update.auto import Choice
from towers.program.features import feature
from towers.program.python_calls import until_exit
from towers.tower.errors import explained_leaks
from towers.tower.preprocess import Preprocess

# Layouts whose graphs are kept, beside the one in use.
_MOST_KEPT = 8


class ReplayableBatches:
    """The batches of one call of training, which is handed an iterator, read once.

    They are taken out of it. What reads them instead loses nothing of the data.

    Attributes:
        first: The first of them.
    """

    def __init__(self, iterator: Iterator, steps: int):
        """Takes `steps` batches from an iterator, or fewer at the end of the data.

        Raises:
            StopIteration: If there is none left.
        """
        waiting = loop.taken(iterator, steps)
        more = itertools.islice(iterator, steps - len(waiting))
        self._batches = [*waiting, *more]
        if not self._batches:
            raise StopIteration
        self._spec = getattr(iterator, "element_spec", None)
        self.first = loop.without_optionals(self._batches[0])

    def __len__(self) -> int:
        return len(self._batches)

    def read(self, repeat: bool = False) -> Iterator:
        """Returns an iterator over them, of the kind that they came from.

        With `repeat`, it begins again after the last, for ever.
        """
        if self._spec is not None:
            data = tf.data.Dataset.range(len(self)).map(self._batch)
            # From memory, a batch costs next to nothing.
            return iter(data.cache().repeat() if repeat else data)
        return itertools.cycle(self._batches) if repeat else iter(self._batches)

    @tf.autograph.experimental.do_not_convert
    def _batch(self, index):
        """A batch as an element of a data set, of the type that it came from.

        Not by `Dataset.from_generator`; `input_pipeline/pipeline/epochs.py` says why.
        """

        @until_exit
        def components(index):
            return loop.flat(self._batches[int(index)])

        specs = tf.nest.flatten(self._spec, expand_composites=True)
        dtypes = [spec.dtype for spec in specs]
        tensors = tf.py_function(components, [index], dtypes)
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(self._spec, tensors, expand_composites=True)


class VariableUpdate:
    """How the variables are updated.

    With variable_update="auto", the first call of training chooses (`first_call.py`).
    On GPUs it also chooses whether XLA compiles the towers, unless `compile` was told.
    After the model has been compiled again, the next call chooses again.

    It has what changes while the model trains; what the user has asked for does not.

    Attributes:
        model: The user's model.
        config: What the user has asked for.
        layout: The towers in use.
        builder: The builder in use.
        choice: What the builder was made for.
        told: The way that the user wants; `None` for the best one.
        chosen: Whether nothing is left to choose.
        xla: Whether XLA compiles towers and update where the choice does not say so;
            `None` for the update alone where that pays.
        xla_wish: What the user wants of XLA.
        state_lost: Whether a host has gone with its part of what hosts divide, so that
            a checkpoint has to tell.
    """

    def __init__(self, model: keras.Model, config: Config, layout: Layout):
        """Makes the first builder; all hosts that train together call it.

        Raises:
            ValueError: The model cannot be trained as was asked.
            HostsDifferError: Other hosts were asked for something else.
        """
        self.model, self.config, self.layout = model, config, layout
        self._pipeline = placing.pipeline_of(model, config)
        # `None` for the first tower's device, of whichever layout.
        self._home = placing.find_home(model, config, layout)
        self._guard = Guard() if config.check_numerics else None
        self._preprocess = config.preprocess and Preprocess(config.preprocess)
        # What was said of the model, by whichever builder.
        self._said: set[Any] = set()
        self._hosts, self._agreement = this_host(), None
        # Others may come.
        least = 1 if group.member() is None else 2
        config.check_hosts(max(self._hosts.count, least))
        self._compare(self._hosts)
        self._agree()
        self.told = None
        if not isinstance(config.variable_update, Auto):
            self.told = Choice.of(config.variable_update)
        self.choice = self.told or self._choices(xla=False, synchronized=False)[0]
        self.builder = self._make_builder(self.choice)
        self.chosen = not _may_choose(self.told, layout)
        self.xla: bool | None = None
        self.xla_wish = XlaWish(self.model)
        self._seen: list[Any] = []
        self._kept: dict[Layout, _Kept] = {}
        # Of hosts that come and go, by rank, ratios of all, choice and layout.
        self._kept_places: dict[Any, _Kept] = {}
        self._place: tuple[Any, ...] | None = None
        self._membership: Membership | None = group.joined()
        self.state_lost = False

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
        self.chosen = not _may_choose(self.told, self.layout)
        self._kept.clear()
        self._kept_places.clear()
        placing.bring_home(self.model, self.builder.plan, self.config)
        # A step count, a learning rate and means were created where the user was.
        variables.move(self.model, self.builder.plan.home_of)
        return True

    def expect_change(self) -> None:
        """Has `reset_if_changed` start anew."""
        self._seen = []

    def state(self) -> list[Any]:
        """Returns objects that are others when the model is compiled or moved."""
        own = already(self.model, "variables")
        return [compile_config(self.model), *(v.value for v in own)]

    def differs(self, before: list[Any]) -> bool:
        """Tells whether `state` has changed."""
        return _differ(before, self.state())

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
        """Tells whether the next call may fail, chooses, or needs to know its batch."""
        builder = self.builder
        in_stages = builder.plan.pipeline.stages > 1
        may_fail = builder.plan.on_gpus or builder.compiles_update
        return may_fail or in_stages or not self.chosen

    def ways(self) -> list[Choice]:
        """Lists the ways to choose from; none where nothing may hang on time."""
        if self.chosen or self.model.run_eagerly or is_deterministic():
            return []
        wanted = self.xla_wish.wanted(self.builder.say)
        return self._choices(wanted, is_synchronized(self.model))

    def _choices(self, xla, synchronized):
        """Lists what may be chosen; see `auto.candidates`."""
        firsts, asked = self.layout.firsts, self.config.device is not None
        return auto.candidates(
            firsts,
            self.layout.nccl_fits,
            xla,
            synchronized,
            stays=asked and self._home not in (None, firsts[0]),
            in_stages=not self._pipeline.alone,
            told=self.told,
        )

    def _make_builder(self, choice, ratios_of_hosts=None):
        """Makes a builder, and moves the variables to where it needs them."""
        model, config, layout = self.model, self.config, self.layout
        copied = choice.variable_update == Replicated.name
        plan = placing.plan_of(
            config,
            self._pipeline,
            layout,
            None if copied else self._home,
            self._hosts,
            ratios_of_hosts,
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
            is_elastic=group.member() is not None,
            said=self._said,
        )
        # What `Auto` has chosen has no other options than how gradients are added.
        update = config.variable_update
        if isinstance(update, Auto):
            update = UPDATES[choice.variable_update]()
        options = update.builder_options(choice.all_reduce_alg)
        return STRATEGIES[choice.variable_update](context, **options)

    def install(self, choice: Choice, batches: ReplayableBatches) -> None:
        """Puts another builder in use, during the first call, which holds `batches`."""
        self._install(choice)
        self.create_first(batches)

    def _install(self, choice, ratios_of_hosts=None):
        before = self.builder.context
        self.builder = self._make_builder(choice, ratios_of_hosts)
        self.choice = choice
        self.builder.xla = choice.xla or self.xla
        self.builder.context.callbacks_may_write = before.callbacks_may_write
        self.builder.context.usual_rows = before.usual_rows

    def change_layout(
        self, layout: Layout, functions: dict[str, Any]
    ) -> dict[str, Any]:
        """Puts a builder for another layout in use, between two calls.

        What was traced for a layout is kept for the next time, unless the variables
        have moved since. Devices that are left keep no copy of a variable.

        Args:
            layout: The layout.
            functions: What was made by the builder that is in use, by name.

        Returns:
            What was made by the other one before, by name; nothing if it is new.
        """
        before, kept = self.layout, self._kept.pop(layout, None)
        now = _Kept(self.builder, self.choice, functions, self._places())
        for copy in _copies(now.builder):
            empty(copy)
        if kept is not None and not _differ(kept.places, now.places):
            watched = self.builder.context.callbacks_may_write
            self.layout, self.builder, self.choice = layout, kept.builder, kept.choice
            self.builder.context.callbacks_may_write = watched
            for copy in _copies(self.builder):
                give_room(copy)
            self.builder.mark_copies_stale()
            functions = kept.functions
        else:
            functions = {}
            self._make(layout, now.places)
        self._keep(before, now)
        return functions

    def _make(self, layout, places):
        """Makes a builder of another layout; if that fails, all is as it was."""
        before, choice = self.layout, self.choice
        if choice.all_reduce_alg == "nccl" and not layout.nccl_fits:
            choice = choice._replace(all_reduce_alg="auto")
        self.layout = layout
        try:
            self._install(choice)
        except BaseException:
            self.layout = before
            # Some variables may have moved, and have their values where they were.
            for variable, place in zip(variables.of(self.model), places, strict=True):
                put_behind(variable, place)
            self._seen = self.state()
            for copy in _copies(self.builder):
                give_room(copy)
            self.builder.mark_copies_stale()
            raise
        # What has moved is no change of the user's.
        self._seen = self.state()

    def _keep(self, layout, kept):
        """Keeps what may be used again; of others, variables would stay where left."""
        self._kept[layout] = kept
        places = self._places()
        self._kept = {
            each: found
            for each, found in self._kept.items()
            if not _differ(found.places, places)
        }
        _limit(self._kept)

    def is_of_hosts(self, membership: Membership | None) -> bool:
        """Tells whether the builder in use was made for these hosts."""
        return self._membership is membership

    def follow_hosts(self, why: str, functions: dict[str, Any]) -> dict[str, Any]:
        """Puts a builder for other hosts in use; all of these hosts call it together.

        They update variables as the first host does, if that was chosen before. What
        was traced before for the same place is used again, unless others would wait for
        this host while they trace theirs.

        Args:
            why: Why they train together, after others; empty for the first ones. What
                the first host says counts.
            functions: What was made by the builder that is in use, by name.

        Returns:
            What was made by the other one before, by name; nothing if it is new.
        """
        used = self._place is not None and self._place[-1] == self.layout
        if used and not self.config.divides_variables:
            # The choice may be another one since.
            place = *self._place[:2], self.choice, self.layout
            aside = _Kept(self.builder, self.choice, functions, self._places())
            self._kept_places[place] = aside
            _limit(self._kept_places)
            for copy in _copies(self.builder):
                empty(copy)
        self._membership = group.joined()
        self._compare(this_host())
        self._kept.clear()
        hosts = self._hosts
        mine = [self.chosen, [*self.choice], self.xla, why]
        self.chosen, choice, self.xla, why = hosts.broadcast_value(mine)
        choice = Choice(*choice)
        ratios = hosts.exchange(self.layout.split_ratios)
        self._place = hosts.index, str(ratios), choice, self.layout
        kept = self._kept_places.pop(self._place, None)
        if kept is not None and _differ(kept.places, self._places()):
            kept = None
        if _agree_to_use(kept, hosts, self.needs_first_call):
            self.builder, self.choice = kept.builder, choice
            self._agreement = kept.builder.context.agreement
            for copy in _copies(self.builder):
                give_room(copy)
            self.builder.mark_copies_stale()
            functions = kept.functions
        else:
            self._agree()
            self._install(choice, ratios)
            functions = {}
        self.builder.context.why_hosts = why
        self._seen = self.state()
        return functions

    def _compare(self, hosts):
        """Takes hosts in the place of those before, if they were asked for the same."""
        self._hosts = hosts.compressing(self.config.gradient_compression)
        if hosts.count > 1:
            alike.check(self._hosts, {"multi_gpu_model()": self.config.given})

    def _agree(self):
        """Has hosts that train together agree on batches."""
        self._agreement = None
        if self._hosts.count > 1:
            agreement = feature("loop.agreement").Agreement
            self._agreement = agreement(self._hosts, self.model)

    def expect_hosts(self, hosts: World, functions: dict[str, Any]) -> dict[str, Any]:
        """Puts a builder in use for hosts that this process has not joined yet.

        What is traced by it is there for `follow_hosts`.

        Args:
            hosts: As they will probably be, this host's place among them.
            functions: What was made by the builder that is in use, by name.

        Returns:
            Nothing, as all functions are new.
        """
        self._compare(hosts)
        self._agree()
        ratios = [[*self.layout.split_ratios]] * hosts.count
        self._place = hosts.index, str(ratios), self.choice, self.layout
        self._install(self.choice, ratios)
        return {}

    def layout_of(
        self,
        gpus: int | Sequence[int] | Sequence[str] | None,
        split_ratios: Sequence[int] | None,
    ) -> Layout:
        """Reads the arguments of `TowerModel.resize`.

        Raises:
            ValueError: There are no such devices, or towers cannot be on them.
        """
        layout = Layout.of(gpus, self.config.stages.count, split_ratios)
        self.config.variable_update.check_towers(layout.firsts)
        return layout

    def _places(self):
        """What stands behind each variable that a step may use."""
        return [*map(value_behind, variables.of(self.model))]

    def create_first(self, batches: ReplayableBatches) -> None:
        """Creates the variables for the first call; its batches have the usual size."""
        first = tf.nest.map_structure(batch.as_tensor, batches.first)
        self.builder.context.usual_rows = int(batch.batch_size(first))
        self.create_variables(batches.first)

    def create_variables(self, data: Any) -> None:
        """Creates missing variables; `data` is a batch or its `tf.TypeSpec`s."""
        with self.step_scope():
            self.builder.create_variables(data)


def _may_choose(told, layout):
    """Tells whether the first call may have to choose; see `VariableUpdate.told`."""
    if told is None:
        return True
    return told.variable_update != "asynchronous" and is_gpu(layout.firsts[0])


class _Kept(NamedTuple):
    """A builder that is out of use.

    Attributes:
        builder: The builder.
        choice: What it was made for.
        functions: What it has made, by name.
        places: What stood behind each variable.
    """

    builder: Builder
    choice: Choice
    functions: dict[str, Any]
    places: list[Any]


def _agree_to_use(kept, hosts, needs_first_call):
    """Tells whether this host may use what it has kept; all hosts call it together.

    Those that trace anew may have to meet others for it, in their first call.
    """
    told = hosts.exchange([kept is not None, needs_first_call])
    have_it, meet = zip(*told, strict=True)
    return kept is not None and (all(have_it) or not any(meet))


def _limit(kept):
    """Forgets what was not used for longest."""
    while len(kept) > _MOST_KEPT:
        kept.pop(next(iter(kept)))


def _differ(before, now):
    return len(now) != len(before) or any(map(operator.is_not, now, before))


def _copies(builder):
    """The variables that take memory on devices only while these compute."""
    return builder.pieces.store.copies()


# What the user wants of XLA.


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

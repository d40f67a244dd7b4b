"""The context that all pieces of a builder share: model, plan and user options."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.builders.guard import Guard
from towers.collectives import batch
from towers.devices.names import is_gpu
from towers.keras_adapter.models import has_own_steps, measuring
from towers.loop.timers import StepTimers
from towers.partition.call import Execution
from towers.plan import Plan
from towers.program import voice
from towers.program.features import feature
from towers.tower.preprocess import Preprocess

# Assumed size of a batch, or of another dimension, whose size is not known.
_FEW_ROWS = 8


@dataclasses.dataclass
class ModelFacts:
    """Facts about a model that its steps have shown; dropped when the model changes.

    Attributes:
        loss_placed: Where training computes the loss: on each "tower", or "gathered" at
            home; `None` before the first step.
        asked_xla: Whether XLA is to compile towers and update; `None` to compile where
            that is known to be faster.
        unseeded: Phrases that say where a training step draws random numbers without a
            seed.
        unsaved: Variables that a training step changes and no attribute of the model
            holds, such as a loss's own counter.
        compiled: Whether XLA is known to compile the model, as it has compiled a
            training step.
        graph: The latest graph of a training step, if any.
        kept_whole: The `id`s of variables that are not sharded, as a step assigns them
            itself.
    """

    loss_placed: str | None = None
    asked_xla: bool | None = None
    unseeded: Sequence[str] = ()
    unsaved: Sequence[tf.Variable] = ()
    compiled: bool = False
    graph: tf.Graph | None = None
    kept_whole: set[int] = dataclasses.field(default_factory=set)


@dataclasses.dataclass
class Context:
    """The model, the plan and the user's options, which all pieces of a builder share.

    Attributes:
        model: The user's model; its variables are the shared variables.
        plan: Says which towers compute, and where variables live.
        loss_placement: Where the loss is computed: "auto" or "tower"; see
            `multi_gpu_model`.
        strict: Whether to refuse variables whose gradients cannot be combined.
        preprocess: Preprocessing that towers apply to their rows, if any.
        prefetch: Number of batches to fetch and place ahead, with one step a call.
        guard: Stops training steps that are not finite, with `check_numerics`.
        agreement: Keeps hosts at the same batch, if there are several: an `Agreement`.
        shard_embeddings: How embedding tables are sharded; see `layers/tables.py`.
        timers: Measure how the time of training steps is spent.
        callbacks_may_write: Whether a callback that may change variables runs between
            calls of training.
        usual_rows: Number of examples in the first batch of training; `None` if not
            known yet.
        last_batch: Keeps the last batch, to explain a stage that fails: a `LastBatch`;
            `None` without stages.
        facts: Facts about the model that its steps have shown.
        said: The lines that were printed, or their keys.
        held: The lines held back, with their keys, while a way to update variables is
            tried; `None` if lines are printed at once.
    """

    model: keras.Model
    plan: Plan
    loss_placement: str = "auto"
    strict: bool = True
    preprocess: Preprocess | None = None
    prefetch: int = 0
    guard: Guard | None = None
    agreement: Any = None
    shard_embeddings: str = "none"
    timers: StepTimers | None = None
    callbacks_may_write: bool = False
    usual_rows: int | None = None
    last_batch: Any = None
    facts: ModelFacts = dataclasses.field(default_factory=ModelFacts)
    said: set[Any] = dataclasses.field(default_factory=set)
    held: list[tuple[str, Any]] | None = None

    def __post_init__(self):
        if self.timers is None:
            stages = self.plan.pipeline.stages
            towers = len(self.plan.replicas)
            self.timers = StepTimers(towers, self._host_times(), stages)
        if self.plan.pipeline.stages > 1:
            self.last_batch = feature("numerics.last_batch").LastBatch()

    def _host_times(self):
        hosts = self.plan.hosts
        if hosts.count == 1:
            return None
        ratio = sum(tower.ratio for tower in self.plan.towers)
        return feature("loop.host_times").HostTimes(
            hosts, ratio / sum(self.plan.split_ratios)
        )

    @property
    def xla(self) -> bool:
        """Whether XLA compiles towers and update."""
        alone = self.plan.pipeline.alone
        return alone and bool(self.facts.asked_xla) and not self.model.run_eagerly

    @property
    def compiles_update(self) -> bool:
        """Whether XLA compiles the update: if asked to, or where that is faster.

        XLA fuses the dozen kernels that each variable needs into one. A GPU takes
        longer to start these kernels than to run them; a CPU does not.
        """
        if self.facts.asked_xla is None:
            alone = self.plan.pipeline.alone
            return alone and is_gpu(self.plan.home) and not self.model.run_eagerly
        return self.xla

    def begin(self, step: str, data: Any) -> Any:
        """Begins a step, and returns its batch, on which the step then depends.

        Args:
            step: "train", "test" or "predict".
            data: The batch.
        """
        if self.last_batch is None:
            return data
        return self.last_batch.keep(step, data)

    def say(self, lines: Sequence[str], key: Any = None) -> None:
        """Prints lines that have not been printed before, as each trace finds the same.

        Args:
            lines: The lines.
            key: Lines with the same key are printed once, even if their text differs.
        """
        for line in lines:
            if self.held is not None:
                self.held.append((line, key))
            elif (key or line) not in self.said:
                voice.say(line)
                self.said.add(key or line)

    def hold(self) -> None:
        """Holds lines back from now on, as another way to update may be chosen."""
        self.held = []

    def release(self) -> None:
        """Prints the lines that were held back, and all later ones at once."""
        held, self.held = self.held or [], None
        for line, key in held:
            self.say([line], key)

    def step_function(self, step: str) -> Callable[[Any], Any]:
        """Returns a step of the model as a function of a batch, as `fit` passes it.

        The function preprocesses the batch, and creates variables at home.
        """
        model, preprocess = self.model, self.preprocess

        def function(data):
            measured = contextlib.nullcontext()
            if preprocess is not None:
                unpacked = keras.utils.unpack_x_y_sample_weight(data)
                with tf.name_scope("preprocess"):
                    unpacked = preprocess.widened(unpacked)
                    data = preprocess(unpacked, step == "train_step")
                data = keras.utils.pack_x_y_sample_weight(*data)
                if not has_own_steps(model):
                    # Keras's own metrics are to see the targets before preprocessing.
                    measured = measuring(model, *unpacked[:2])
            with _creating_on(self.plan.home), measured:
                return getattr(model, step)(data)

        return function

    def local_spec(self, data: Any) -> Any:
        """Returns the specs of a local batch of any size, as a step takes it.

        It may be sent in smaller types; see `Preprocess.widened`.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        spec = batch.local_spec(batch.specs(batch.rows_given(data)), None)
        return spec if self.preprocess is None else self.preprocess.widened(spec)

    def micro_batch_spec(self, data: Any) -> Any:
        """Returns the specs of (x, y, sample_weight) of a micro-batch at the loss.

        All dimensions are static.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        data = batch.specs(keras.utils.unpack_x_y_sample_weight(data))
        if self.preprocess is not None:
            data = self.preprocess.spec(data, training=True)
        return sized(data, self.micro_batch_rows(data))

    def micro_batch_rows(self, data: Any) -> int:
        """Returns the number of examples in a micro-batch, or an assumed one.

        Args:
            data: A nest of batches, or of their `tf.TypeSpec`s.
        """
        plan, first = self.plan, tf.nest.flatten(batch.specs(data))[0]
        total = self.usual_rows or first.shape[0] or _FEW_ROWS * plan.count
        return max(1, plan.sizes(int(total))[0])

    def execution(self, step: str) -> Execution:
        """Returns the execution options of a step, such as "train_step"."""
        xla = self.xla and (step == "train_step" or self.facts.compiled)
        return Execution(
            self.usual_rows,
            towers_by_xla=xla,
            updates_by_xla=self.compiles_update,
        )

    @contextlib.contextmanager
    def agreeing_on(self, step: str, data: Any) -> Iterator[None]:
        """Inside, all hosts run a step on the same batch, if there are several."""
        agreement, times = self.agreement, self.timers.hosts
        if agreement is None:
            yield
        elif step != "train_step":
            with agreement.evaluates(data):
                yield
        else:
            with agreement.trains(data, times):
                yield


def sized(data: Any, rows: int | None) -> Any:
    """Returns the specs of a batch with `rows` rows, and no other unknown dimension.

    Args:
        data: A nest of batches, or of their `tf.TypeSpec`s.
        rows: The number of rows; `None` if unknown.
    """

    def local(spec):
        if spec is None:
            return None
        sizes = [_FEW_ROWS if n is None else n for n in spec.shape[1:]]
        return tf.TensorSpec([rows, *sizes], spec.dtype)

    return tf.nest.map_structure(local, batch.specs(data))


@contextlib.contextmanager
def _creating_on(device: str) -> Iterator[None]:
    """Inside, variables, such as optimizer slots, are created on a device."""

    def create(creator, **given):
        with tf.device(device):
            return creator(**given)

    with contextlib.ExitStack() as stack:
        # Keras creates variables outside the graph, within an `init_scope`.
        with tf.init_scope():
            stack.enter_context(tf.variable_creator_scope(create))
        yield

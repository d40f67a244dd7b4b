"""The context that all pieces of a builder share: model, plan, the user's wishes."""

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

# Of a batch, and of other dimensions, whose size is not known.
_FEW_ROWS = 8


@dataclasses.dataclass
class ModelFacts:
    """Facts about a model that its steps have shown; forgotten when the model changes.

    Attributes:
        loss_placed: Where the examples of a batch meet in training: on each "tower", or
            "gathered" at home; `None` before the first step.
        asked_xla: Whether XLA is to compile towers and update; `None` for where that is
            known to pay.
        unseeded: Where a step of training draws random numbers without a seed, as
            phrases.
        unsaved: Variables that a step of training changes, and no attribute of the
            model holds, such as a loss's own counter.
        compiled: Whether XLA is known to compile the model: by training it once.
        graph: The graph that a step of training was last made in, if any.
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
    """The model, the plan and the user's wishes, which all pieces of a builder share.

    Attributes:
        model: The user's model; its variables are the shared variables.
        plan: Which towers compute, and where variables live.
        loss_placement: Where examples meet: "auto" or "tower"; see `multi_gpu_model`.
        strict: Whether to refuse variables whose gradients nobody can combine.
        preprocess: What towers do to their rows before the model sees them, if
            anything.
        prefetch: Batches that are fetched and placed ahead of a call of one step.
        guard: Stops a step of training that is not finite, if anything does.
        shard_embeddings: How embedding tables are cut; see `tables.py`.
        agreement: Keeps hosts at the same batch, if there are several: an `Agreement`.
        timers: Measure what the time of the steps of training goes to.
        callbacks_may_write: Whether a callback that may change variables runs between
            calls of training.
        usual_rows: How many examples the first batch of training has; `None` if that is
            not known yet.
        is_elastic: Whether other hosts may come, and these leave.
        why_hosts: Why these hosts train together, after others; empty for the first.
        last_batch: Keeps batches, in case a stage fails: a `LastBatch`.
        facts: What the model's steps have shown about it.
        said: The lines that were said, or their keys.
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
    is_elastic: bool = False
    why_hosts: str = ""
    last_batch: Any = None
    facts: ModelFacts = dataclasses.field(default_factory=ModelFacts)
    said: set[Any] = dataclasses.field(default_factory=set)

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
        """Whether XLA compiles the update: where that is wished, or known to pay.

        It makes one kernel of the dozen that each variable needs, which a GPU is slower
        to start than to run; a CPU is not.
        """
        if self.facts.asked_xla is None:
            alone = self.plan.pipeline.alone
            return alone and is_gpu(self.plan.home) and not self.model.run_eagerly
        return self.xla

    def begin(self, step: str, data: Any) -> Any:
        """Begins a step with a batch; returns the batch, for which the step waits.

        `step` is "train", "test" or "predict".
        """
        if self.last_batch is None:
            return data
        return self.last_batch.keep(step, data)

    def say(self, lines: Sequence[str], key: Any = None) -> None:
        """Says lines that have not been said before: each step finds the same.

        Lines of one key are said once, whatever their words.
        """
        for line in lines:
            if (key or line) not in self.said:
                voice.say(line)
                self.said.add(key or line)

    def step_function(self, step: str) -> Callable[[Any], Any]:
        """Returns a step of the model, of a batch as `fit` gives it.

        It preprocesses the batch, and creates variables on the device of home.
        """
        model, preprocess = self.model, self.preprocess

        def function(data):
            measured = contextlib.nullcontext()
            if preprocess is not None:
                given = keras.utils.unpack_x_y_sample_weight(data)
                with tf.name_scope("preprocess"):
                    data = preprocess(given, step == "train_step")
                data = keras.utils.pack_x_y_sample_weight(*data)
                if not has_own_steps(model):
                    # Keras's own metrics know targets as the user gives them.
                    measured = measuring(model, *given[:2])
            with _creating_on(self.plan.home), measured:
                return getattr(model, step)(data)

        return function

    def micro_batch_spec(self, data: Any) -> Any:
        """Returns the specs of (x, y, sample_weight), as the loss sees a micro-batch.

        All sizes are known.

        Args:
            data: A batch, or its `tf.TypeSpec`s.
        """
        data = batch.specs(keras.utils.unpack_x_y_sample_weight(data))
        if self.preprocess is not None:
            data = self.preprocess.spec(data, training=True)
        return sized(data, self.micro_batch_rows(data))

    def micro_batch_rows(self, data: Any) -> int:
        """Returns how many examples a micro-batch has, or may have.

        Args:
            data: A nest of batches, or of their `tf.TypeSpec`s.
        """
        plan, first = self.plan, tf.nest.flatten(batch.specs(data))[0]
        total = self.usual_rows or first.shape[0] or _FEW_ROWS * plan.count
        return max(1, plan.sizes(int(total))[0])

    def execution(self, step: str) -> Execution:
        """Returns how a step, such as "train_step", is executed."""
        xla = self.xla and (step == "train_step" or self.facts.compiled)
        return Execution(
            self.usual_rows,
            towers_by_xla=xla,
            updates_by_xla=self.compiles_update,
            is_elastic=self.is_elastic,
        )

    @contextlib.contextmanager
    def agreeing_on(self, step: str, data: Any) -> Iterator[None]:
        """Inside, all hosts compute a step of the same batch, if there are several."""
        agreement, times = self.agreement, self.timers.hosts
        if agreement is None:
            yield
        elif step != "train_step":
            with agreement.evaluates(data):
                yield
        else:
            (numbers,) = self.plan.hosts.all_reduce(
                [agreement.of_batch(data, times)], "batch"
            )
            with agreement.before(numbers):
                agreement.hear(numbers, times)
                yield


def sized(data: Any, rows: int | None) -> Any:
    """Returns the specs of a batch of so many rows, of which no other size is unknown.

    Args:
        data: A nest of batches, or of their `tf.TypeSpec`s.
        rows: The number of rows; `None` if that is unknown.
    """

    def local(spec):
        if spec is None:
            return None
        sizes = [_FEW_ROWS if n is None else n for n in spec.shape[1:]]
        return tf.TensorSpec([rows, *sizes], spec.dtype)

    return tf.nest.map_structure(local, batch.specs(data))


@contextlib.contextmanager
def _creating_on(device: str) -> Iterator[None]:
    """Inside, variables are created on a device, such as slots of an optimizer."""

    def create(creator, **given):
        with tf.device(device):
            return creator(**given)

    with contextlib.ExitStack() as stack:
        # Keras leaves the graph for it.
        with tf.init_scope():
            stack.enter_context(tf.variable_creator_scope(create))
        yield

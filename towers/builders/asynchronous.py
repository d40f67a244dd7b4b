"""The `asynchronous` builder: each tower updates the variables by itself.

A tower reads the variables, computes the gradient of its own share of a batch, and
applies it to what the variables have become by then. It never waits for another's
gradient, as long as the call of `steps_per_execution` batches lasts; at the end of a
call all towers have finished. The price is *staleness*: the gradient belongs to values
that others have updated meanwhile. So the numbers are not those of one device, and not
the same twice, but for one tower.

The recipe is that of tensorpack's `AsyncMultiGPUTrainer` and of tf_cnn_benchmarks with
`cross_replica_sync=False`; Recht et al. 2011 ("Hogwild!", NIPS) show when it converges.
Unlike there, a tower reads all variables at one moment, and updates are made one at a
time, so that staleness is a number that can be measured and bounded. Only the rows of
embeddings that stay at home (`embeddings.py`) are read later, and so may be newer.
"""

import collections
import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from towers.builders.base import Builder, Values
from towers.builders.guard import Guard
from towers.builders.parameter_server import ParameterServer, StepOutputs, TowerInputs
from towers.collectives import batch, packing
from towers.devices import HOST, is_gpu
from towers.layers import overwritten, seeds
from towers.loop import loop
from towers.loop.ahead import Ahead
from towers.tower import eager
from towers.tower.errors import ModelError
from towers.tower.preprocess import Preprocess
from towers.tower.run import is_synchronized, refuse_stateful

# Shares that wait for the fastest tower, so that it need not wait for them.
_AHEAD = 2


class Staleness:
    """Measures how stale updates are, bounds it, and lets one tower in at a time.

    The staleness of an update is the number of updates that other towers made after
    this one had read the variables. Let `version` be the number of updates so far, and
    v_0 <= v_1 <= ... the versions that the towers in flight have read, oldest first.
    They could all update in this order within the bound if version + p - v_p <= bound
    for every position p. A tower may read, or update, only if that still holds
    afterwards.

    Then no update exceeds the bound, as version - v_p <= bound for every tower that may
    update. And some tower can always go on: the oldest in flight may update, since for
    all others version grows by one as their position falls by one; and if none is in
    flight, any may read.

    With a bound of 0 updates are serialised. The rule is related to the Stale
    Synchronous Parallel one (Ho et al. 2013, NIPS), which bounds how many steps the
    fastest worker is ahead of the slowest instead.

    Attributes:
        bound: The largest staleness allowed, `None` for any.
        updates: Number of updates since the last `reset`.
        mean: Their mean staleness, 0 if there are none.
        maximum: Their largest staleness, 0 if there are none.
    """

    def __init__(self, bound: int | None = None):
        self.bound = bound
        self._changed = threading.Condition()
        self._version = 0
        # By tower in flight, oldest first, the version that it has read.
        self._read: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Starts to measure anew."""
        self.updates, self.maximum, self._total = 0, 0, 0

    @property
    def mean(self) -> float:
        """The mean staleness of the updates since the last `reset`."""
        return self._total / self.updates if self.updates else 0.0

    def measured(self) -> dict[str, float]:
        """Returns what was measured since it was last called, or `reset`, by tag."""
        if not self.updates:
            return {}
        found = {"mean": self.mean, "max": self.maximum}
        self.reset()
        return {f"towers/staleness_{name}": value for name, value in found.items()}

    @contextlib.contextmanager
    def reading(self, tower: int) -> Iterator[None]:
        """A context in which a tower reads the variables; it waits until it may.

        Args:
            tower: Index of the tower, which is in flight from now on.
        """
        with self._changed:
            self._changed.wait_for(self._may_read)
            self._read[tower] = self._version
            yield

    @contextlib.contextmanager
    def updating(self, tower: int) -> Iterator[None]:
        """A context in which a tower updates the variables; it waits until it may.

        Args:
            tower: Index of the tower, which has read before.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._may_update(tower))
            yield
            found = self._version - self._read.pop(tower)
            self._version += 1
            self.updates += 1
            self.maximum = max(self.maximum, found)
            self._total += found
            self._changed.notify_all()

    def drop(self, tower: int) -> None:
        """Lets the others go on if a tower that has read will not update."""
        with self._changed:
            if self._read.pop(tower, None) is not None:
                self._changed.notify_all()

    def _may_read(self):
        # As the newest, it comes behind all others.
        return self.bound is None or len(self._read) <= self.bound

    def _may_update(self, tower):
        # Those that are newer move up.
        older = itertools.takewhile(lambda other: other != tower, self._read)
        return self.bound is None or all(
            self._version + 1 + position - self._read[other] <= self.bound
            for position, other in enumerate(older)
        )


class Streams:
    """What the towers have still to do in a call: for each a queue of its own.

    More is put in as the fastest tower needs it; of what is in memory, the rest is the
    arrears of slower ones.
    """

    def __init__(self, towers: int):
        """Starts without work.

        Args:
            towers: Number of towers.
        """
        self._queues = [collections.deque() for _ in range(towers)]
        self._changed = threading.Condition()
        self._open = True

    def put(self, work: Sequence[Any]) -> bool:
        """Adds work, when a tower is about to run out of it.

        Args:
            work: One piece for each tower.

        Returns:
            Whether more is wanted: not if a tower has failed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: not self._open or min(map(len, self._queues)) < _AHEAD
            )
            if self._open:
                for queue, piece in zip(self._queues, work, strict=True):
                    queue.append(piece)
                self._changed.notify_all()
            return self._open

    def of(self, tower: int) -> Iterator[Any]:
        """Yields a tower's work, as it comes, until the end."""
        queue = self._queues[tower]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or not self._open)
                if not queue:
                    return
                piece = queue.popleft()
                self._changed.notify_all()
            yield piece

    def close(self) -> None:
        """Says that there will be no more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Takes back what has not been begun."""
        with self._changed:
            for queue in self._queues:
                queue.clear()
            self.close()


class _Step(NamedTuple):
    """The three parts of a tower's step, for shares of one kind.

    Attributes:
        pull: For each tower, a function that reads what it computes with.
        compute: Takes a share and what was pulled; computes loss and gradients.
        apply: Takes these, too, and updates variables and metrics.
    """

    pull: Sequence[Callable[[], TowerInputs]]
    compute: Callable[[Any, TowerInputs], StepOutputs]
    apply: Callable[[Any, TowerInputs, StepOutputs], dict[str, tf.Tensor]]


class Asynchronous(Builder):
    """Towers that update the variables without waiting for one another.

    To a tower, its share is the batch: of that it computes the loss, wherever that is
    placed, and its metrics are updated share by share. The optimizer's step count, and
    with it a schedule of the learning rate, grows by one with each share: K for a batch
    of K towers. Of variables that layers assign, such as moving averages and counters,
    what a tower has added to its value is added to the shared one.

    With `run_eagerly`, towers take turns. `test_step` and `predict_step` are those of
    all builders.

    Attributes:
        staleness: Measures, and bounds, how stale updates are.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        home: str,
        merge: str,
        shares: Sequence[int],
        loss_placement: str,
        strict: bool,
        packed: bool | None = None,
        max_staleness: int | None = None,
        preprocess: Preprocess | None = None,
        prefetch: int = 0,
        guard: Guard | None = None,
    ):
        # One tower, wherever it is called: that is decided by a thread's device.
        self._tower = ParameterServer(
            model,
            ("",),
            home,
            home,
            (1,),
            loss_placement,
            strict,
            packed=False,
            preprocess=preprocess,
            guard=guard,
        )
        self.staleness = Staleness(max_staleness)
        self._fetching_s = 0.0  # in all, of the thread that fetches
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(devices), thread_name_prefix="tower"
        )
        super().__init__(
            model,
            devices,
            home,
            merge,
            shares,
            loss_placement,
            strict,
            packed,
            preprocess,
            prefetch,
            guard,
        )
        self._tower.on_gpus = self.on_gpus

    def reset_traces(self) -> None:
        """Forgets what was found out about the model; see `Builder.reset_traces`."""
        super().reset_traces()
        self._tower.reset_traces()

    def train_step(
        self, data: Any, shares: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains on one global batch, of known size: towers take turns.

        See `Builder.train_step`. `fit` uses this with `run_eagerly` only.
        """
        kept = self.cut(data)
        if shares is None:
            shares = [self.copy(k, share) for k, share in enumerate(kept)]
        sizes = [batch.batch_size(share) for share in shares]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(
                f"Model '{self.model.name}' got a batch of unknown size in its "
                "train_step; expected a known one with variable_update='asynchronous', "
                "so call `fit` or `train_on_batch` instead."
            )
        self._check()
        self.create_variables(data)
        pull = [functools.partial(self._pull, k) for k in range(len(self.devices))]
        step = _Step(pull, self._compute, self._apply)
        logs, turns = {}, eager.Turns(self.model)
        for k, share in enumerate(shares):
            if sizes[k]:
                self._run(k, step, kept[k], share, logs)
        if self.model.run_eagerly and min(sizes[:2]) > 0:
            self.say(turns.lines_of_all(len(shares)))
        self.loss_placed = self._tower.loss_placed
        return logs

    def train_function(
        self, scope: Callable[[], contextlib.AbstractContextManager]
    ) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls with an iterator over batches.

        The caller's thread fetches and cuts batches, and traces: Keras keeps what it
        does by thread, and tracing changes classes for all. A thread for each tower
        calls the graphs.

        Args:
            scope: Makes the context that steps are traced and run in.

        Returns:
            A function that takes as many batches as the model has steps in a call, and
            returns the logs of the last update; see `loop.train_function`.
        """
        if self.model.run_eagerly:
            return super().train_function(scope)
        steps = self.model.steps_per_execution
        self._tower.xla = self._xla

        def compute(share, pulled):
            # It runs where it is called: in a tower's thread, on the tower's device.
            with tf.device(None):
                return self._compute(share, pulled)

        self._steps = {}
        # By the number of rows in a share, `None` for any.
        self._graphs = collections.defaultdict(
            lambda: (_graph(compute), _graph(self._apply))
        )

        fetched = []

        def fetch(iterator):
            asked_s = time.perf_counter()
            data = next(iterator)
            came_s = time.perf_counter()
            self._fetching_s += came_s - asked_s
            with scope():
                work = self._deal(loop.without_optionals(data))
            fetched.append((asked_s, came_s, time.perf_counter()))
            return work

        ahead = Ahead(self.prefetch if steps == 1 else 0, fetch)

        def function(iterator):
            self.timers.reads(iterator)
            begun, logs = False, {}
            streams, towers = Streams(len(self.devices)), []
            try:
                for k in range(len(self.devices)):
                    towers.append(self._threads.submit(self._work, k, streams, logs))
                for _ in range(steps):
                    try:
                        work = ahead.take(iterator)
                    except StopIteration:
                        break
                    begun = True
                    if not streams.put(work):
                        break
                streams.close()
                fetched.clear()
                ahead.fill(iterator)
                self._note_fetches(max(done.result() for done in towers), fetched)
            finally:
                streams.stop()
                concurrent.futures.wait(towers)
            if not begun:
                raise StopIteration
            return logs

        return function

    def _work(self, k, streams, logs):
        """One tower's part of a call, in its own thread; returns when it was over."""
        try:
            asked_s, fetching_s = time.perf_counter(), self._fetching_s
            for piece in streams.of(k):
                came_s = time.perf_counter()
                # The rest of what it waited went into cutting the batch, say.
                waited_s = min(came_s - asked_s, self._fetching_s - fetching_s)
                if piece is not None:
                    computed_s = self._run(k, *piece, logs)
                    self._note(k, waited_s, asked_s, came_s, computed_s)
                asked_s, fetching_s = time.perf_counter(), self._fetching_s
        except BaseException:
            streams.stop()
            raise
        return asked_s

    def _run(self, k, step, kept, share, logs):
        """One step of one tower; returns when it had its gradients.

        What it is applied with is the share where the batch is, not the tower's copy,
        which would have to come back.
        """
        try:
            with self.staleness.reading(k), tf.device(self.home):
                pulled = step.pull[k]()
            with tf.device(self.devices[k]):
                computed = step.compute(share, pulled)
            computed_s = time.perf_counter()
            with self.staleness.updating(k), tf.device(self.home):
                try:
                    logs.update(step.apply(kept, pulled, computed))
                except tf.errors.OutOfRangeError:
                    if self.guard is not None:
                        self.guard.on_tower(k, pulled.values[0])
                    raise
        finally:
            self.staleness.drop(k)
        return computed_s

    def _note(self, k, waited_s, asked_s, came_s, computed_s):
        """Adds a tower's step to the phases: of all towers, the mean counts."""
        towers = len(self.devices)
        compute_s, done_s = computed_s - came_s, time.perf_counter()
        copy_s = came_s - asked_s - waited_s
        parts = np.array([1, waited_s, copy_s, compute_s, done_s - computed_s])
        self.timers.add([*parts / towers, *compute_s * np.eye(towers)[k]])

    def _note_fetches(self, over_s, fetched):
        """Adds what all towers have waited for batches that later calls will need."""
        seconds = np.array(fetched or [[over_s] * 3])
        waited_s, copy_s = np.diff(np.maximum(seconds, over_s)).sum(axis=0)
        self.timers.add([0, waited_s, copy_s, 0, 0, *[0] * len(self.devices)])

    def _deal(self, data):
        """Cuts a batch: for each tower its step, share and copy of it, or `None`."""
        return [
            (self._trace(share), share, self.copy(k, share))
            if batch.batch_size(share)
            else None
            for k, share in enumerate(self.cut(data))
        ]

    def _trace(self, share):
        """Returns the step for shares like this one, traced if need be."""
        rows = self._known_rows(share)
        spec = batch.share_spec(share, rows)
        key = str(spec)
        if key not in self._steps:
            self._check()
            self.create_variables(spec)
            self._steps[key] = self._trace_step(spec, rows)
            self.loss_placed = self._tower.loss_placed
        return self._steps[key]

    def _known_rows(self, share):
        """The size that a share's step is traced for; see `Builder._known_sizes`."""
        size = batch.batch_size(share)
        usual = batch.cut(self.usual_rows or 0, self.split_ratios)
        return (
            size if self.on_gpus and batch.is_dense(share) and size in usual else None
        )

    def _trace_step(self, spec, rows):
        compute, apply = self._graphs[rows]
        tables = self._tower.reads_tables
        pull = [
            _graph(functools.partial(self._pull, k)).get_concrete_function()
            for k in range(len(self.devices))
        ]
        pulled = _specs(pull[0].structured_outputs)
        compute = compute.get_concrete_function(spec, pulled)
        if self._tower.reads_tables != tables:
            # A table cannot stay at home, as it turns out.
            return self._trace_step(spec, rows)
        computed = _specs(compute.structured_outputs)
        apply = apply.get_concrete_function(spec, pulled, computed)
        # Each tower calls it.
        self.graph = compute.graph
        return _Step(pull, compute, apply)

    def _check(self):
        """Refuses layers that need the whole batch, or all towers at once."""
        refuse_stateful(self.model)
        if len(self.devices) > 1 and is_synchronized(self.model):
            raise ModelError(
                f"Model '{self.model.name}' has layers with synchronized=True, which "
                "need all towers in the same step; expected none with "
                "variable_update='asynchronous', so use variable_update="
                "'parameter_server'."
            )

    def _pull(self, k):
        (values,), scale = self._tower.pull()
        with tf.device(HOST):
            seeded = seeds.of_tower(self.model, values.state, k)
        return TowerInputs([values._replace(state=seeded)], scale)

    def _compute(self, share, pulled):
        packed = any(map(self.packs, self.devices))
        if packed:
            ((params, state),) = pulled.values
            sent = packing.send([*params, *state], self.home, "")
            values = Values(sent[: len(params)], sent[len(params) :])
            pulled = pulled._replace(values=[values])
        computed = self._tower.compute(share, [share], pulled)
        if packed:
            gradients, state = computed.results[0].gradients, computed.state
            sent = packing.send([*gradients, *state], "", self.home)
            computed = _with_gradients(computed, sent[: len(gradients)])
            computed = computed._replace(state=sent[len(gradients) :])
        # The index of a tower would become a tensor on its way between two graphs.
        results = [result._replace(state=(), tower=None) for result in computed.results]
        # On the way home others may update. Seeds have not left theirs, the host.
        seeded = (tf.int64,) if is_gpu(self.home) else ()
        with tf.device(self.home):
            computed = packing.copy(computed._replace(results=results), seeded)
        with tf.device(HOST):
            state = [
                tf.identity(value)
                if value is not None and value.dtype in seeded
                else value
                for value in computed.state
            ]
        return computed._replace(state=state)

    def _apply(self, share, pulled, computed):
        with tf.device(self.home):
            state = [
                None if new is None else _add_change(variable, old, new)
                for variable, old, new in zip(
                    self._variables(),
                    [*pulled.values[0].params, *pulled.values[0].state],
                    computed.state,
                    strict=True,
                )
            ]
            # `self._tower` is one tower, its first.
            results = [result._replace(tower=0) for result in computed.results]
            computed = computed._replace(results=results, state=state)
            computed = self._scale_as_now(computed, pulled.scale)
        return self._tower.apply(share, computed)

    def _scale_as_now(self, computed, scale):
        """Gives gradients the loss scale that the optimizer will take off again."""
        optimizer = self.model.optimizer
        if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            return computed
        factor = optimizer.scale_loss(tf.ones([])) / scale
        as_they_are = overwritten.places(self.model)

        def scaled(gradients):
            return [
                g
                if g is None or i in as_they_are
                else tf.math.scalar_mul(tf.cast(factor, g.dtype), g)
                for i, g in enumerate(gradients)
            ]

        (result,) = computed.results
        return _with_gradients(computed, scaled(result.gradients))._replace(
            direct=[scaled(gradients) for gradients in computed.direct]
        )


def _add_change(variable, old, new):
    """What a variable is to become that a tower has changed from `old` to `new`."""
    if old is None or not (new.dtype.is_floating or new.dtype.is_integer):
        return new
    with tf.device(variable.value.device):
        now = variable.value
        # Unless others have changed it too, without any rounding.
        return tf.where(now == old, new, now + (new - old))


def _with_gradients(computed, gradients):
    (result,) = computed.results
    return computed._replace(results=[result._replace(gradients=gradients)])


def _graph(function):
    return tf.function(function, autograph=False, reduce_retracing=True)


def _specs(nest):
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.type_spec_from_value(t), nest
    )

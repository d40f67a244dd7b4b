"""Asynchronous training: towers do not wait for one another.

A tower reads the variables, computes the gradient of its local batch, and applies it to
the variables, which other towers may have updated meanwhile. It never waits for another
tower's gradient within a call of `steps_per_execution` batches; at the end of a call
all towers have finished. The price is *staleness*: a gradient belongs to older values
of the variables. So results differ from those of one device, and from run to run,
except with one tower.

The recipe is that of tensorpack's `AsyncMultiGPUTrainer` and of tf_cnn_benchmarks with
`cross_replica_sync=False`; Recht et al. 2011 ("Hogwild!", NIPS) show when it converges.
Unlike there, a tower reads all variables at one moment, and updates are serialized, so
that staleness can be measured and bounded. Only the rows of embedding tables that stay
at home (`layers/substitutes.py`) are read later, and so may be newer.
"""

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from towers.builders.asynchronous.staleness import Staleness
from towers.builders.asynchronous.tower_step import TowerPart, TowerStep
from towers.builders.pieces import Pieces
from towers.builders.steps import is_synchronized, refuse_stateful
from towers.builders.train_function import Scope, train_function
from towers.collectives import batch
from towers.loop import loop
from towers.loop.loop import Ahead, Fetched
from towers.tower.errors import ModelError

# Number of batches queued for the fastest tower, so that it does not wait for input.
_AHEAD = 2


class AsynchronousTraining:
    """Trains towers that update the variables without waiting for one another.

    To a tower, its local batch is the whole batch: it computes the loss of the local
    batch, wherever the loss is placed, and updates the metrics with it. The optimizer's
    step count, and with it a learning rate schedule, grows by one with each local
    batch: by K for a batch of K towers. Variables that layers assign, such as moving
    averages and counters, grow by the difference that each tower computes.

    With `run_eagerly`, towers take turns.

    Attributes:
        staleness: Measures and bounds the staleness of updates.
    """

    def __init__(
        self,
        pieces: Pieces,
        step: TowerStep,
        staleness: Staleness,
        threads: concurrent.futures.ThreadPoolExecutor,
    ):
        """Takes the shared pieces, one tower's step, and a thread for each tower."""
        self._pieces, self._context, self._step = pieces, pieces.context, step
        self.staleness, self._threads = staleness, threads
        self._fetching_s = 0.0  # total of the thread that fetches batches
        self._steps: dict[str, list[TowerPart]] = {}

    def create_variables(self, data: Any) -> None:
        """Traces the step to create its variables; `data` is a batch or its specs."""
        self._step.create_variables(data)

    def train_step(
        self, data: Any, local_batches: Sequence[Any] | None = None
    ) -> dict[str, tf.Tensor]:
        """Trains on one global batch of known size; towers take turns.

        `fit` calls this with `run_eagerly` only.
        """
        context, plan = self._context, self._context.plan
        kept = self._pieces.batches.cut(data)
        if local_batches is None:
            local_batches = [*map(self._pieces.batches.copy, plan.devices, kept)]
        sizes = [batch.batch_size(local) for local in local_batches]
        if not all(isinstance(size, int) for size in sizes):
            raise ValueError(
                f"Model '{context.model.name}' got a batch of unknown size in its "
                "train_step; expected a known one with variable_update='asynchronous', "
                "so call `fit` or `train_on_batch` instead."
            )
        self._check()
        self._step.create_variables(data)
        parts, logs = self._step.parts(), {}
        for k, local in enumerate(local_batches):
            if sizes[k]:
                self._run(k, parts, kept[k], local, logs)
        return logs

    def train_function(self, scope: Scope) -> Callable[[Any], dict[str, tf.Tensor]]:
        """Makes the function that Keras's `fit` calls; see `train_function`.

        The caller's thread fetches and cuts batches, and traces the step: Keras keeps
        its state by thread, and tracing patches classes for all threads. One thread
        for each tower calls the graphs.
        """
        context = self._context
        if context.model.run_eagerly:
            return train_function(self._pieces, self, scope)
        steps, fetched = context.model.steps_per_execution, []
        self._steps = {}

        def fetch(iterator):
            asked_s = time.perf_counter()
            data = next(iterator)
            came_s = time.perf_counter()
            self._fetching_s += came_s - asked_s
            work = prepare(iterator, data)
            fetched.append((asked_s, came_s, time.perf_counter()))
            return Fetched(data, work)

        def prepare(_, data):
            with scope():
                return self._deal(loop.without_optionals(data))

        ahead = Ahead(context.prefetch if steps == 1 else 0, fetch, prepare)

        def function(iterator):
            context.timers.reads(iterator)
            return self._call(iterator, steps, ahead, fetched)

        return function

    def _call(self, iterator, steps, ahead, fetched):
        """Trains on as many batches as a call has steps; returns the last logs."""
        begun, logs = False, {}
        count = len(self._context.plan.towers)
        streams, towers = Streams(count), []
        try:
            for k in range(count):
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

    def _work(self, k, streams, logs):
        """Runs one tower's steps of a call in its thread; returns when they ended."""
        try:
            asked_s, fetching_s = time.perf_counter(), self._fetching_s
            for piece in streams.of(k):
                came_s = time.perf_counter()
                # The remaining wait went into cutting the batch, for example.
                waited_s = min(came_s - asked_s, self._fetching_s - fetching_s)
                if piece is not None:
                    computed_s = self._run(k, *piece, logs)
                    self._note(k, waited_s, asked_s, came_s, computed_s)
                asked_s, fetching_s = time.perf_counter(), self._fetching_s
        except BaseException:
            streams.stop()
            raise
        return asked_s

    def _run(self, k, parts, kept, local, logs):
        """Runs one step of one tower; returns the time when it had its gradients.

        Parts at home take the local batch from where the data are: the tower's copy
        would have to be sent back.
        """
        plan, guard, made = self._context.plan, self._context.guard, []
        computed_s = time.perf_counter()
        try:
            for part in parts:
                device, rows = plan.devices[k], local
                if part.at_home:
                    device, rows = plan.home, kept
                with self._turn(k, part), tf.device(device):
                    made.append(part.function(rows, *made))
                    if part is parts[-1]:
                        logs.update(made[-1])
                if not part.at_home:
                    computed_s = time.perf_counter()
        except tf.errors.OutOfRangeError:
            if guard is not None:
                guard.set_tower(k)
            raise
        finally:
            self.staleness.drop(k)
        return computed_s

    def _turn(self, k, part):
        """Returns the context of a part; a part at home waits for the tower's turn."""
        if not part.at_home:
            return contextlib.nullcontext()
        if part.updates:
            return self.staleness.updating(k, part.goes_on)
        return self.staleness.reading(k) if part.reads else self.staleness.alone()

    def _note(self, k, waited_s, asked_s, came_s, computed_s):
        """Adds a tower's step to the timers, divided by the number of towers."""
        towers = len(self._context.plan.towers)
        compute_s, done_s = computed_s - came_s, time.perf_counter()
        copy_s = came_s - asked_s - waited_s
        parts = np.array([1, waited_s, copy_s, compute_s, done_s - computed_s])
        self._context.timers.add([*parts / towers, *compute_s * np.eye(towers)[k]])

    def _note_fetches(self, over_s, fetched):
        """Adds the time that all towers waited for batches of later calls."""
        seconds = np.array(fetched or [[over_s] * 3])
        waited_s, copy_s = np.diff(np.maximum(seconds, over_s)).sum(axis=0)
        towers = len(self._context.plan.towers)
        self._context.timers.add([0, waited_s, copy_s, 0, 0, *[0] * towers])

    def _deal(self, data):
        """Cuts a batch; returns for each tower (step, local batch, copy), or `None`."""
        batches, devices = self._pieces.batches, self._context.plan.devices
        return [
            (self._trace(local), local, batches.copy(device, local))
            if batch.batch_size(local)
            else None
            for device, local in zip(devices, batches.cut(data), strict=True)
        ]

    def _trace(self, local):
        """Returns the parts of a step for such local batches; traces them if needed."""
        spec = batch.local_spec(local, None)
        key = str(spec)
        if key not in self._steps:
            self._check()
            self._step.create_variables(spec)
            self._steps[key] = self._step.trace(spec)
        return self._steps[key]

    def _check(self):
        """Refuses layers that need the whole batch, or all towers in one step."""
        model = self._context.model
        refuse_stateful(model)
        if self._context.plan.count > 1 and is_synchronized(model):
            raise ModelError(
                f"Model '{model.name}' has layers with synchronized=True, which "
                "need all towers in the same step; expected none with "
                "variable_update='asynchronous', so use variable_update="
                "'parameter_server'."
            )


# Queues of work for the threads of the towers.


class Streams:
    """A queue of remaining local batches for each tower, within a call.

    A batch is added when the fastest tower needs it. So the queues hold more than
    `_AHEAD` local batches only for slower towers.
    """

    def __init__(self, towers: int):
        self._queues = [collections.deque() for _ in range(towers)]
        self._changed = threading.Condition()
        self._open = True

    def put(self, work: Sequence[Any]) -> bool:
        """Adds one local batch for each tower, once a tower is about to run out.

        Args:
            work: One piece of work for each tower.

        Returns:
            Whether the queues are still open; they are not once a tower has failed.
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
        """Yields a tower's work as it arrives, until the queues are closed."""
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
        """Closes the queues: no more work will be added."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    def stop(self) -> None:
        """Drops all work that has not begun, and closes the queues."""
        with self._changed:
            for queue in self._queues:
                queue.clear()
            self.close()

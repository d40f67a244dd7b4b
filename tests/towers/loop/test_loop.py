"""Several steps in a call, and batches ahead: none too many; see also tests.exact."""

import collections
import functools
import gc
import itertools
import os
import queue
import subprocess
import sys
import textwrap
import threading
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import executed, oracle
from tests.limits import HANG_S
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.keras_adapter import datasets
from towers.loop.loop import Ahead, Fetched

pytestmark = pytest.mark.quick_one_in(2)

FEATURES = 6
# Seven batches, the last one short.
ROWS, BATCH = 53, 8
BATCHES = 7
BUILDERS = ["parameter_server", "replicated"]
_numbers = itertools.count(1000)


def _data(rows=ROWS):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    return x, random.normal(size=(rows, 3)).astype("float32")


def _dataset(rows=ROWS):
    return tf.data.Dataset.from_tensor_slices(_data(rows)).batch(BATCH)


def _model(kind=keras.Sequential, name=None):
    keras.utils.set_random_seed(7)
    return kind([keras.Input((FEATURES,)), keras.layers.Dense(3, "tanh")], name=name)


def _compiled(
    model, steps, towers=2, builder="parameter_server", prefetch=None, **options
):
    """The model on towers; without any, plain Keras, which nothing traces."""
    trained = model
    if towers:
        trained = multi_gpu_model(
            model, gpus=towers, variable_update=builder, prefetch=prefetch
        )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    options = {"loss": "mse", "metrics": ["mae"], "run_eagerly": not towers} | options
    trained.compile(optimizer, steps_per_execution=steps, **options)
    return trained


class _Counted:
    """An endless dataset that counts what is taken from it."""

    def __init__(self):
        self.taken = 0

    def dataset(self):
        x, y = _data(BATCH)

        def batches():
            while True:
                self.taken += 1
                yield x, y

        spec = tuple(tf.TensorSpec([None, *a.shape[1:]]) for a in (x, y))
        made = tf.data.Dataset.from_generator(batches, output_signature=spec)
        # Otherwise tf.data itself would fetch ahead.
        options = tf.data.Options()
        options.autotune.enabled = False
        options.experimental_optimization.inject_prefetch = False
        return made.with_options(options)


@pytest.mark.parametrize(
    ("steps", "eager"), [(3, False), slow(3, True), slow(1, False), slow(1, True)]
)
def test_a_call_takes_its_batches_and_no_more(steps, eager):
    counted, seen = _Counted(), []
    trained = _compiled(_model(), steps, run_eagerly=eager)
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(counted.taken)
    )
    trained.fit(
        counted.dataset(),
        steps_per_epoch=2 * steps,
        epochs=2,
        verbose=0,
        callbacks=[watch],
    )
    assert seen == [steps, 2 * steps, 3 * steps, 4 * steps]


@pytest.mark.parametrize("steps", [slow(1), 4])
def test_the_end_of_the_data_is_told(steps):
    trained = _compiled(_model(), steps)
    trained.make_train_function()
    function = trained.train_function
    with pytest.raises(StopIteration):
        function(iter(()))
    iterator = iter(_dataset(2 * BATCH))
    for left in (2, 0):
        if steps == 1 and left:
            function(iterator)
        if left:
            function(iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        function(iterator)
    assert int(trained.optimizer.iterations) == 2


# How often the model is traced.


class CountsCalls(keras.Sequential):
    calls = 0

    def call(self, inputs, training=None, mask=None):
        type(self).calls += bool(training)
        return super().call(inputs, training=training, mask=mask)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "builder"),
    [(1, "parameter_server"), (4, "parameter_server"), (4, "replicated")],
)
def test_a_model_is_traced_once(steps, builder, monkeypatch):
    monkeypatch.setattr(CountsCalls, "calls", 0)
    model = _model(CountsCalls)
    trained = _compiled(model, steps, builder=builder)
    trained.fit(_dataset(), epochs=3, verbose=0, validation_data=_dataset(20))
    trained.fit(_dataset(), epochs=1, verbose=0)
    assert CountsCalls.calls == 1


# What the loop's graph lets run side by side.

TOWERS, HOST, HOME = ["/device:CPU:1", "/device:CPU:2"], "/device:CPU:0", None


def _executed(builder, home, steps=4):
    name = f"loop_{next(_numbers)}"
    model = _model(name=name)
    parallel = multi_gpu_model(model, gpus=TOWERS, **valued(builder, device=home))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    parallel.compile(optimizer, "mse", steps_per_execution=steps)
    return executed.run(lambda: parallel.fit(_dataset(), verbose=0), name)


@pytest.mark.parametrize(
    ("builder", "home"),
    [("parameter_server", "/device:CPU:3"), slow("replicated", None)],
    ids=BUILDERS,
)
def test_the_next_batch_is_placed_while_a_step_computes(builder, home):
    nodes = _executed(builder, home)
    by_name = {node.name: node for each in nodes.values() for node in each}
    (fetch,) = (n for n in by_name.values() if n.op == "IteratorGetNextAsOptional")
    work = {n.name for n in by_name.values() if n.op in ("MatMul", "_FusedMatMul")}
    work |= {n.name for n in by_name.values() if "Assign" in n.op or "Apply" in n.op}
    assert len(work) > 5
    assert not executed.behind(nodes, fetch) & work
    for tower in TOWERS:
        # What one round of the loop hands the next, but for what TensorFlow adds.
        carried = [
            by_name[node.input[0].split(":")[0]]
            for node in nodes[tower]
            if node.op == "NextIteration" and not node.name.startswith("_cloop")
        ]
        assert len(carried) == 2, "x and y of the share"
        for node in carried:
            before = executed.behind(nodes, node)
            assert fetch.name in before
            assert not before & work, sorted(before & work)[:3]


# Batches placed ahead of a call of one step.


@functools.cache
def _traced(prefetch):
    model = _model()
    trained = _compiled(model, 1, prefetch=prefetch)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    return trained, [(each, each.numpy()) for each in variables]


def _at_its_start(prefetch=10):
    """A model on towers that is traced once for all tests that ask for it."""
    trained, start = _traced(prefetch)
    for variable, value in start:
        variable.assign(value)
    trained.make_train_function()
    return trained


def _taken_by_call(parallel, counted, steps, epochs=1, **options):
    seen = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(counted.taken)
    )
    options |= {"verbose": 0, "callbacks": [watch]}
    parallel.fit(counted.dataset(), steps_per_epoch=steps, epochs=epochs, **options)
    return seen


@pytest.mark.parametrize(
    ("builder", "prefetch"),
    [
        ("parameter_server", 10),
        slow("parameter_server", 0),
        slow("parameter_server", 1),
        slow("replicated", 2),
        slow("asynchronous", 0),
        slow("asynchronous", 2),
    ],
)
def test_batches_are_taken_ahead(builder, prefetch):
    counted = _Counted()
    trained = _compiled(_model(), 1, builder=builder, prefetch=prefetch)
    # Keras reads one iterator in all epochs; of another fit it is another.
    assert _taken_by_call(trained, counted, 2, epochs=2) == [
        prefetch + n for n in (1, 2, 3, 4)
    ]
    counted.taken = 0
    assert _taken_by_call(trained, counted, 1) == [prefetch + 1]


@pytest.mark.parametrize(
    "options", [slow({"run_eagerly": True}), {"steps": 2}], ids=str
)
def test_only_calls_of_one_step_take_ahead(options):
    counted, options = _Counted(), {"steps": 1} | options
    trained = _compiled(_model(), prefetch=2, **options)
    taken = _taken_by_call(trained, counted, 2 * options["steps"])
    assert taken == [options["steps"], 2 * options["steps"]]


def test_on_logical_cpus_nothing_is_taken_ahead_unless_asked_for():
    assert multi_gpu_model(_model(), gpus=2).builder.context.prefetch == 0


@pytest.mark.parametrize("prefetch", [-1, True, 1.5])
def test_how_much_is_taken_ahead_is_checked(prefetch):
    with pytest.raises(ValueError, match=f"Received prefetch={prefetch}; expected"):
        multi_gpu_model(_model(), gpus=2, prefetch=prefetch)


def test_an_error_waits_for_its_batch():
    def fails_third(number, batch):
        third = tf.constant(2, tf.int64)
        with tf.control_dependencies([tf.debugging.assert_none_equal(number, third)]):
            return tf.nest.map_structure(tf.identity, batch)

    trained = _at_its_start()
    iterator = iter(_dataset().enumerate().map(fails_third))
    for _ in range(2):
        trained.train_function(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError):
        trained.train_function(iterator)
    # Of tf.data, which can be read on.
    for _ in range(BATCHES - 3):
        trained.train_function(iterator)
    assert int(trained.optimizer.iterations) == BATCHES - 1
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            trained.train_function(iterator)


def test_iterators_by_turns_each_keep_their_own():
    one_device, towers = _compiled(_model(), 1, towers=0), _at_its_start(2)
    calls = (
        lambda iterator: one_device.train_on_batch(*next(iterator)),
        towers.train_function,
    )
    for call in calls:
        iterators = [iter(_dataset()), iter(_dataset(20))]
        for which in (0, 1, 0, 0, 1, 1, 0):
            call(iterators[which])
    found, expected = towers.get_weights(), one_device.get_weights()
    assert oracle.largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("steps", [1, BATCHES], ids=["unread", "at the end"])
def test_what_was_taken_goes_with_its_iterator(steps):
    trained = _at_its_start(2)
    iterator = iter(_dataset())
    for _ in range(steps):
        trained.train_function(iterator)
    gone = weakref.ref(iterator)
    del iterator
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("builder", ["parameter_server", "replicated"])
def test_a_model_is_traced_once_ahead(builder, monkeypatch):
    monkeypatch.setattr(CountsCalls, "calls", 0)
    trained = _compiled(_model(CountsCalls), 1, builder=builder, prefetch=2)
    trained.fit(_dataset(), epochs=3, verbose=0)
    trained.fit(_dataset(), epochs=1, verbose=0)
    assert CountsCalls.calls == 1


def test_shares_lie_on_their_towers_ahead(monkeypatch):
    taken, take = [], Ahead.take

    def spy(ahead, iterator):
        taken.append(take(ahead, iterator))
        return taken[-1]

    monkeypatch.setattr(Ahead, "take", spy)
    parallel = multi_gpu_model(_model(), gpus=TOWERS, prefetch=2)
    parallel.compile("sgd", "mse")
    parallel.fit(_dataset(), verbose=0)
    assert len(taken) == BATCHES
    for _, (_, shares) in taken:
        for device, share in zip(TOWERS, shares, strict=True):
            assert all(part.backing_device.endswith(device) for part in share)


# Beside a step.


class Step(keras.layers.Layer):
    """Calls a function with the number of each batch, which stands in its rows."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        def called(numbers):
            self.function(int(numbers.flat[0]))
            return numbers

        after = tf.numpy_function(called, [x], x.dtype)
        return x + 0 * tf.ensure_shape(after, x.shape)


def _numbered(count, fetch=lambda number: None):
    """Batches of two rows with their number, each fetched as it is asked for."""

    def called(number):
        fetch(int(number))
        return number

    def batch(number):
        number = tf.ensure_shape(tf.numpy_function(called, [number], tf.int64), [])
        rows = tf.fill([2, 1], tf.cast(number, tf.float32))
        return rows, rows

    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.range(count).map(batch).with_options(options)


def _stepping(function, prefetch, **options):
    # On one tower: if two waited, TensorFlow might have no thread left to fetch with.
    layers = [Step(function), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    trained = multi_gpu_model(model, gpus=1, prefetch=prefetch, **options)
    trained.compile(keras.optimizers.SGD(1e-3), "mse")
    return trained


@pytest.mark.parametrize(
    ("builder", "prefetch"),
    [
        ("parameter_server", 1),
        ("replicated", 2),
        slow("asynchronous", 1),
        slow("parameter_server", 2),
        slow("replicated", 1),
        slow("asynchronous", 2),
    ],
)
def test_batches_are_fetched_before_a_step_returns(builder, prefetch):
    """A step waits for the fetch of the last batch that is to be ahead of it."""
    fetched, came = collections.defaultdict(threading.Event), []
    last = 5

    def step(number):
        awaited = fetched[min(number + prefetch, last)]
        came.append(all(came) and awaited.wait(HANG_S))

    trained = _stepping(step, prefetch, variable_update=builder)
    trained.fit(_numbered(last + 1, lambda n: fetched[n].set()), verbose=0)
    assert came == [True] * (last + 1)


class Held:
    """A fetch that blocks at one batch until it is let go."""

    def __init__(self, number):
        self.number = number
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, number):
        if number == self.number:
            self.reached.set()
            assert self.go.wait(HANG_S)


def test_a_step_that_fails_does_not_wait_for_an_input_that_hangs(monkeypatch):
    monkeypatch.setattr("towers.loop.loop._PATIENCE_S", 0.1)
    held, steps = Held(2), []

    def step(number):
        steps.append(number)
        if number == 1:
            assert held.reached.wait(HANG_S)
            raise ValueError("batch 1 is bad")

    trained = _stepping(step, prefetch=1)
    trained.make_train_function()
    iterator = iter(_numbered(5, held))
    trained.train_function(iterator)
    with pytest.raises(tf.errors.InvalidArgumentError, match="batch 1 is bad"):
        trained.train_function(iterator)
    held.go.set()
    # The batch on its way comes next, once, and others in their order.
    for _ in range(3):
        trained.train_function(iterator)
    assert steps == [0, 1, 2, 3, 4]
    with pytest.raises(tf.errors.OutOfRangeError):
        trained.train_function(iterator)


def test_an_input_that_hangs_keeps_no_other_from_being_fetched(monkeypatch):
    monkeypatch.setattr("towers.loop.loop._PATIENCE_S", 0.1)
    held = Held(0)
    ahead = Ahead(1, lambda iterator: Fetched(None, next(iterator)), None)
    hangs, other = iter(_numbered(3, held)), iter(_numbered(3))
    with pytest.raises(KeyboardInterrupt), ahead.filling(hangs):
        assert held.reached.wait(HANG_S)
        raise KeyboardInterrupt
    try:
        fetched = threading.Event()

        def go_on():
            with ahead.filling(other):
                pass
            fetched.set()

        threading.Thread(target=go_on, daemon=True).start()
        assert fetched.wait(HANG_S)
    finally:
        held.go.set()
    assert ahead.take(hangs) is not None  # which had been on its way


def test_a_fetch_left_behind_lets_go_of_its_iterator(monkeypatch):
    monkeypatch.setattr("towers.loop.loop._PATIENCE_S", 0.1)
    held = Held(1)

    def step(number):
        assert held.reached.wait(HANG_S)
        raise ValueError("bad")

    trained = _stepping(step, prefetch=1)
    trained.make_train_function()
    iterator = iter(_numbered(5, held))
    with pytest.raises(tf.errors.InvalidArgumentError):
        trained.train_function(iterator)
    gone = threading.Event()
    weakref.finalize(iterator, gone.set)
    del iterator
    assert not gone.is_set()
    held.go.set()
    assert gone.wait(HANG_S)


def test_the_thread_ends_with_its_train_function():
    threads = []

    def fetch(iterator):
        threads.append(threading.current_thread())
        return Fetched(None, next(iterator))

    ahead = Ahead(1, fetch, None)
    iterator = iter(_numbered(3))
    for _ in range(2):
        with ahead.filling(iterator):
            pass
        assert ahead.take(iterator)
    (thread,) = set(threads)
    del ahead
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_a_fetch_ahead_runs_on_the_host_and_knows_no_other_scope():
    devices = []

    def fetch(iterator):
        devices.append(tf.zeros([]).device[-5:])
        return Fetched(None, next(iterator))

    ahead = Ahead(3, fetch, None)
    iterator = iter(_numbered(2))
    with tf.device("/device:CPU:3"):
        assert ahead.take(iterator)[0][0, 0] == 0
        with ahead.filling(iterator):
            assert tf.zeros([]).device.endswith("CPU:3")
        assert ahead.take(iterator)[0][0, 0] == 1
        # The end is found once, and nothing is left to fetch.
        with pytest.raises(StopIteration):
            ahead.take(iterator)
    assert devices == ["CPU:3", "CPU:0", "CPU:0"]


_ENDS = """
    import os, signal, sys, threading
    import keras, numpy as np, tensorflow as tf
    from tests.towers.loop import test_loop

    how, forever, reached = sys.argv[1], threading.Event(), threading.Event()

    def fetch(number):
        if number == 1:
            reached.set()
            if how == "ctrl-c":
                os.kill(os.getpid(), signal.SIGINT)
            forever.wait()

    def step(number):
        assert reached.wait(test_loop.HANG_S)
        if how == "error":
            raise ValueError("batch 0 is bad")

    trained = test_loop._stepping(step, prefetch=1)
    trained.fit(test_loop._numbered(5, fetch), verbose=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "raised"), [("error", "batch 0 is bad"), ("ctrl-c", "KeyboardInterrupt")]
)
def test_a_program_ends_though_its_input_hangs(how, raised):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ENDS), how],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert raised in done.stderr
    assert done.returncode in (1, -2, 130)


def test_iterators_are_freed_by_a_thread(monkeypatch):
    """Each of `fit`'s: TensorFlow may wait for a minute there."""
    freed_by, leave = queue.Queue(), datasets._leave

    def note(behind):
        for tensor in behind:
            weakref.finalize(tensor, lambda: freed_by.put(threading.current_thread()))
        leave(behind)

    monkeypatch.setattr(datasets, "_leave", note)
    model = keras.Sequential([keras.Input([FEATURES]), keras.layers.Dense(1)])
    model = multi_gpu_model(model, gpus=2)
    model.compile(optimizer="sgd", loss="mse")
    x, y = np.ones([ROWS, FEATURES], "float32"), np.ones([ROWS, 1], "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    model.fit(data, validation_data=data, epochs=2, verbose=0)
    del model
    gc.collect()
    threads = {freed_by.get(timeout=HANG_S).name for _ in range(4)}
    assert all(name.startswith("towers-free") for name in threads)

"""What a step's time goes to: sleeps put into one phase are found there.

A sleep takes at least its time on any machine, however busy.
"""

import itertools
import json
import re
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from tests.valued import valued
from tests.variants import slow
from towers import multi_gpu_model
from towers.builders.pieces import LocalBatches
from towers.collectives import packing
from towers.keras_adapter.patching import Target, patched
from towers.loop import timers
from towers.monitoring.step_time import StepTime
from towers.partition.call import PartitionedCall

NAP_S = 0.02
BATCHES = 8
# A tower may begin before the host has looked at the clock: long before, on a busy one.
LEAST_S = 0.5 * BATCHES * NAP_S
HOW = {
    "server": ("parameter_server", 1, 0, False),
    "server, a loop": ("parameter_server", 4, 0, False),
    "server, ahead": ("parameter_server", 1, 2, False),
    "server, eager": ("parameter_server", 1, 0, True),
    "replicated, a loop": ("replicated", 4, 0, False),
    "asynchronous, a loop": ("asynchronous", 4, 0, False),
    "asynchronous, ahead": ("asynchronous", 1, 2, False),
}


# What batches that are waited for, or copied, have in common.
ALIKE = (
    *("server", "server, a loop", "server, ahead"),
    *("asynchronous, a loop", "asynchronous, ahead"),
)


def ways(*quick, more=()):
    """Ways to train, and more that are slow."""
    quick = [pytest.param(HOW[name], id=name) for name in quick]
    return [*quick, *(slow(HOW[name], id=name) for name in more)]


def nap(tensor, when=True):
    """The tensor, some time later."""

    def sleep(value, when):
        time.sleep(NAP_S * bool(when))
        return value

    late = tf.py_function(sleep, [tensor, when], tensor.dtype)
    return tf.ensure_shape(late, tensor.shape)


def second_tower(late):
    """Inside, the second tower computes with what a function makes of a tensor."""

    def made(run, call, k, phase, values):
        if k == 1:
            values = [late(values[0]), *values[1:]]
        return run(call, k, phase, values)

    return patched(Target(PartitionedCall, "_call_on_tower"), made)


class SlowSGD(keras.optimizers.SGD):
    def apply(self, grads, trainable_variables=None):
        super().apply([nap(grads[0]), *grads[1:]], trainable_variables)


def slow_input(data):
    """Batches that are made when they are asked for, not before."""
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return data.map(lambda x, y: (nap(x), y)).with_options(options)


def train(
    how,
    data=lambda d: d,
    optimizer="sgd",
    preprocess=None,
    callbacks=(),
    packed=None,
):
    """Trains for an epoch after a warm-up; returns totals and seconds of the epoch."""
    builder, steps, prefetch, eager = how
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    parallel = multi_gpu_model(
        model,
        gpus=2,
        **valued(builder, prefetch=prefetch, preprocess=preprocess, packed=packed),
    )
    parallel.compile(optimizer, "mse", steps_per_execution=steps, run_eagerly=eager)
    x = np.repeat([[-1.0], [1.0]], 3, axis=0) * np.ones([1, 4])
    batches = tf.data.Dataset.from_tensors(
        (tf.constant(x, tf.float32), np.zeros([6, 2]))
    )
    batches = data(batches.repeat(BATCHES))
    parallel.fit(batches, verbose=0)
    before, begin = parallel.builder.timers.totals(), time.perf_counter()
    parallel.fit(batches, verbose=0, callbacks=list(callbacks))
    seconds = time.perf_counter() - begin
    return parallel.builder.timers.totals().since(before), seconds


def check(how, totals, seconds):
    assert totals.steps == BATCHES
    parts = totals[1:5]
    assert min(*parts, *totals.towers_s) >= 0
    # None is counted twice, nor what others do: TensorFlow's clock has microseconds.
    assert sum(parts) < seconds + 1e-3
    # Where towers do not wait for one another, the mean of them counts.
    if how[0] != "asynchronous":
        assert max(totals.towers_s) <= totals.compute_s + 1e-3


# Batches are taken for replicated towers as for others.
@pytest.mark.parametrize(
    "how",
    ways("server, eager", more=ALIKE),
)
def test_waiting_for_input(how):
    found = train(how, slow_input)
    check(how, *found)
    totals, _ = found
    # In a call of several, a batch is made while the towers compute, for a part of it.
    assert totals.input_s > LEAST_S / (2 if how[1] > 1 or how[2] else 1)


@pytest.fixture
def copies(monkeypatch):
    """Cutting and copying takes time; a function waits for so many batches."""
    done, changed, cut = [], threading.Condition(), LocalBatches.cut

    def sleep(value):
        time.sleep(NAP_S)
        with changed:
            done.append(None)
            changed.notify_all()
        return value

    def slowly(batches, data):
        x, y = data
        # Not stateful: steps of a loop would wait for it.
        late = tf.numpy_function(sleep, [x], x.dtype, stateful=False)
        return cut(batches, (tf.ensure_shape(late, x.shape), y))

    def wait(count):
        with changed:
            assert changed.wait_for(lambda: len(done) >= count, timeout=HANG_S)

    monkeypatch.setattr(LocalBatches, "cut", slowly)
    return wait


# In Python, it is a part of Python's time.
@pytest.mark.parametrize(
    "how",
    ways("replicated, a loop", more=ALIKE),
)
def test_copying_local_batches(how, copies):
    totals, seconds = train(how)
    check(how, totals, seconds)
    # A part of it lies beside a step; in a loop, also two copies beside each other.
    assert totals.copy_s > LEAST_S / (4 if how[1] > 1 else 2 if how[2] else 1)
    assert totals.input_s < totals.copy_s


def test_copying_beside_a_step_takes_no_time(copies):
    """Each step waits until the batches are copied that are to be ahead of it."""
    how, steps = HOW["server, ahead"], itertools.count()
    ahead = how[2]

    def wait(value):
        epoch, step = divmod(next(steps), BATCHES)
        copies(epoch * BATCHES + min(step + 1 + ahead, BATCHES))
        return value

    def late(x):
        return tf.ensure_shape(tf.py_function(wait, [x], x.dtype), x.shape)

    # On the second tower alone: TensorFlow has to have a thread left.
    with second_tower(late):
        totals, seconds = train(how)
    check(how, totals, seconds)
    # The first batch alone is copied while nothing else is done.
    assert totals.copy_s < BATCHES * NAP_S / 2
    assert totals.compute_s > totals.copy_s


@pytest.mark.parametrize(
    ("builder", "steps", "prefetch"),
    [
        ("replicated", 1, 0),
        slow("parameter_server", 1, 0),
        slow("parameter_server", 1, 2),
        slow("parameter_server", 4, 0),
    ],
)
def test_waiting_for_a_thread_is_not_copying(builder, steps, prefetch):
    """Two towers keep both threads, and time passes only while they compute."""
    command = [sys.executable, "-m", "tests.towers.loop.two_threads", builder]
    run = subprocess.run(
        [*command, str(steps), str(prefetch)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == 0, run.stderr
    totals, said = json.loads(run.stdout.splitlines()[-1])
    # Each tower takes a second.
    assert totals[:5] == [24, 0.0, 0.0, 2.0 * 24, 0.0]
    assert said.startswith("whole run: compute-bound")


def test_a_tower_on_a_cpu_begins_after_its_clock():
    devices = ["/device:CPU:0", "/device:CPU:1"]
    local, timed = _towers_begin(devices)
    clocks = [[op for op in _before(each) if op.type == "Timestamp"] for each in local]
    assert [[op.device for op in of_tower] for of_tower in clocks] == [
        [device] for device in devices
    ]
    # Towers wait for no clock of others, and the time is that of the first.
    assert timed.op.type == "Min"
    assert {*itertools.chain(*clocks)} <= _before(timed)


def test_a_tower_on_a_gpu_waits_for_no_clock():
    """The host would have to wait for the GPU."""
    local, timed = _towers_begin(["/device:GPU:0", "/device:CPU:0"])
    assert [each.op.type for each in local] == ["Placeholder"] * 2
    assert timed.op.type == "Timestamp"


def _towers_begin(devices):
    """Returns the local batches that towers get in a step, and when they are placed."""
    step_timers = timers.StepTimers(len(devices))
    with tf.Graph().as_default():
        batches = [tf.compat.v1.placeholder(tf.float32, [2]) for _ in devices]
        fetched = tf.zeros([1, 3], tf.float64)
        with step_timers.step(batches, batches, devices, fetched) as local:
            return local, step_timers._times["placed"]


def _before(tensor):
    """Returns all operations that a tensor waits for."""
    waiting, before = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        for needed in {*op.control_inputs, *(x.op for x in op.inputs)} - before:
            before.add(needed)
            waiting.append(needed)
    return before


@pytest.mark.parametrize("steps", [slow(1), 4])
def test_sending_parameters_is_copying(steps, monkeypatch):
    """Where they travel, as between a host and its GPUs: in one buffer."""
    pack = packing.pack

    def slowly(tensors):
        buffers = pack(tensors)
        if tf.get_current_name_scope().split("/")[-1] == "read":
            buffers[0] = nap(buffers[0])
        return buffers

    monkeypatch.setattr(packing, "pack", slowly)
    how = "parameter_server", steps, 0, False
    totals, seconds = train(how, packed=True)
    check(how, totals, seconds)
    assert totals.copy_s > LEAST_S
    assert totals.compute_s < totals.copy_s


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    "how",
    ways(
        "replicated, a loop",
        "asynchronous, ahead",
        more=(
            "server",
            "server, a loop",
            "server, ahead",
            "asynchronous, a loop",
        ),
    ),
)
def test_computing_by_tower(how):
    """The second tower is slow. Of those that do not wait, its rows are positive."""

    def preprocess(x, y, training):
        return nap(x, x[0, 0] > 0), y

    if how[0] == "asynchronous":
        totals, seconds = train(how, preprocess=preprocess)
    else:
        with second_tower(nap):
            totals, seconds = train(how)
    check(how, totals, seconds)
    first, second = totals.towers_s
    assert second > LEAST_S
    if how[0] != "asynchronous":
        assert first < second
        assert totals.compute_s > LEAST_S


# Batches taken ahead are nothing to it.
@pytest.mark.parametrize(
    "how",
    ways(
        "server",
        more=(
            "server, a loop",
            "replicated, a loop",
            "asynchronous, a loop",
        ),
    ),
)
def test_applying(how):
    totals, seconds = train(how, optimizer=SlowSGD())
    check(how, totals, seconds)
    assert totals.reduce_s > LEAST_S


def test_what_is_measured_adds_up():
    """And the iterator in use is known."""
    step_time = StepTime(warmup_steps=2)
    found, seen = [], []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found.append(step_time.measured())
            iterator = self.model.builder.timers.iterator
            seen.append(iterator.element_spec[0].shape[1:])

    train(HOW["server"], slow_input, callbacks=[step_time, Look()])
    assert seen == [(4,)] * BATCHES
    assert timers.StepTimers(2).iterator is None
    # The second call's end is the start.
    assert not found[0] and not found[1]
    parts = [f"step_ms/{n}" for n in ("input", "copy", "compute", "reduce", "python")]
    towers = ["step_ms/tower_0", "step_ms/tower_1"]
    assert all(list(each) == ["waiting", *parts, *towers] for each in found[2:])
    assert min(each["step_ms/input"] for each in found[2:]) > 1000 * NAP_S
    # All that is said is about the same steps, and parts add up to a step.
    curve = np.array([[each[part] for part in parts] for each in found[2:]])
    said = re.findall(
        r"[\d.]+(?= ms:| wait| copy| comp| reduc| in P)", step_time.text()
    )
    expected = [curve.sum(axis=1).mean(), *curve.mean(axis=0)]
    np.testing.assert_allclose(np.array(said, float), expected, atol=0.051)

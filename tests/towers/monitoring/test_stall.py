"""What is said of a run that stands still: with things that really block."""

import contextlib
import functools
import math
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.data.experimental import service

from tests import warm
from tests.limits import HANG_S
from towers import multi_gpu_model
from towers.hosts import group
from towers.input_pipeline import ArraySource, make_dataset
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import store
from towers.monitoring.stall import callback, hosts
from towers.monitoring.stall.callback import Stall
from towers.train import checks
from towers.train.settings import Settings

ROOT = Path(__file__).parents[3]
EXAMPLES, BATCH, STEPS = 44, 8, 6
SECONDS = 300
TOWERS = "/device:CPU:0", "/device:CPU:1"
# What does not answer costs so much time.
SOON = {"patience_s": 2}


class Block:
    """A function that returns what it is given; from one call on, only when let go."""

    def __init__(self, after=0, calls=1000):
        self.waits, self.free = threading.Event(), threading.Event()
        self.range, self.calls = range(after, after + calls), 0

    def __call__(self, value=None, *_, **__):
        self.calls += 1
        if self.calls - 1 in self.range:
            self.waits.set()
            assert self.free.wait(HANG_S)
        return value


def in_graph(function, tensor):
    """What a function of Python's makes of a tensor."""
    found = tf.numpy_function(function, [tensor], tensor.dtype)
    return tf.ensure_shape(found, tensor.shape)


class Blocked(keras.callbacks.Callback):
    """A callback, one of whose methods blocks."""

    def __init__(self, name, block):
        super().__init__()
        setattr(self, name, block)


class Layer(keras.layers.Layer):
    """A layer that cannot be traced for a while."""

    def __init__(self, block):
        super().__init__()
        self.block, self.armed = block, False

    def call(self, x):
        if self.armed:
            self.block()
        return x


class Blocking(ArraySource):
    """A source that calls a function in one of the stages."""

    def __init__(self, block, stage="parse"):
        super().__init__(*arrays())
        self.block, self.stage = block, stage

    def batches(self, *args, **options):
        batches = super().batches(*args, **options)
        if self.stage != "read":
            return batches
        return batches.map(lambda numbers, raw: (in_graph(self.block, numbers), raw))

    def parse(self, records):
        images, labels = super().parse(records)
        return images, in_graph(self.block, labels) if self.stage == "parse" else labels


def arrays():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [EXAMPLES, 4, 4, 1], np.uint8)
    return images, rng.integers(0, 3, EXAMPLES)


def build(*layers):
    layers = keras.layers.Rescaling(1 / 255), *layers, keras.layers.Flatten()
    model = keras.Sequential([keras.Input((4, 4, 1)), *layers, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    model.optimizer.build(model.trainable_variables)
    return model


@functools.cache
def shared():
    """Two towers for tests of what is not theirs: they are traced once."""
    return multi_gpu_model(build(), gpus=2)


def plain(block=None):
    """Data that are not of input_pipeline."""
    data = tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)
    if block is not None:
        data = data.map(lambda x, y: (x, in_graph(block, y)))
    options = tf.data.Options()
    # A batch is read when it is asked for.
    options.experimental_optimization.inject_prefetch = False
    return data.with_options(options)


def write_tfrecord(path, count):
    image = tf.io.encode_png(np.zeros([4, 4, 1], np.uint8)).numpy()
    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(count):
            label = tf.train.Feature(int64_list={"value": [i % 3]})
            features = {
                "image/encoded": tf.train.Feature(bytes_list={"value": [image]}),
                "image/class/label": label,
            }
            example = tf.train.Example(features={"feature": features})
            writer.write(example.SerializeToString())


def piped(source, training=True, image_shape=(4, 4, 1)):
    return make_dataset(
        *(source, "train"),
        batch_size=BATCH,
        image_shape=image_shape,
        training=training,
        repeat=training,
    )


class Run:
    """A fit in a thread of its own, and a clock that only the test moves."""

    def __init__(self, capsys):
        self.capsys, self.now, self.left = capsys, 0.0, []

    def stall(self, on_stall="wait", **options):
        options = {"devices": TOWERS, "patience_s": 30} | options
        self.callback = Stall(
            *(SECONDS, on_stall),
            clock=lambda: self.now,
            leave=self.left.append,
            **options,
        )
        return self.callback

    def fit(self, data, *callbacks, model=None, prefetch=0, **options):
        parallel = shared()
        if model:
            parallel = multi_gpu_model(model, gpus=2, prefetch=prefetch)
        options = {"epochs": 3, "steps_per_epoch": STEPS, "shuffle": False} | options
        parallel.fit(data, callbacks=[self.callback, *callbacks], verbose=0, **options)

    @contextlib.contextmanager
    def blocked(self, block, *args, **options):
        """While the block waits."""

        thread = threading.Thread(
            target=self.fit, args=args, kwargs=options, name="fits"
        )
        thread.start()
        try:
            assert block.waits.wait(HANG_S)
            yield
        finally:
            block.free.set()
            thread.join(HANG_S)
            assert not thread.is_alive()  # others use the model after it

    def wait(self, seconds=SECONDS):
        """Lets the clock run, and returns what was said meanwhile."""
        for _ in range(math.ceil(seconds / 100)):
            self.now += seconds / math.ceil(seconds / 100)
            self.callback.check()
        return self.said()

    def said(self):
        return self.capsys.readouterr().err


@pytest.fixture
def run(capsys):
    return Run(capsys)


def reason(said):
    """What is waited for, of one warning."""
    pattern = r"^towers: Warning: .*; waiting for (.*)\. The stacks:$"
    (found,) = re.findall(pattern, said, re.M)
    return found


# What is waited for.


def test_data_of_others(run):
    block = Block(after=2)
    run.stall(data=plain(block))
    with run.blocked(block, plain(block)):
        said = run.wait()
        # Two batches, and the one that is waited for: it was not read once more.
        assert block.calls == 3
    assert said.startswith(
        "towers: Warning: No batch has ended for 300 s, in epoch 1/3 after batch 2; "
        "waiting for the input or the computation (the devices answer). The stacks:\n"
    )


def test_the_stacks_have_names(run):
    block = Block()
    run.stall()
    with run.blocked(block, plain(), Blocked("on_epoch_begin", block)):
        stacks = run.wait().partition("The stacks:\n")[2]
    # That of fit is the first.
    first, *others = re.split(r"^Thread ", stacks, flags=re.M)[1:]
    assert first.startswith("fits:\n")
    assert re.search(r"^  .*/trainer\.py:\d+ in \w*Trainer\.fit$", first, re.M)
    assert re.search(rf"^  {__file__}:\d+ in Block\.__call__$", first, re.M)
    assert any(each.startswith("towers-stall:\n") for each in others)
    assert "Run.wait" not in stacks


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["read", "parse"])
def test_a_stage_of_the_input(run, stage):
    block = Block()
    data = piped(Blocking(block, stage))
    run.stall(data=data, **SOON)
    with run.blocked(block, data):
        said = run.wait()
    assert reason(said) == f"the input, whose stage '{stage}' gives nothing within 2 s"
    assert "300 s, in epoch 1/3 before its first;" in said


def test_a_batch_that_is_fetched_ahead(run):
    block = Block(after=2)
    run.stall()
    with run.blocked(block, plain(block), model=build(), prefetch=2):
        said = run.wait()
    assert reason(said) == "the input or the computation (the devices answer)"
    assert "Thread towers-ahead:\n" in said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stage_that_fails(run):
    block = Block()

    def only_once(labels):
        if block.calls:
            raise ValueError("no such label\nand more")
        return block(labels)

    data = piped(Blocking(only_once))
    run.stall(data=data)
    with run.blocked(block, data):
        found = reason(run.wait())
    assert found.startswith("the input, whose stage 'parse' fails: InvalidArgumentE")
    assert "ValueError: no such label" in found


def test_all_answer(run):
    block = Block(calls=1)
    data = piped(Blocking(block))
    run.stall(data=data)
    with run.blocked(block, data):
        said = run.wait()
    assert reason(said) == (
        "a record further on in the input, or the computation itself (the devices "
        "answer, and the input, read once more, gives a batch)"
    )


@pytest.mark.slow
def test_the_input_of_validation(run):
    block, data = Block(), piped(ArraySource(*arrays()))
    validation_data = piped(Blocking(block), training=False)
    run.stall(data=data, validation_data=validation_data, **SOON)
    with run.blocked(block, data, validation_data=validation_data):
        said = run.wait()
    assert reason(said) == "the input, whose stage 'parse' gives nothing within 2 s"
    assert "300 s, in the validation of epoch 1/3 before its first;" in said


@pytest.mark.slow
def test_a_device_that_does_not_answer(run, monkeypatch):
    dead = Block()
    compute = callback.compute
    monkeypatch.setattr(
        *(callback, "compute"),
        lambda device: dead() if device == TOWERS[1] else compute(device),
    )
    block = Block()
    data = piped(Blocking(block))
    run.stall(data=data, **SOON)
    with run.blocked(block, data):
        said = run.wait()
    dead.free.set()
    assert reason(said) == f"the device {TOWERS[1]}, which gives nothing within 2 s"


def test_devices_compute_what_they_are_asked(run):
    soft = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        run.stall(devices=(*TOWERS, "/device:GPU:9"))
        block = Block()
        with run.blocked(block, plain(block)):
            found = reason(run.wait())
    finally:
        tf.config.set_soft_device_placement(soft)
    assert found.startswith("the device /device:GPU:9, which fails: InvalidArgumentE")


def test_a_save(run, tmp_path, monkeypatch):
    block, waits, save = Block(), Block(), store.save
    waits.free.set()
    checkpoint = Checkpoint(tmp_path, save_steps=2)
    checkpoints = checkpoint.run.checkpoints
    wait = checkpoints.wait

    def slow_save(*args):
        block()
        return save(*args)

    def watched_wait(**options):
        if checkpoints._saving is not None and not options:
            waits()
        wait(**options)

    monkeypatch.setattr(store, "save", slow_save)
    monkeypatch.setattr(checkpoints, "wait", watched_wait)
    run.stall()
    # The second save waits for the first.
    with run.blocked(block, piped(ArraySource(*arrays())), checkpoint):
        assert waits.waits.wait(HANG_S)
        said = run.wait()
    assert reason(said) == "the save of a checkpoint"
    assert "in epoch 1/3 after batch 4;" in said


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("method", "where"),
    [
        ("on_train_begin", "before the first one"),
        ("on_train_batch_end", "in epoch 1/3 after batch 1"),
        ("on_test_batch_end", "in the validation of epoch 1/3 after batch 1"),
        ("on_epoch_end", "in epoch 1/3 after batch 6"),
        ("on_train_end", "in epoch 3/3 after batch 6"),
    ],
)
def test_a_callback(run, method, where):
    block = Block()
    run.stall()
    blocked = Blocked(method, block)
    with run.blocked(block, plain(), blocked, validation_data=plain()):
        said = run.wait()
    assert reason(said) == "the callback Blocked"
    assert f"No batch has ended for 300 s, {where};" in said


def test_a_callback_that_is_a_function(run):
    block = Block()
    run.stall()
    function = keras.callbacks.LambdaCallback(on_epoch_begin=block)
    with run.blocked(block, plain(), function):
        assert reason(run.wait()) == "the callback LambdaCallback"


@pytest.mark.slow
def test_a_graph(run):
    block = Block()
    layer = Layer(block)
    model = build(layer)
    layer.armed = True
    run.stall()
    with run.blocked(block, plain(), model=model):
        assert reason(run.wait()) == "the graph that is being built"


# When it is said.


def test_once_and_again_when_it_goes_on(run):
    first, second = Block(after=2, calls=1), Block(after=4, calls=1)
    run.stall()

    def both(labels):
        return second(first(labels))

    with run.blocked(first, plain(both)):
        assert run.wait(280) == ""
        assert "300 s, in epoch 1/3 after batch 2;" in run.wait(20)
        assert run.wait(1000) == ""
        first.free.set()
        assert second.waits.wait(HANG_S)
        assert run.said() == "towers: It goes on after 1300 s.\n"
        assert "300 s, in epoch 1/3 after batch 4;" in run.wait()
        second.free.set()
    assert run.said() == "towers: It goes on after 300 s.\n"


def test_it_goes_on_while_it_is_asked(run, monkeypatch):
    block, asked = Block(after=2, calls=1), Block()
    run.stall("stop")
    ends = keras.callbacks.LambdaCallback(on_train_end=lambda logs: asked.free.set())

    def compute(device):
        block.free.set()
        asked()

    monkeypatch.setattr(callback, "compute", compute)
    with run.blocked(block, plain(block), ends):
        said = run.wait()
    assert reason(said)
    assert said.endswith("towers: It goes on after 300 s.\n")
    assert run.left == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_raises_while_it_is_asked(run, monkeypatch):
    block = Block()

    def fails(labels):
        block()
        raise ZeroDivisionError

    def compute(device):
        block.free.set()
        for thread in threading.enumerate():
            if thread.name == "fits":
                thread.join(HANG_S)

    monkeypatch.setattr(callback, "compute", compute)
    run.stall("stop")
    with run.blocked(block, plain(fails)):
        assert reason(run.wait())
    assert run.left == []


def test_steps_in_time(run):
    def step(*_, **__):
        run.now += 140
        run.callback.check()
        run.now += 140
        run.callback.check()

    run.stall("stop")
    step = keras.callbacks.LambdaCallback(
        on_train_batch_end=step, on_epoch_end=step, on_train_begin=step
    )
    run.fit(plain(), step, validation_data=plain())
    assert run.said() == ""
    assert run.left == []


def test_a_process_that_was_stopped_itself(run):
    block = Block(after=2)
    run.stall("stop")
    with run.blocked(block, plain(block)):
        run.now += 10_000
        run.callback.check()
        assert run.said() == ""
        assert reason(run.wait())


@pytest.mark.slow
def test_batches_that_are_passed_over(run, tmp_path):
    class Breaks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4:
                raise ZeroDivisionError

    def slowly(y):
        for _ in range(2):
            run.now += 100
            run.callback.check()
        return y

    run.stall("stop")
    with pytest.raises(ZeroDivisionError):
        run.fit(plain(), Checkpoint(tmp_path, save_steps=1), Breaks())
    run.fit(plain(slowly), Checkpoint(tmp_path), epochs=1)
    assert run.now == 200 * STEPS
    assert "No batch" not in run.said()
    assert run.left == []


@pytest.mark.slow
def test_the_run_is_the_same(run):
    plain, asked = build(), build()
    asked.set_weights(plain.get_weights())
    run.stall()
    run.fit(piped(ArraySource(*arrays())), model=plain)
    block = Block(calls=1)
    data = piped(Blocking(block))
    run.stall(data=data)
    with run.blocked(block, data, model=asked):
        assert reason(run.wait())
    for a, b in zip(plain.get_weights(), asked.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("ends", [True, False], ids=["returns", "raises"])
def test_nothing_after_fit(run, ends):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if not ends:
                raise ZeroDivisionError

    run.stall("stop")
    # The list outlives fit, and so does what was raised.
    model = shared()
    callbacks = keras.callbacks.CallbackList(
        [run.callback, Ends()], add_history=True, model=model
    )
    try:
        model.fit(plain(), callbacks=callbacks, verbose=0, shuffle=False)
    except ZeroDivisionError as error:
        raised = error
    else:
        raised = None
    assert (raised is None) == ends
    assert run.wait(10 * SECONDS / 4) == ""
    assert run.callback._fit.over.is_set()
    # And then once more, by the same callback.
    block = Block()
    with run.blocked(block, plain(block)):
        assert reason(run.wait())
    assert run.left == [4]
    assert callbacks is not None


def test_nothing_after_a_loop_of_ones_own(run):
    callbacks = keras.callbacks.CallbackList([run.stall()])
    callbacks.on_train_begin()
    assert reason(run.wait())
    callbacks.on_train_end()
    assert run.said() == "towers: It goes on after 300 s.\n"
    assert run.wait(2 * SECONDS) == ""


def test_its_thread_ends_with_fit(run):
    run.stall()
    before = set(threading.enumerate())
    run.fit(plain(), epochs=1)
    assert run.callback._fit.over.is_set()
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)
        assert not thread.is_alive()


# The end of the process.


@pytest.mark.parametrize("saved", [True, False, None])
def test_stop_names_the_last_checkpoint(run, saved):
    block = Block(after=2)
    again = {
        True: ": the last checkpoint is runs/ckpt-1-0; run again to continue",
        False: ": nothing was saved yet",
        None: "",
    }[saved]
    latest = "runs/ckpt-1-0" if saved else None
    checkpoint = None if saved is None else types.SimpleNamespace(latest=latest)
    run.stall("stop", checkpoint=checkpoint)
    with run.blocked(block, plain(block)):
        said = run.wait()
    assert said.endswith(f"towers: Stopped by the stall{again}.\n")
    assert run.left == [4]


_STOPS = """
import sys
import threading
import keras
import tensorflow as tf
from towers.callbacks import Stall

class Clock:
    def __init__(self):
        self.now = 0.0
    def __call__(self):
        return self.now

def blocks(i):
    def later():
        for _ in range(4):
            clock.now += 75
            stall.check()
    threading.Thread(target=later).start()
    threading.Event().wait()

def rows(i):
    x = tf.ensure_shape(tf.numpy_function(blocks, [i], tf.float32), [4, 1])
    return x, x

clock = Clock()
stall = Stall(300, "stop", devices=["CPU:0"], clock=clock)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
# With a buffer that has to be flushed.
sys.stdout = open(1, "w", closefd=False)
print("begins", end="")
model.fit(tf.data.Dataset.range(2).map(rows), callbacks=[stall], verbose=0)
"""


def test_stop_ends_a_process_that_waits_for_tensorflow():
    done = warm.run("tests.program", _STOPS)
    assert done.returncode == 4, done.stderr
    assert reason(done.stderr) == "the input or the computation (the devices answer)"
    assert "\nThread MainThread:\n" in done.stderr
    assert done.stderr.endswith("towers: Stopped by the stall.\n")
    # Flushed.
    assert done.stdout == "begins"


# In towers.train.


# What does not answer costs so much time, as above.
_TRAINS = """
import functools, runpy
from towers.monitoring.stall import callback as stall

stall.Stall = functools.partial(stall.Stall, patience_s=4)
runpy.run_module("towers.train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_service_whose_worker_is_killed(tmp_path):
    for shard in range(2):
        write_tfrecord(tmp_path / f"train-{shard}", 40)
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    with contextlib.ExitStack() as stack:

        def start(*args):
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *args],
                    cwd=ROOT,
                    env=os.environ
                    | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        address = dispatcher.target.partition("://")[2]
        worker = start(
            *(
                "-m",
                "towers.input_pipeline.service",
                "worker",
                f"--dispatcher={address}",
            )
        )
        # Until the worker is there, the run waits for it.
        run = start(
            *("-c", _TRAINS, f"--dataset=tfrecord:{tmp_path}/train-*"),
            *(f"--model_dir={tmp_path / 'run'}", f"--data_service=grpc://{address}"),
            *("--model=mlp", "--batch_size=8", "--train_epochs=100000"),
            *("--variable_update=parameter_server", "--image_size=4"),
            "--on_stall=stop:10",
        )
        for line in run.stdout:
            if line.startswith("epoch 2/"):
                break
        worker.kill()
        _, errors = run.communicate(timeout=HANG_S)
    assert run.returncode == 4, errors
    found = reason(errors)
    assert found == "the input, whose stage 'data service' gives nothing within 4 s"
    latest = re.search(r"^towers: Stopped by the stall: .* is (.*); run", errors, re.M)
    assert store.load(latest[1]).about["step"]


def test_flags(tmp_path):
    with pytest.raises(ValueError, match="wait:-1; expected"):
        checks.check(Settings(on_stall="wait:-1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stall_seconds": 0}, "Received stall_seconds=0; expected more than 0"),
        (
            {"stall_seconds": float("nan")},
            "Received stall_seconds=nan; expected more than 0",
        ),
        (
            {"stall_seconds": 1, "on_stall": "go"},
            "on_stall='go'; expected 'wait' or 'stop'",
        ),
    ],
)
def test_what_does_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        Stall(**options)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            (None, "waits for the callback Slow"),
            "host 1, which waits for the callback Slow, in the collective 'step 0'",
        ),
        (
            ("digests", ""),
            "host 1, which is in the collective 'digests', in the collective 'step 0'",
        ),
        (None, "host 1, which does not answer, in the collective 'step 0'"),
    ],
)
def test_hosts_that_are_waited_for(monkeypatch, told, said):
    answers = {"host 0": ("step 0", "computes"), "host 1": told}
    monkeypatch.setattr(group, "ask_all", lambda seconds: answers)
    assert hosts.waited_for(1.0) is None
    monkeypatch.setattr(group, "collective", lambda: "step 0")
    assert hosts.waited_for(1.0) == said
    assert Stall(stall_seconds=9)._ask(testing=False) == said


def test_hosts_that_are_all_in_a_step(monkeypatch):
    answers = dict.fromkeys(["host 0", "host 1"], ("train", "computes"))
    monkeypatch.setattr(group, "ask_all", lambda seconds: answers)
    monkeypatch.setattr(group, "collective", lambda: "train")
    assert hosts.waited_for(1.0) is None
    reason = "another host, the network, the input or the computation"
    assert Stall(stall_seconds=9)._ask(testing=False) == reason


def test_hosts_that_cannot_be_asked(monkeypatch):
    monkeypatch.setattr(group, "collective", lambda: "step 0")
    assert group.ask_all(1) == {}
    said = "other hosts, which MPI cannot ask, in the collective 'step 0'"
    assert hosts.waited_for(1.0) == said


def test_what_other_hosts_are_told(monkeypatch):
    stall, hosts_hear, over = Stall(stall_seconds=9), [], mock.Mock()
    monkeypatch.setattr(group, "does_meanwhile", hosts_hear.append)
    over.wait.return_value = True
    stall._watch(over)
    says, nothing = hosts_hear
    assert nothing is None
    stall._fit = mock.Mock()
    for frames, said in (
        (None, "has ended its training"),
        ([sys._getframe()], "computes, or waits for its input"),
    ):
        stall._fit.frames.return_value = frames
        assert says() == said

"""Runs that are saved, broken off and continued: as if nothing had happened."""

import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.small import build, tiny
from towers import multi_gpu_model
from towers.input_pipeline import ArraySource, make_dataset
from towers.lifecycle import data_position
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import states, store
from towers.lifecycle.checkpoints.manager import SaveError
from towers.lifecycle.checkpoints.saved_model import check_checkpoint
from towers.lifecycle.checkpoints.store import Position
from towers.lifecycle.resume import ResumeError
from towers.lifecycle.signals import Stopped
from towers.lifecycle.stop_at_step import StopAtStep
from towers.numerics.not_finite import NotFinite

EXAMPLES, BATCH, STEPS = 44, 8, 6


def source():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [EXAMPLES, 4, 4, 1], np.uint8)
    return ArraySource(images, rng.integers(0, 3, EXAMPLES))


def data(training=True, repeat=False, batch_size=BATCH, seed=3, recipe="cifar"):
    return make_dataset(
        source(),
        "train",
        batch_size=batch_size,
        image_shape=(4, 4, 1),
        training=training,
        recipe=recipe,
        seed=seed,
        repeat=repeat,
    )


def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=[EXAMPLES, 4, 4, 1]).astype("float32")
    return x, rng.integers(0, 3, EXAMPLES)


def plain():
    """Data that are not of input_pipeline: a run starts sooner."""
    return tf.data.Dataset.from_tensor_slices(arrays()).batch(BATCH)


pytestmark = pytest.mark.oldest


class Breaks(keras.callbacks.Callback):
    """Ends the run, or does something else, once so many batches have been trained."""

    def __init__(self, after, what=None):
        super().__init__()
        self.left, self.what = after, what

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            if self.what is None:
                raise ZeroDivisionError
            self.what()


def fit(model, *callbacks, x=None, gpus=2, epochs=3, **options):
    x = plain() if x is None else x
    parallel = multi_gpu_model(model, gpus=gpus)
    options |= {"epochs": epochs, "callbacks": list(callbacks)}
    return parallel.fit(x, verbose=0, **options)


def values(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


@functools.cache
def _traced():
    model = tiny()
    return multi_gpu_model(model, gpus=2), model, values(model)


def fit_traced(*callbacks, epochs=3):
    """A fit for where it does not matter that its graph is that of other tests."""
    parallel, model, start = _traced()
    variables = *model.variables, *model.optimizer.variables
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    callbacks = list(callbacks)
    return parallel.fit(plain(), epochs=epochs, callbacks=callbacks, verbose=0)


def assert_same(model, other):
    for a, b in zip(values(model), values(other), strict=True):
        np.testing.assert_array_equal(a, b)


def broken_off(directory, breaks, compiled, **options):
    """A run that is broken off after so many batches each time; its last process."""
    for after in [*breaks, None]:
        model = (tiny if compiled else build)(**compiled)
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=9),
            Checkpoint(directory, save_steps=2),
        ]
        if after is None:
            return model, fit(model, *callbacks, **options), callbacks[0]
        with pytest.raises(ZeroDivisionError):
            fit(model, *callbacks, Breaks(after), **options)


@pytest.mark.parametrize(
    ("compiled", "repeat", "breaks"),
    [
        # In the middle of an epoch, at once, and in that of the next epoch.
        ({}, False, (3, 1, 8)),
        # And between two epochs, which are no passes over the data.
        ({}, True, (5, 4)),
        ({"optimizer": "adam", "steps_per_execution": 2}, False, (5,)),
    ],
    ids=["epochs", "repeat and validation", "steps_per_execution"],
)
def test_a_run_broken_off_ends_as_one_that_was_not(tmp_path, compiled, repeat, breaks):
    options = {"x": data(repeat=repeat)}
    if repeat:
        options["steps_per_epoch"] = STEPS - 2
        options["validation_data"] = data(training=False)
    whole, history, stopping = broken_off(tmp_path / "a", (), compiled, **options)
    model, continued, continued_stopping = broken_off(
        tmp_path / "b", breaks, compiled, **options
    )
    assert_same(model, whole)
    assert continued.history == history.history
    assert continued.epoch == history.epoch == [0, 1, 2]
    assert continued_stopping.wait == stopping.wait
    assert continued_stopping.best == stopping.best


def test_with_other_numbers_of_towers_the_rest_is_the_same(tmp_path):
    # Without dropout and BatchNorm, which are the towers' own.
    def make():
        return tiny(keras.optimizers.SGD(1e-3, 0.9))

    whole, model = make(), None
    fit(whole, gpus=1)
    for gpus, after in ((1, 4), (3, 5), (2, None)):
        model = make()
        breaks = [] if after is None else [Breaks(after)]
        try:
            fit(model, Checkpoint(tmp_path, save_steps=1), *breaks, gpus=gpus)
        except ZeroDivisionError:
            continue
    for a, b in zip(values(model), values(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_callbacks_hear_only_of_what_is_done_now(tmp_path):
    heard = []
    hears = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: heard.append(batch),
        on_train_batch_end=lambda batch, logs: heard.append(-batch),
    )
    with pytest.raises(ZeroDivisionError):
        fit_traced(Checkpoint(tmp_path, save_steps=1), Breaks(5))
    fit(tiny(), Checkpoint(tmp_path), hears, epochs=2)
    # The fifth was trained on, but not saved.
    assert heard == [4, -4, 5, -5, 0, 0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5]


def test_other_data_are_read_again_and_passed_over(never_stopped, tmp_path, capsys):
    model = tiny("adam")
    with pytest.raises(ZeroDivisionError):
        fit(tiny("adam"), Checkpoint(tmp_path, save_steps=2), Breaks(9))
    fit(model, Checkpoint(tmp_path))
    assert_same(model, never_stopped)
    assert capsys.readouterr().err.count("gives the same records again") == 1


def simple(**options):
    """Data of input_pipeline that are soon made."""
    return data(recipe="none", **options)


class TestOtherData:
    """Which a run in the middle of an epoch cannot go on with."""

    @pytest.fixture(scope="class")
    def stopped(self, tmp_path_factory):
        """Stopped after four batches; not to be changed."""
        folder = tmp_path_factory.mktemp("stopped")
        fit(tiny(), Checkpoint(folder), StopAtStep(4), x=simple())
        return folder

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"batch_size": 4}, "batch size 8, but received 4"),
            ({"seed": 7}, "seed 3, but received 7"),
        ],
    )
    def test_is_refused(self, stopped, options, words):
        with pytest.raises(ResumeError, match=f"ckpt-0-4 goes on .* {words}"):
            fit(tiny(), Checkpoint(stopped), x=simple(**options))

    def test_of_others_is_refused(self, stopped):
        with pytest.raises(ResumeError, match=r"dataset .*, but received unknown"):
            fit(tiny(), Checkpoint(stopped))

    def test_at_an_epochs_beginning_it_is_not(self, tmp_path):
        fit(tiny(), Checkpoint(tmp_path), x=simple(), epochs=1)
        x = simple(seed=7, batch_size=4)
        assert fit(tiny(), Checkpoint(tmp_path), x=x, epochs=2).epoch == [0, 1]

    def test_only_batch_sizes_were_known_once(self, stopped, tmp_path):
        contents = store.load(f"{stopped}/ckpt-0-4")
        about = dict(contents.about, batch_size=BATCH)
        del about["data"]
        old = store.Contents(contents.values, about)
        store.save(str(tmp_path), Position(0, 4), old)
        with pytest.raises(ResumeError, match="batch size 8, but received 4"):
            fit(tiny(), Checkpoint(tmp_path), x=simple(batch_size=4))
        fit(tiny(), Checkpoint(tmp_path), x=simple(seed=7), epochs=1)

    def test_arrays_of_another_size(self, tmp_path):
        x, y = arrays()
        options = {"x": x, "y": y, "shuffle": False}
        fit(tiny(), Checkpoint(tmp_path), StopAtStep(4), batch_size=BATCH, **options)
        with pytest.raises(ResumeError, match="batch size 8, but received 32"):
            fit(tiny(), Checkpoint(tmp_path), **options)

    @pytest.mark.parametrize("length", [None, 2])
    def test_what_is_known_of_others(self, length):
        options = {"batch_size": None, "validation_split": 0.5, "validation_data": None}
        options |= {"steps_per_epoch": None, "shuffle": False}
        spec = tf.TensorSpec([length, 3] if length else None)
        found = tf.data.Dataset.from_generator(lambda: (), output_signature=spec)
        batches = {"batch size": length, "batches": None, "steps_per_epoch": None}
        assert data_position.order(options | {"x": found}) == batches
        scalars = tf.data.Dataset.range(3)
        unknown = {"batch size": None, "batches": 3, "steps_per_epoch": 3}
        assert data_position.order(options | {"x": scalars}) == unknown
        x = {"a": np.ones([70, 2])}
        halves = {"batch size": 32, "batches": 2, "steps_per_epoch": 2}
        halves["shuffled by seed"] = "none"
        assert data_position.order(options | {"x": x}) == halves
        keras.utils.set_random_seed(7)
        # Keras takes the batch size from the steps.
        steps = options | {"x": x, "steps_per_epoch": 5, "shuffle": True}
        halves |= {"batch size": 7, "batches": 5, "steps_per_epoch": 5}
        assert data_position.order(steps) == halves | {"shuffled by seed": 7}

    @pytest.mark.parametrize("known", [True, False])
    def test_of_too_few_batches(self, tmp_path, known):
        def first(batches):
            return plain().take(batches).filter(lambda *_: True)

        fit(tiny(), Checkpoint(tmp_path), StopAtStep(4), x=first(STEPS))
        steps = 3 if known else None
        with pytest.raises(ResumeError, match="data that end before batch 4 "):
            fit(tiny(), Checkpoint(tmp_path), x=first(3), steps_per_epoch=steps)


def test_in_the_middle_of_a_call_it_does_not_go_on(tmp_path):
    fit_traced(Checkpoint(tmp_path), StopAtStep(3))
    for steps, divisor in ((4, 1), (6, 3)):
        words = f"_execution={steps} .* after batch 3 .* such as {divisor}"
        with pytest.raises(ResumeError, match=words):
            fit(tiny(steps_per_execution=steps), Checkpoint(tmp_path))
    model = tiny(steps_per_execution=3)
    fit(model, Checkpoint(tmp_path), epochs=2)
    assert int(model.optimizer.iterations) == 2 * STEPS


def test_at_an_epochs_end_calls_may_have_any_size(tmp_path):
    stop = keras.callbacks.LambdaCallback()
    stop.on_test_begin = lambda logs: signal.raise_signal(signal.SIGTERM)
    check = plain()
    with pytest.raises(Stopped):
        fit(tiny(), Checkpoint(tmp_path), stop, validation_data=check)
    model = tiny(steps_per_execution=4)
    fit(model, Checkpoint(tmp_path), validation_data=check)
    assert int(model.optimizer.iterations) == 3 * STEPS


def test_what_callbacks_do_as_an_epoch_begins_is_done_once(tmp_path):
    def halves():
        return keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)

    whole = tiny()
    wanted = fit(whole, halves())
    for first in (True, False):
        folder, model = tmp_path / str(first), tiny()

        def callbacks(folder=folder, first=first, save_steps=1):
            both = [halves(), Checkpoint(folder, save_steps=save_steps)]
            return both if first else both[::-1]

        # After the last batch of an epoch, and in the middle of the next.
        for after in (STEPS, 1 + 2):
            with pytest.raises(ZeroDivisionError):
                fit(tiny(), *callbacks(), Breaks(after))
        found = fit(model, *callbacks(save_steps=None))
        assert_same(model, whole)
        assert found.history == wanted.history


def test_nothing_left_to_train_is_said(tmp_path, capsys):
    wanted = fit_traced(Checkpoint(tmp_path)).history
    model, checkpoint = tiny(), Checkpoint(tmp_path)
    for _ in range(2):
        capsys.readouterr()
        found = fit(model, checkpoint)
        assert (
            f"towers: Nothing left to train: {tmp_path} has 3 epochs already.\n"
            in capsys.readouterr().err
        )
        assert found.history == wanted and found.epoch == [0, 1, 2]
    assert fit(model, checkpoint, epochs=4).epoch == [0, 1, 2, 3]


def test_why_foreign_data_may_not_be_the_same_is_said(tmp_path, capsys):
    class Many(keras.utils.PyDataset):
        def __len__(self):
            return 1

    position, options = Position(1), {"steps_per_epoch": 1, "shuffle": True}
    options |= {"batch_size": BATCH, "validation_split": 0, "validation_data": None}

    def note(x, used=False, past=STEPS):
        return data_position.start(options | {"x": x}, position, [past], used).note

    keras.utils.set_random_seed(1)
    assert note(np.ones([4, 1])) is None
    tf.random.set_seed(None)
    assert "no seed was set; call keras.utils.set_rand" in note(np.ones([4, 1]))
    assert "only if the data set gives the same records again" in note(plain())
    assert note(plain(), used=True) is None
    # In the middle of a pass.
    again = note(plain(), used=True, past=1)
    assert "another order when it is opened again" in again
    batches = (np.ones([4, 1]) for _ in range(2))
    assert "only if the generator yields the same" in note(batches)
    assert "goes on where it is, without the batches read ahead" in note(batches, True)
    assert "only if the PyDataset gives the same" in note(Many())
    assert "the workers of a PyDataset read ahead" in note(Many(workers=2))
    for epochs, notes in ((1, 0), (2, 1)):
        fit(tiny(), Checkpoint(tmp_path), epochs=epochs)
        assert capsys.readouterr().err.count("the same records again") == notes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"keep_checkpoints": 1.5},
            "keep_checkpoints=1.5; expected an integer of at least 1",
        ),
        ({"keep_checkpoints": None}, "keep_checkpoints=None; expected an integer"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0; expected an integer"),
        ({"save_steps": "3"}, "save_steps='3'; expected an integer"),
        ({"save_minutes": -1}, "save_minutes=-1; expected a number of at least 0"),
        ({"save_minutes": "1"}, "save_minutes='1'; expected a number"),
        ({"directory": None}, "directory=None; expected a path"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=f"Received {words}"):
        Checkpoint(**{"directory": "never"} | options)


class TestASecondFit:
    """With the same callback, in the same process."""

    @pytest.fixture(scope="class")
    def whole(self):
        """A model that was never stopped, and its history; not to be changed."""
        model = build()
        return model, fit(model, x=simple(), validation_data=plain()).history

    def test_goes_on_where_the_first_was_stopped(self, whole, tmp_path):
        model, checkpoint = build(), Checkpoint(tmp_path / "same")
        options = {"x": simple(), "validation_data": plain()}
        # Validation takes the metrics' place, before they are saved.
        fit(model, checkpoint, StopAtStep(4), **options)
        assert checkpoint.position == Position(0, 4)
        model.evaluate(plain(), verbose=0)
        shutil.copytree(tmp_path / "same", tmp_path / "new")
        # In this process, and as in a new one.
        new = build(), Checkpoint(tmp_path / "new")
        for ours, saved in ((model, checkpoint), new):
            history = fit(ours, saved, **options)
            assert_same(ours, whole[0])
            assert history.history == whole[1] and history.epoch == [0, 1, 2]

    def test_goes_on_with_the_last_checkpoint_after_an_error(self, whole, tmp_path):
        model, checkpoint = build(), Checkpoint(tmp_path, save_steps=2)
        parallel = multi_gpu_model(model, gpus=2)
        options = {"x": simple(), "validation_data": plain(), "verbose": 0, "epochs": 3}
        with pytest.raises(ZeroDivisionError):
            parallel.fit(callbacks=[checkpoint, Breaks(9)], **options)
        history = parallel.fit(callbacks=[checkpoint], **options)
        assert_same(model, whole[0])
        assert history.history == whole[1]

    def test_starts_over_if_nothing_was_saved(self, tmp_path):
        folder = tmp_path / "run"
        model, checkpoint = tiny(), Checkpoint(folder)
        with pytest.raises(ZeroDivisionError):
            fit(model, checkpoint, Breaks(3))
        assert not folder.exists()
        assert fit(model, checkpoint).epoch == [0, 1, 2]

    def test_takes_the_model_as_it_is(self, tmp_path):
        model, checkpoint = tiny("adam"), Checkpoint(tmp_path)
        fit(model, checkpoint, epochs=1)
        model.compile("sgd", model.loss)
        assert fit(model, checkpoint, epochs=2).epoch == [0, 1]
        about = store.load_about(f"{tmp_path}/ckpt-2-0")
        assert about["variables"]["optimizer"][0][0].lower().startswith("sgd/")

    def test_of_another_model_restores_it(self, tmp_path):
        model, other, checkpoint = tiny(), tiny(seed=2), Checkpoint(tmp_path)
        fit(model, checkpoint)
        fit(other, checkpoint)
        assert_same(model, other)

    def test_an_epoch_that_is_asked_for_begins_at_its_beginning(self, tmp_path):
        heard = []
        hears = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: heard.append(batch)
        )
        checkpoint = Checkpoint(tmp_path)
        fit_traced(checkpoint, StopAtStep(4))
        fit(tiny(), checkpoint, hears, initial_epoch=1, epochs=2)
        assert heard == [0, 1, 2, 3, 4, 5]

    def test_that_was_refused_leaves_nothing_behind(self, tmp_path):
        model = tiny()
        fit(model, Checkpoint(tmp_path), StopAtStep(4), x=simple())
        parallel = multi_gpu_model(model, gpus=2)
        with pytest.raises(ValueError, match="batch size 8, but received 4"):
            options = {"callbacks": [Checkpoint(tmp_path)], "verbose": 0}
            parallel.fit(simple(batch_size=4), **options)
        parallel.fit(simple(), verbose=0)
        assert int(model.optimizer.iterations) == 4 + STEPS


def test_averages_come_in_the_place_of_weights_only_at_the_end(tmp_path):
    def make():
        return tiny(optimizer=keras.optimizers.Adam(use_ema=True))

    whole = make()
    fit(whole, epochs=2)
    # In the middle of an epoch, and between two.
    for step in (3, STEPS, None):
        model = make()
        stops = [] if step is None else [StopAtStep(step)]
        fit(model, Checkpoint(tmp_path), *stops, epochs=2)
    assert_same(model, whole)


class TestDataOfUnknownSize:
    def data(self):
        arrays = np.ones([EXAMPLES, 4, 4, 1], "float32"), np.zeros(EXAMPLES)
        x = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
        return x.filter(lambda *_: True)

    def test_an_epoch_that_was_stopped_goes_on(self, tmp_path):
        whole, model, checkpoint = tiny(), tiny(), Checkpoint(tmp_path)
        options = {"x": self.data(), "epochs": 2}
        fit(whole, **options)
        fit(model, checkpoint, StopAtStep(4), **options)
        assert checkpoint.position == Position(0, 4)
        fit(model, checkpoint, **options)
        assert checkpoint.position == Position(2)
        assert_same(model, whole)

    def test_saved_where_there_is_no_batch_left(self, tmp_path):
        # Keras begins the ninth step before it knows that there are six.
        options = {"x": self.data(), "epochs": 2}
        whole, model = tiny(steps_per_execution=4), tiny(steps_per_execution=4)
        history = fit(whole, **options).history

        def stop(epoch, logs):
            raise ZeroDivisionError

        stops = keras.callbacks.LambdaCallback(on_epoch_end=stop)
        with pytest.raises(ZeroDivisionError):
            fit(model, stops, Checkpoint(tmp_path, save_steps=1), **options)
        checkpoint = Checkpoint(tmp_path)
        found = fit(model, checkpoint, **options).history
        assert checkpoint.position == Position(2)
        assert_same(model, whole)
        assert found == history


@pytest.fixture
def no_generator():
    """TensorFlow's generator for all: there is none, before and after."""
    tf.random.set_global_generator(None)
    yield
    tf.random.set_global_generator(None)


def test_random_numbers_go_on(tmp_path, no_generator):
    def draw():
        drawn.append(
            [
                random.random(),
                float(np.random.uniform()),
                float(keras.random.uniform([])),
                float(tf.random.get_global_generator().uniform([])),
            ]
        )

    def start(seed):
        tf.random.set_global_generator(tf.random.Generator.from_seed(seed))
        # A seed alone does not renew Keras's own generator before Keras 3.13.
        keras.backend.clear_session()
        return tiny(seed=seed)

    drawn = []
    draws = [Breaks(2, draw), Breaks(4, draw), Breaks(5, draw)]
    fit(start(1), Checkpoint(tmp_path / "a"), *draws)
    wanted, drawn = drawn, []
    with pytest.raises(ZeroDivisionError):
        fit(
            *(start(1), Checkpoint(tmp_path / "b", save_steps=3)),
            *(Breaks(2, draw), Breaks(4, draw), Breaks(5)),
        )
    assert drawn == wanted[:2]
    del drawn[1:]
    # Also where there is none yet.
    model = start(9)
    tf.random.set_global_generator(None)
    fit(model, Checkpoint(tmp_path / "b"), Breaks(1, draw), Breaks(2, draw))
    assert drawn == wanted


def test_random_numbers_that_were_not_saved_are_left(no_generator):
    model = build()
    known = states.collect(model, [], 0, [])
    assert [*known["random"]] == ["python", "numpy"]
    wanted = random.random()
    keras.random.uniform([])
    states.give_back(model, [], known, [])
    assert random.random() == wanted
    # Where it was made by the way, it goes on.
    assert "keras" in states.collect(model, [], 0, [])["random"]


@pytest.fixture(scope="module")
def never_stopped():
    """A model after three epochs of the plain data; not to be changed."""
    model = tiny("adam")
    fit(model)
    return model


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_the_run(never_stopped, tmp_path, number, capsys):
    before = signal.getsignal(number)
    stop = Breaks(4, lambda: signal.raise_signal(number))
    with pytest.raises(Stopped) as stopped:
        fit(tiny("adam"), Checkpoint(tmp_path), stop)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    name = {2: "Ctrl-C", 15: "SIGTERM"}[number]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"towers: Stopped by {name}: the last checkpoint is {tmp_path}/ckpt-0-4; run "
        "again to continue."
    )
    model = tiny("adam")
    fit(model, Checkpoint(tmp_path))
    assert_same(model, never_stopped)


def test_a_signal_in_validation_loses_no_metric(tmp_path):
    stop = keras.callbacks.LambdaCallback()
    stop.on_test_batch_end = lambda batch, logs: signal.raise_signal(signal.SIGTERM)

    def make():
        return tiny(metrics=["accuracy"])

    whole, model = make(), make()
    check = plain()
    wanted = fit(whole, validation_data=check)
    with pytest.raises(Stopped):
        fit(make(), Checkpoint(tmp_path), stop, validation_data=check)
    assert [p.name for p in tmp_path.iterdir()] == [f"ckpt-0-{STEPS}"]
    found = fit(model, Checkpoint(tmp_path), validation_data=check)
    assert_same(model, whole)
    assert found.history == wanted.history


@pytest.mark.parametrize(
    "event", ["on_train_batch_end", "on_epoch_end", "on_train_end"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_signal_after_the_last_batch_is_heeded(tmp_path, event, first, capsys):
    stops = keras.callbacks.Callback()
    last = {"on_train_batch_end": STEPS - 1, "on_epoch_end": 0}.get(event)

    def stop(*args, **logs):
        if last is None or args[0] == last:
            signal.raise_signal(signal.SIGTERM)

    setattr(stops, event, stop)
    callbacks = [Checkpoint(tmp_path), stops]
    with pytest.raises(Stopped):
        fit_traced(*(callbacks[::-1] if first else callbacks), epochs=1)
    assert f"the last checkpoint is {tmp_path}/ckpt-1-0;" in capsys.readouterr().err


def test_sigusr1_saves_and_goes_on(tmp_path, capsys):
    save = Breaks(2, lambda: signal.raise_signal(signal.SIGUSR1))
    fit_traced(Checkpoint(tmp_path), save, epochs=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt-0-2", "ckpt-1-0"]
    said = f"SIGUSR1 received: the last checkpoint is {tmp_path}/ckpt-0-2.\n"
    assert said in capsys.readouterr().err


def test_in_another_thread_there_are_no_signals(tmp_path):
    thread = threading.Thread(target=fit, args=(tiny(), Checkpoint(tmp_path)))
    thread.start()
    thread.join()
    assert store.find(str(tmp_path))[0].endswith("ckpt-3-0")


def test_the_last_and_the_best_are_kept(tmp_path):
    losses = iter([3.0, 1.0, 4.0, 5.0, 6.0, 7.0])
    says = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(val_loss=next(losses))
    )
    checkpoint = Checkpoint(tmp_path, keep_checkpoints=2)
    fit_traced(says, checkpoint, epochs=6)
    assert checkpoint.latest == f"{tmp_path}/ckpt-6-0"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ckpt-2-0", "ckpt-5-0", "ckpt-6-0"]


def test_what_lies_further_on_does_not_count(tmp_path):
    fit_traced(Checkpoint(tmp_path), epochs=1)
    # Damaged, or of another program: they are passed over.
    (tmp_path / "ckpt-40-0").mkdir()
    (tmp_path / "ckpt-1-3").mkdir()
    fit_traced(Checkpoint(tmp_path, keep_checkpoints=2), epochs=2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ckpt-40-0", "ckpt-1-0", "ckpt-1-3", "ckpt-2-0"}
    checkpoint = Checkpoint(tmp_path, keep_checkpoints=1)
    assert checkpoint.restore(tiny()) and checkpoint.position == Position(2)
    fit_traced(checkpoint, epochs=3)
    assert Checkpoint(tmp_path).restore(tiny())
    assert (tmp_path / "ckpt-3-0").is_dir() and not (tmp_path / "ckpt-1-3").exists()


def test_saved_every_so_many_minutes(tmp_path):
    now = 0.0

    def later():
        nonlocal now
        now += 90.0

    checkpoint = Checkpoint(tmp_path, save_minutes=1, clock=lambda: now)
    fit_traced(checkpoint, Breaks(2, later), Breaks(5, later), epochs=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ckpt-0-2", "ckpt-0-5", "ckpt-1-0"]


def test_values_are_those_of_the_moment(tmp_path):
    """Also where the next step is computed before they are written."""
    parts = {}
    at = Breaks(3, lambda: parts.update(values=values(model)))
    model = tiny("adam")
    checkpoint = Checkpoint(tmp_path, save_steps=3)
    checkpoints = checkpoint.run.checkpoints
    write = checkpoints._write
    written = threading.Event()

    def late(*args):
        assert written.wait(60)
        write(*args)

    checkpoints._write = late
    with pytest.raises(ZeroDivisionError):
        # The save is over when three more steps are.
        fit(model, checkpoint, at, Breaks(6, written.set), Breaks(7))
    saved = store.load(f"{tmp_path}/ckpt-0-3").values
    found = (*saved["model"], *saved["optimizer"])
    for a, b in zip(found, parts["values"], strict=True):
        np.testing.assert_array_equal(a, b)


def relu(x):
    """One that stays finite: what is not a number is not above 0."""
    return keras.ops.where(x > 0, x, 0.0)


def steep(y, pred):
    """Squares; where y is 9, the loss is as finite, but its gradient is infinite."""
    zero = pred - tf.stop_gradient(pred)
    return tf.square(pred) + tf.sqrt(tf.where(y == 9, 0.0, 1.0) + zero)


class TestNotFinite:
    """A run of two epochs of four steps; something goes wrong in the second."""

    def model(self, optimizer="sgd"):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), keras.layers.Activation(relu)]
        model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
        model.compile(optimizer, steep)
        return model

    def data(self, fault=None):
        x, y = np.ones([8, 4, 3], "float32"), np.zeros([8, 4, 1], "float32")
        if fault == "pixel":
            x[5, 1, 2] = np.nan
        if fault == "gradient":
            y[7, 1] = 9  # of the last step: the next one's loss would tell
        return tf.data.Dataset.from_tensor_slices((x, y))

    @pytest.fixture(scope="class")
    def first(self):
        """The weights after an epoch in which nothing goes wrong."""
        model = self.model()
        fit(model, x=self.data(), steps_per_epoch=4, epochs=1)
        return model.get_weights()

    def best(self, folder):
        """Keeps the best model; to it, each epoch is the best."""
        scores = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(val_loss=-epoch)
        )
        path = folder / "best.weights.h5"
        options = dict.fromkeys(("save_best_only", "save_weights_only"), True)
        return scores, keras.callbacks.ModelCheckpoint(path, **options)

    def poison(self, model):
        kernel = model.layers[0].kernel
        kernel.assign(kernel.numpy() * np.nan)

    @pytest.mark.parametrize(
        ("fault", "end", "step", "newest"),
        [
            ("pixel", "epoch", 8, "ckpt-1-0"),
            ("gradient", "epoch", 8, "ckpt-1-0"),
            ("weights", "epoch", 8, "ckpt-1-0"),
            ("weights", "save", 6, "ckpt-1-1"),
            ("weights", "stopped", 6, "ckpt-1-0"),
            ("weights", "SIGTERM", 6, "ckpt-1-0"),
        ],
    )
    def test_is_never_saved_nor_the_best(
        self, first, tmp_path, fault, end, step, newest
    ):
        model, folder = self.model(), tmp_path / "run"
        checkpoint = Checkpoint(folder, save_steps=1 if end == "save" else None)
        scores, best = self.best(tmp_path)
        history = keras.callbacks.History()
        others = []
        if fault == "weights":
            others.append(Breaks(6, lambda: self.poison(model)))
        if end == "stopped":
            others.append(StopAtStep(6))
        if end == "SIGTERM":
            # What is saved on the way out would be the first since the fault.
            others.append(Breaks(6, lambda: signal.raise_signal(signal.SIGTERM)))
        words = f"kernel is not finite at step {step}; .* is {folder}/{newest}[.]"
        with pytest.raises(NotFinite, match=words):
            fit(
                *(model, *others, scores, history, checkpoint, best),
                **{"x": self.data(fault), "epochs": 2, "steps_per_epoch": 4},
            )
        # It does not tell.
        assert np.isfinite(history.history["loss"]).all()
        assert store.find(str(folder))[0] == f"{folder}/{newest}"
        kept = self.model()
        kept.load_weights(best.filepath)
        for a, b in zip(kept.get_weights(), first, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_is_not_saved_at_the_end_of_a_run(self, tmp_path):
        model = self.model()
        late = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: self.poison(model)
        )
        with pytest.raises(NotFinite):
            fit(model, Checkpoint(tmp_path), late, x=self.data(), epochs=1)
        assert not store.find(str(tmp_path))

    def test_before_anything_was_saved(self, tmp_path):
        model = self.model()
        late = Breaks(2, lambda: self.poison(model))
        with pytest.raises(NotFinite, match=r"at step 8; nothing was saved yet[.]"):
            fit(model, Checkpoint(tmp_path), late, x=self.data(), epochs=1)

    def test_steps_that_a_loss_scale_leaves_out_are_finite(self, tmp_path):
        sgd = keras.optimizers.SGD()
        scaled = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=2.0**120)
        model = self.model(scaled)
        fit(
            model,
            Checkpoint(tmp_path, keep_checkpoints=9),
            x=self.data("gradient"),
            epochs=2,
        )
        # The scale was halved at each of them.
        assert float(scaled.dynamic_scale) < 2.0**120
        assert len(store.find(str(tmp_path))) == 2

    def test_a_loss_is_never_the_best(self, tmp_path):
        losses = iter([2.0, np.nan, 3.0, np.nan])
        says = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(val_loss=next(losses))
        )
        fit_traced(says, Checkpoint(tmp_path, keep_checkpoints=1), epochs=4)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["ckpt-1-0", "ckpt-4-0"]

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex128"])
    def test_of_any_type(self, dtype):
        # Double precision's largest numbers are infinite in single precision.
        values = np.array([1.0, 1e300 if dtype == "float64" else 1e4])
        assert store.is_finite(tf.cast(values, dtype))
        assert not store.is_finite(tf.cast(values / 0, dtype))


class TestDisk:
    @pytest.mark.parametrize("reaction", ["stop", "continue"])
    def test_a_save_that_fails_leaves_the_others(self, tmp_path, reaction, capsys):
        folder = tmp_path / "run"

        def vanish():
            checkpoint.run.checkpoints.wait()
            shutil.rmtree(folder)
            folder.write_text("in the way")

        checkpoint = Checkpoint(folder, save_steps=1, on_save_error=reaction)
        if reaction == "stop":
            with pytest.raises(
                SaveError, match=f"Cannot save a checkpoint in {folder}"
            ):
                fit_traced(checkpoint, Breaks(3, vanish))
        else:
            fit_traced(checkpoint, Breaks(3, vanish))
            assert "Warning: Cannot save a checkpoint" in capsys.readouterr().err

    def test_the_last_save_is_heard_of(self, tmp_path):
        folder = tmp_path / "run"
        checkpoint = Checkpoint(folder)
        in_the_way = Breaks(STEPS, lambda: folder.write_text(""))
        with pytest.raises(SaveError, match=r"nothing was saved yet[.]"):
            fit_traced(checkpoint, in_the_way, epochs=1)

    def test_a_directory_that_is_gone_is_not_made_anew(self, tmp_path):
        checkpoint = Checkpoint(tmp_path / "run", save_steps=1)

        def vanish():
            checkpoint.run.checkpoints.wait()
            shutil.rmtree(tmp_path / "run")

        words = "the directory is gone; the last one is .*/run/ckpt-0-2[.]"
        with pytest.raises(SaveError, match=words):
            fit_traced(checkpoint, Breaks(3, vanish))
        assert not (tmp_path / "run").exists()

    def test_a_limit_on_files_leaves_the_one_before(self, tmp_path):
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        checkpoint = Checkpoint(tmp_path, save_steps=2)

        def limit():
            checkpoint.run.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

        try:
            with pytest.raises(SaveError):
                fit(build(), checkpoint, Breaks(3, limit))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt-0-2"]
        assert Checkpoint(tmp_path).restore(build())


class TestDamage:
    def make(self, optimizer="adam", units=4):
        return tiny(optimizer, units=units, metrics=["accuracy"])

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory):
        """Two checkpoints; not to be changed."""
        folder = tmp_path_factory.mktemp("saved")
        fit(self.make(), Checkpoint(folder), epochs=2)
        return folder

    def test_no_damage_passes(self, saved, tmp_path):
        """Bytes that are flipped, and files that end too early, in any place."""
        rng = np.random.default_rng(0)
        good = store.load(f"{saved}/ckpt-2-0")
        for path in sorted(saved.glob("ckpt-2-0/*")):
            content = path.read_bytes()
            for damage in range(40):
                place = int(rng.integers(len(content)))
                bad = bytearray(content)
                if damage % 4:
                    bad[place] ^= int(rng.integers(1, 256))
                else:
                    del bad[place:]
                copy = tmp_path / "ckpt-2-0"
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(saved / "ckpt-2-0", copy)
                (copy / path.name).write_bytes(bad)
                try:
                    found = store.load(str(copy))
                except store.DamagedError as error:
                    assert "\n" not in str(error)
                    continue
                # Where nothing is read from.
                assert found.about == good.about
                for part, wanted in good.values.items():
                    for a, b in zip(found.values[part], wanted, strict=True):
                        np.testing.assert_array_equal(a, b)

    def test_the_one_before_is_taken(self, saved, tmp_path, capsys):
        shutil.copytree(saved, tmp_path / "run")
        (tmp_path / "run/ckpt-2-0/variables.index").write_bytes(b"")
        checkpoint = Checkpoint(tmp_path / "run")
        assert checkpoint.restore(self.make())
        assert checkpoint.position == Position(1)
        said = capsys.readouterr().err
        assert said.startswith(
            f"towers: Warning: Cannot read the checkpoint {tmp_path}"
        )
        assert said.endswith(f"is lost: going back to {tmp_path}/run/ckpt-1-0.\n")

    def test_it_is_written_anew(self, saved, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(saved, run)
        (run / "ckpt-2-0/variables.index").write_bytes(b"")
        fit(self.make(), Checkpoint(run), epochs=2)
        assert store.load(f"{run}/ckpt-2-0").about["step"] == 2 * STEPS
        assert sorted(p.name for p in (run / "ckpt-2-0").iterdir()) == [
            "variables.data-00000-of-00001",
            "variables.index",
        ]

    def test_links_and_lists_lead_nowhere(self, saved, tmp_path):
        run, other = tmp_path / "run", tmp_path / "other"
        shutil.copytree(saved, run)
        shutil.copytree(saved / "ckpt-2-0", other)
        os.symlink(other, run / "ckpt-9-0")
        (run / "checkpoint").write_text(f'model_checkpoint_path: "{other}"\n')
        checkpoint = Checkpoint(run, keep_checkpoints=1)
        fit(self.make(), checkpoint, epochs=3)
        assert checkpoint.latest == f"{run}/ckpt-3-0"
        assert sorted(p.name for p in other.iterdir()) == sorted(
            p.name for p in (saved / "ckpt-2-0").iterdir()
        )

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"units": 5}, ["another model", "[16, 4]", "[16, 5]"]),
            ({"optimizer": "sgd"}, ["another optimizer", "adam", "sgd"]),
            (
                {"optimizer": keras.optimizers.Adam(amsgrad=True)},
                ["another optimizer", "variables"],
            ),
        ],
    )
    def test_that_of_another_is_refused(self, saved, options, words):
        other = self.make(**options)
        before = values(other)
        with pytest.raises(ValueError) as caught:
            Checkpoint(saved).restore(other)
        # Keras 3.10 writes "SGD", later ones "sgd".
        for word in [*words, "choose another directory", str(saved)]:
            assert word.lower() in str(caught.value).lower()
        for a, b in zip(values(other), before, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_that_of_another_program_is_refused(self, tmp_path):
        os.mkdir(tmp_path / "ckpt-1-0")
        theirs = tf.train.Checkpoint(about=tf.Variable("{}"))
        theirs.write(str(tmp_path / "ckpt-1-0/variables"))
        with pytest.raises(ValueError, match="Cannot read the checkpoint"):
            Checkpoint(tmp_path).restore(self.make())

    def test_names_of_layers_do_not_matter(self, saved):
        other = keras.models.clone_model(self.make())
        other.compile("adam", "mse", metrics=["accuracy"])
        other.optimizer.build(other.trainable_variables)
        assert other.variables[0].path != self.make().variables[0].path
        assert Checkpoint(saved).restore(other)

    def test_without_any(self, tmp_path):
        model = self.make()
        before = values(model)
        checkpoint = Checkpoint(tmp_path / "none")
        assert checkpoint.restore(model) is False and checkpoint.latest is None
        check_checkpoint(str(tmp_path / "none"), model)
        for a, b in zip(values(model), before, strict=True):
            np.testing.assert_array_equal(a, b)
        assert not (tmp_path / "none").exists()


def test_a_model_that_is_not_ready_is_refused(tmp_path):
    fit_traced(Checkpoint(tmp_path), epochs=1)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="You must call `compile"):
        fit(model, Checkpoint(tmp_path))
    model.compile("adam", "mse")
    with pytest.raises(ValueError, match=r"a model without variables for .*Input"):
        fit(model, Checkpoint(tmp_path))


def test_a_fit_that_restores_nothing_is_refused(tmp_path):
    words = "Received a Checkpoint that this `fit` does not restore; expected one only"
    options = {"x": plain(), "verbose": 0}
    with pytest.raises(ValueError, match=words):
        tiny().fit(callbacks=[Checkpoint(tmp_path)], **options)
    with pytest.raises(ValueError, match=words):
        fit(tiny(), Checkpoint(tmp_path), Checkpoint(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_what_a_checkpoint_says_is_json(tmp_path):
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    fit(tiny("adam"), stopping, Checkpoint(tmp_path), epochs=1)
    about = store.load_about(f"{tmp_path}/ckpt-1-0")
    assert json.loads(json.dumps(about)) == about
    again = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    fit(tiny("adam"), again, Checkpoint(tmp_path), epochs=2)
    assert again.best <= stopping.best
    assert len(again.best_weights) == len(stopping.best_weights)


class Knows(keras.callbacks.Callback):
    """A callback of the user's, with a state."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_what_callbacks_know_comes_back_as_it_was(tmp_path):
    state = {
        "array": 1,
        "dict": {"tuple": (1, [2.5, None]), "dict": []},
        3: "x",
        (4, True): {},
        "number": np.float32(0.5),
    }
    knew = Knows(state | {"values": np.arange(3)})
    fit_traced(knew, Checkpoint(tmp_path), epochs=1)
    knows = Knows(None)
    fit(tiny(), knows, Checkpoint(tmp_path), epochs=2)
    np.testing.assert_array_equal(knows.state.pop("values"), np.arange(3))
    assert knows.state == state


def test_what_callbacks_knew_in_older_checkpoints():
    saved = {"wait": 1, "weights": [{"array": 0}], "more": {}}
    found = states._from_json(saved, [np.ones(2)])
    assert found["wait"] == 1 and found["more"] == {}
    np.testing.assert_array_equal(found["weights"][0], np.ones(2))


@pytest.mark.parametrize("value", [{1}, b"x", np.array([object()])])
def test_what_a_callback_knows_and_cannot_be_saved_is_named(tmp_path, value):
    words = r"Cannot save the state_dict\(\) of the callback Knows: "
    with pytest.raises(ValueError, match=words):
        fit_traced(Knows({"a": [value]}), Checkpoint(tmp_path), epochs=1)


def test_logs_that_are_no_numbers_end_nothing(tmp_path):
    logs = {"text": "a", "nothing": None, "array": np.arange(2), "val_loss": "low"}
    says = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, found: found.update(logs)
    )
    fit_traced(says, Checkpoint(tmp_path), epochs=1)
    model = tiny()
    history = fit(model, Checkpoint(tmp_path), epochs=2).history
    assert history["text"] == ["a"] and history["nothing"] == [None]
    assert len(history["loss"]) == 2 and "array" not in history


_TWICE = """
import signal, sys
from towers.lifecycle.signals import Signals

with Signals():
    signal.raise_signal(signal.SIGINT)
    print("noted", flush=True)
    sys.stdin.read()
"""


def test_a_second_signal_ends_it_at_once():
    command = [sys.executable, "-c", _TWICE]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "noted\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert (
            "Left at once; the checkpoints are as they were." in process.stderr.read()
        )

"""Runs that are broken off and continued: as if nothing had happened."""

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

from tests.limits import HANG_S
from tests.small import build, tiny
from tests.towers.lifecycle.runs import (
    BATCH,
    EXAMPLES,
    STEPS,
    Breaks,
    arrays,
    as_new,
    assert_same,
    data,
    fit,
    fit_traced,
    measured,
    plain,
    towers,
    values,
)
from tests.variants import slow
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import states, store
from towers.lifecycle.checkpoints.store import Position
from towers.lifecycle.continuing import data_position
from towers.lifecycle.continuing.resume import ResumeError
from towers.processes.signals import Stopped
from towers.train.callbacks import StopAtStep

pytestmark = [pytest.mark.quick_one_in(2), pytest.mark.oldest]


def broken_off(directory, breaks, make, **options):
    """A run that is broken off after so many batches each time.

    Returns:
        The values of its model, its history, and a callback of its last process.
    """
    for after in [*breaks, None]:
        model = make()
        callbacks = [
            keras.callbacks.EarlyStopping("loss", patience=9),
            Checkpoint(directory, save_steps=2),
        ]
        if after is None:
            history = fit(model, *callbacks, **options)
            return values(model), history, callbacks[0]
        with pytest.raises(ZeroDivisionError):
            fit(model, *callbacks, Breaks(after), **options)


@pytest.mark.parametrize(
    ("make", "repeat", "breaks"),
    [
        # In the middle of an epoch, and in that of the next epoch.
        (lambda: as_new(make=build), False, (3, 8)),
        # Also at once.
        slow(build, False, (3, 1, 8)),
        # And between two epochs, which are no passes over the data.
        slow(lambda: as_new(make=build), True, (5, 4)),
        slow(lambda: as_new("adam", steps_per_execution=2), False, (5,)),
    ],
    ids=["epochs", "new models", "repeat and validation", "steps_per_execution"],
)
def test_a_run_broken_off_ends_as_one_that_was_not(tmp_path, make, repeat, breaks):
    options = {"x": data(repeat=repeat)}
    if repeat:
        options["steps_per_epoch"] = STEPS - 2
        options["validation_data"] = plain()
    whole, history, stopping = broken_off(tmp_path / "a", (), make, **options)
    ended, continued, continued_stopping = broken_off(
        tmp_path / "b", breaks, make, **options
    )
    for a, b in zip(ended, whole, strict=True):
        np.testing.assert_array_equal(a, b)
    assert continued.history == history.history
    assert continued.epoch == history.epoch == [0, 1, 2]
    assert continued_stopping.wait == stopping.wait
    assert continued_stopping.best == stopping.best


@pytest.mark.slow
def test_with_other_numbers_of_towers_the_rest_is_the_same(tmp_path):
    # Without dropout and BatchNorm, which are the towers' own.
    def make():
        return tiny(keras.optimizers.SGD(1e-3, 0.9))

    model = as_new(make=make)
    fit(model, gpus=1)
    whole = values(model)
    for gpus, after in ((1, 4), (3, 5), (2, None)):
        model = as_new(make=make)
        breaks = [] if after is None else [Breaks(after)]
        try:
            fit(model, Checkpoint(tmp_path, save_steps=1), *breaks, gpus=gpus)
        except ZeroDivisionError:
            continue
    for a, b in zip(values(model), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_callbacks_hear_only_of_what_is_done_now(tmp_path):
    heard = []
    hears = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: heard.append(batch),
        on_train_batch_end=lambda batch, logs: heard.append(-batch),
    )
    with pytest.raises(ZeroDivisionError):
        fit_traced(Checkpoint(tmp_path, save_steps=1), Breaks(5))
    fit(as_new(), Checkpoint(tmp_path), hears, epochs=2)
    # The fifth was trained on, but not saved.
    assert heard == [4, -4, 5, -5, 0, 0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5]


@pytest.mark.slow
def test_other_data_are_read_again_and_passed_over(never_stopped, tmp_path, capsys):
    with pytest.raises(ZeroDivisionError):
        fit(as_new("adam"), Checkpoint(tmp_path, save_steps=2), Breaks(9))
    model = as_new("adam")
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
        fit(as_new(), Checkpoint(folder), StopAtStep(4), x=simple())
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
            fit(as_new(), Checkpoint(stopped), x=simple(**options))

    def test_of_others_is_refused(self, stopped):
        with pytest.raises(ResumeError, match=r"dataset .*, but received unknown"):
            fit(as_new(), Checkpoint(stopped))

    @pytest.mark.slow
    def test_at_an_epochs_beginning_it_is_not(self, tmp_path):
        fit(as_new(), Checkpoint(tmp_path), x=simple(), epochs=1)
        x = simple(seed=7, batch_size=4)
        assert fit(as_new(), Checkpoint(tmp_path), x=x, epochs=2).epoch == [0, 1]

    @pytest.mark.slow
    def test_only_batch_sizes_were_known_once(self, stopped, tmp_path):
        contents = store.load(f"{stopped}/ckpt-0-4")
        about = dict(contents.about, batch_size=BATCH)
        del about["data"]
        old = store.Contents(contents.values, about)
        store.save(str(tmp_path), Position(0, 4), old)
        with pytest.raises(ResumeError, match="batch size 8, but received 4"):
            fit(as_new(), Checkpoint(tmp_path), x=simple(batch_size=4))
        fit(as_new(), Checkpoint(tmp_path), x=simple(seed=7), epochs=1)

    def test_arrays_of_another_size(self, tmp_path):
        x, y = arrays()
        options = {"x": x, "y": y, "shuffle": False}
        fit(as_new(), Checkpoint(tmp_path), StopAtStep(4), batch_size=BATCH, **options)
        with pytest.raises(ResumeError, match="batch size 8, but received 32"):
            fit(as_new(), Checkpoint(tmp_path), **options)

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

    @pytest.mark.quick_one_in(1)
    @pytest.mark.parametrize("known", [True, False])
    def test_of_too_few_batches(self, tmp_path, known):
        def first(batches):
            return plain().take(batches).filter(lambda *_: True)

        fit(as_new(), Checkpoint(tmp_path), StopAtStep(4), x=first(STEPS))
        steps = 3 if known else None
        with pytest.raises(ResumeError, match="data that end before batch 4 "):
            fit(as_new(), Checkpoint(tmp_path), x=first(3), steps_per_epoch=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "make_data"),
    [
        (4, data),
        (3, data),
        (STEPS + 1, plain),
        *((steps, data) for steps in (2, STEPS, STEPS + 1)),
        *((steps, plain) for steps in (2, 3, 4, STEPS)),
    ],
)
def test_a_call_may_go_on_in_its_middle(tmp_path, steps, make_data):
    def make():
        return as_new(keras.optimizers.SGD(1e-3, 0.9))

    whole = make()
    history = fit(whole, x=make_data()).history
    ended = []
    ends = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ended.append(iterations())
    )
    fit(make(), Checkpoint(tmp_path), StopAtStep(STEPS + 3), x=make_data())
    model = as_new(keras.optimizers.SGD(1e-3, 0.9), steps_per_execution=steps)
    iterations = lambda: int(model.optimizer.iterations)  # noqa: E731
    continued = fit(model, Checkpoint(tmp_path), ends, x=make_data()).history
    assert_same(model, values(whole))
    assert continued == history
    calls = [min(first + steps, STEPS) for first in range(0, STEPS, steps)]
    expected = [epoch * STEPS + call for epoch in (1, 2) for call in calls]
    assert ended == [each for each in expected if each > STEPS + 3]


@pytest.mark.slow
def test_at_an_epochs_end_calls_may_have_any_size(tmp_path):
    stop = keras.callbacks.LambdaCallback()
    stop.on_test_begin = lambda logs: signal.raise_signal(signal.SIGTERM)
    check = plain()
    with pytest.raises(Stopped):
        fit(as_new(), Checkpoint(tmp_path), stop, validation_data=check)
    model = as_new(steps_per_execution=4)
    fit(model, Checkpoint(tmp_path), validation_data=check)
    assert int(model.optimizer.iterations) == 3 * STEPS


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_what_callbacks_do_as_an_epoch_begins_is_done_once(tmp_path, first):
    def halves():
        return keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2)

    model = as_new()
    wanted, whole = fit(model, halves()), values(model)

    def callbacks(save_steps=1):
        both = [halves(), Checkpoint(tmp_path, save_steps=save_steps)]
        return both if first else both[::-1]

    # After the last batch of an epoch, and in the middle of the next.
    for after in (STEPS, 1 + 2):
        with pytest.raises(ZeroDivisionError):
            fit(as_new(), *callbacks(), Breaks(after))
    model = as_new()
    found = fit(model, *callbacks(save_steps=None))
    assert_same(model, whole)
    assert found.history == wanted.history


def test_nothing_left_to_train_is_said(tmp_path, capsys):
    wanted = fit_traced(Checkpoint(tmp_path)).history
    model, checkpoint = as_new(), Checkpoint(tmp_path)
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
        fit(as_new(), Checkpoint(tmp_path), epochs=epochs)
        assert capsys.readouterr().err.count("the same records again") == notes


class TestASecondFit:
    """With the same callback, in the same process."""

    @pytest.fixture(scope="class")
    def whole(self):
        """The values of a model that was never stopped, and its history."""
        model = as_new(make=measured)
        history = fit(model, x=simple(), validation_data=plain()).history
        return values(model), history

    @pytest.mark.slow
    def test_goes_on_where_the_first_was_stopped(self, whole, tmp_path):
        model, checkpoint = as_new(make=measured), Checkpoint(tmp_path / "same")
        options = {"x": simple(), "validation_data": plain()}
        # Validation takes the metrics' place, before they are saved.
        fit(model, checkpoint, StopAtStep(4), **options)
        assert checkpoint.position == Position(0, 4)
        model.evaluate(plain(), verbose=0)
        shutil.copytree(tmp_path / "same", tmp_path / "new")
        # In this process, and as in a new one.
        for saved in (checkpoint, Checkpoint(tmp_path / "new")):
            history = fit(model, saved, **options)
            assert_same(model, whole[0])
            assert history.history == whole[1] and history.epoch == [0, 1, 2]
            model = as_new(make=measured)

    @pytest.mark.slow
    def test_goes_on_with_the_last_checkpoint_after_an_error(self, whole, tmp_path):
        checkpoint = Checkpoint(tmp_path, save_steps=2)
        model = as_new(make=measured)
        parallel = towers(model, gpus=2)
        options = {"x": simple(), "validation_data": plain(), "verbose": 0, "epochs": 3}
        with pytest.raises(ZeroDivisionError):
            parallel.fit(callbacks=[checkpoint, Breaks(9)], **options)
        history = parallel.fit(callbacks=[checkpoint], **options)
        assert_same(model, whole[0])
        assert history.history == whole[1]

    def test_starts_over_if_nothing_was_saved(self, tmp_path):
        folder = tmp_path / "run"
        model, checkpoint = as_new(), Checkpoint(folder)
        with pytest.raises(ZeroDivisionError):
            fit(model, checkpoint, Breaks(3))
        assert not folder.exists()
        assert fit(model, checkpoint).epoch == [0, 1, 2]

    @pytest.mark.slow
    def test_takes_the_model_as_it_is(self, tmp_path):
        model, checkpoint = tiny("adam"), Checkpoint(tmp_path)
        fit(model, checkpoint, epochs=1)
        model.compile("sgd", model.loss)
        assert fit(model, checkpoint, epochs=2).epoch == [0, 1]
        about = store.load_about(f"{tmp_path}/ckpt-2-0")
        assert about["variables"]["optimizer"][0][0].lower().startswith("sgd/")

    def test_of_another_model_restores_it(self, tmp_path):
        model, other, checkpoint = as_new(), tiny(seed=2), Checkpoint(tmp_path)
        fit(model, checkpoint)
        fit(other, checkpoint)
        assert_same(other, values(model))

    def test_an_epoch_that_is_asked_for_begins_at_its_beginning(self, tmp_path):
        heard = []
        hears = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: heard.append(batch)
        )
        checkpoint = Checkpoint(tmp_path)
        fit_traced(checkpoint, StopAtStep(4))
        fit(as_new(), checkpoint, hears, initial_epoch=1, epochs=2)
        assert heard == [0, 1, 2, 3, 4, 5]

    @pytest.mark.slow
    def test_that_was_refused_leaves_nothing_behind(self, tmp_path):
        model = as_new()
        fit(model, Checkpoint(tmp_path), StopAtStep(4), x=simple())
        parallel = towers(model, gpus=2)
        with pytest.raises(ValueError, match="batch size 8, but received 4"):
            options = {"callbacks": [Checkpoint(tmp_path)], "verbose": 0}
            parallel.fit(simple(batch_size=4), **options)
        parallel.fit(simple(), verbose=0)
        assert int(model.optimizer.iterations) == 4 + STEPS


@pytest.mark.slow
def test_averages_come_in_the_place_of_weights_only_at_the_end(tmp_path):
    def make():
        return tiny(optimizer=keras.optimizers.Adam(use_ema=True))

    model = as_new(make=make)
    fit(model, epochs=2)
    whole = values(model)
    # In the middle of an epoch, and between two.
    for step in (3, STEPS, None):
        model = as_new(make=make)
        stops = [] if step is None else [StopAtStep(step)]
        fit(model, Checkpoint(tmp_path), *stops, epochs=2)
    assert_same(model, whole)


def averaging():
    return tiny(optimizer=keras.optimizers.Adam(use_ema=True, ema_momentum=0.5))


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_averages_that_callbacks_show_are_not_trained_on(tmp_path, first):
    """They are in the place of weights from an epoch's end to the next one's begin."""

    def train(*more, **options):
        model = as_new(make=averaging)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        fit(model, *([*more, swap] if first else [swap, *more]), **options)
        return model

    whole = values(train(epochs=3))
    # The first to begin the third epoch saves; then the process ends.
    breaks = Breaks(2 * STEPS + 1)
    with pytest.raises(ZeroDivisionError):
        train(Checkpoint(tmp_path / "a"), breaks, epochs=3)
    assert_same(train(Checkpoint(tmp_path / "a"), epochs=3), whole)
    train(Checkpoint(tmp_path / "b"), epochs=2)
    longer = values(train(Checkpoint(tmp_path / "b"), epochs=3))
    for ours, theirs in zip(longer, whole, strict=True):
        # Keras swaps by additions, which round; the last epoch's weights were not.
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_averages_are_not_saved_for_weights_in_a_validation(tmp_path):
    stop, stopped = keras.callbacks.LambdaCallback(), []
    # A second signal would end the process.
    stop.on_test_begin = lambda logs: (
        stopped or stopped.append(signal.raise_signal(signal.SIGTERM))
    )

    def train(*more):
        model = as_new(make=averaging)
        swap = keras.callbacks.SwapEMAWeights()
        history = fit(model, *more, swap, validation_data=plain(), epochs=2)
        return model, history.history

    model, history = train()
    whole = values(model)
    with pytest.raises(Stopped):
        train(Checkpoint(tmp_path), stop)
    model, found = train(Checkpoint(tmp_path))
    assert_same(model, whole)
    assert found == history


class TestDataOfUnknownSize:
    def data(self):
        arrays = np.ones([EXAMPLES, 4, 4, 1], "float32"), np.zeros(EXAMPLES)
        x = tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH)
        return x.filter(lambda *_: True)

    @pytest.mark.slow
    def test_an_epoch_that_was_stopped_goes_on(self, tmp_path):
        model, checkpoint = as_new(), Checkpoint(tmp_path)
        options = {"x": self.data(), "epochs": 2}
        fit(model, **options)
        whole, model = values(model), as_new()
        fit(model, checkpoint, StopAtStep(4), **options)
        assert checkpoint.position == Position(0, 4)
        fit(model, checkpoint, **options)
        assert checkpoint.position == Position(2)
        assert_same(model, whole)

    @pytest.mark.slow
    def test_saved_where_there_is_no_batch_left(self, tmp_path):
        # Keras begins the ninth step before it knows that there are six.
        options = {"x": self.data(), "epochs": 2}
        model = as_new(steps_per_execution=4)
        history, whole = fit(model, **options).history, values(model)
        model = as_new(steps_per_execution=4)

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
        model = as_new()
        keras.utils.set_random_seed(seed)
        return model

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
    """The values of a model after three epochs of the plain data."""
    model = as_new("adam")
    fit(model)
    return values(model)


@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT)])
def test_a_signal_saves_and_ends_the_run(never_stopped, tmp_path, number, capsys):
    before = signal.getsignal(number)
    stop = Breaks(4, lambda: signal.raise_signal(number))
    with pytest.raises(Stopped) as stopped:
        fit(as_new("adam"), Checkpoint(tmp_path), stop)
    assert stopped.value.code == 128 + number
    assert signal.getsignal(number) is before
    name = {2: "Ctrl-C", 15: "SIGTERM"}[number]
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"towers: Stopped by {name}: the last checkpoint is {tmp_path}/ckpt-0-4; run "
        "again to continue."
    )
    model = as_new("adam")
    fit(model, Checkpoint(tmp_path))
    assert_same(model, never_stopped)


@pytest.mark.slow
def test_a_signal_in_validation_loses_no_metric(tmp_path):
    stop = keras.callbacks.LambdaCallback()
    stop.on_test_batch_end = lambda batch, logs: signal.raise_signal(signal.SIGTERM)

    model, check = as_new(make=measured), plain()
    wanted = fit(model, validation_data=check)
    whole = values(model)
    with pytest.raises(Stopped):
        fit(as_new(make=measured), Checkpoint(tmp_path), stop, validation_data=check)
    assert [p.name for p in tmp_path.iterdir()] == [f"ckpt-0-{STEPS}"]
    model = as_new(make=measured)
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
    thread = threading.Thread(target=fit, args=(as_new(), Checkpoint(tmp_path)))
    thread.start()
    thread.join()
    assert store.find(str(tmp_path))[0].endswith("ckpt-3-0")


_TWICE = """
import signal, sys
from towers.processes.signals import Signals

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
        assert process.wait(HANG_S) == 130
        assert (
            "Left at once; the checkpoints are as they were." in process.stderr.read()
        )

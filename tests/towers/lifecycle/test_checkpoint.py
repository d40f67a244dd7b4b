"""What is saved, when, and what is done where that fails."""

import json
import os
import shutil
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from tests.small import build, tiny
from tests.towers.lifecycle.runs import (
    STEPS,
    Breaks,
    as_new,
    fit,
    fit_traced,
    plain,
    values,
)
from towers.keras_adapter.randomness import random_states
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import saved_model, states, store
from towers.lifecycle.checkpoints.manager import SaveError
from towers.lifecycle.checkpoints.saved_model import check_checkpoint
from towers.lifecycle.checkpoints.store import Position
from towers.machine import limits
from towers.numerics.errors import NotFinite
from towers.train.callbacks import StopAtStep

pytestmark = pytest.mark.oldest


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
        ({"background": 1}, "background=1; expected True, False or None"),
        ({"directory": None}, "directory=None; expected a path"),
        ({"on_save_error": "go on"}, "on_save_error='go on'; expected 'stop' or"),
    ],
)
def test_arguments_are_checked(options, words):
    with pytest.raises(ValueError, match=f"Received {words}"):
        Checkpoint(**{"directory": "never"} | options)


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


@pytest.mark.slow
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
    model = as_new("adam")
    checkpoint = Checkpoint(tmp_path, save_steps=3)
    checkpoints = checkpoint.run.checkpoints
    write = checkpoints._write
    written = threading.Event()

    def late(*args):
        assert written.wait(HANG_S)
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

    def model(self):
        return as_new(make=self.make)

    @staticmethod
    def make(optimizer="sgd"):
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

    @pytest.mark.quick_one_in(3)
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
        model = self.make(scaled)
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


class TestMemory:
    @pytest.mark.parametrize("free", [0, 2**40])
    def test_training_waits_where_a_copy_has_no_room(
        self, tmp_path, monkeypatch, capsys, free
    ):
        monkeypatch.setattr(limits, "free_memory", lambda: float(free))
        copied, take = [], saved_model.values
        monkeypatch.setattr(
            saved_model, "values", lambda model: copied.append(1) or take(model)
        )
        model = as_new("adam")
        checkpoint = Checkpoint(tmp_path, save_steps=2)
        fit(model, checkpoint, epochs=1)
        assert len(copied) == (3 if free else 0)
        said = capsys.readouterr().err
        assert said.count("Training waits while checkpoints are written") == (not free)
        saved = store.load(checkpoint.latest).values
        for a, b in zip(
            [*saved["model"], *saved["optimizer"]], values(model), strict=True
        ):
            np.testing.assert_array_equal(a, b)

    def test_what_is_known_of_a_run_holds_no_variables(self, tmp_path):
        model = as_new("adam")
        fit(model, Checkpoint(tmp_path), epochs=1)
        again = Checkpoint(tmp_path)
        again.restore(model)
        assert [*again.run.known.values] == ["callbacks"]

    def test_hosts_read_what_they_divide_once_and_in_order(self, monkeypatch):
        """Also where the first one could not write all of it."""
        model = as_new("adam")
        read, together = [], []
        divided = {id(v) for v in model.optimizer.variables[1:]}
        monkeypatch.setattr(saved_model, "is_divided", lambda v: id(v) in divided)
        monkeypatch.setattr(saved_model, "_read", read.append)
        values_of = saved_model.ValuesOnDemand(model)
        written = iter(values_of.by_part["optimizer"])
        for _ in range(3):
            next(written)
        values_of.read_rest_together()
        for variable in model.optimizer.variables[1:]:
            monkeypatch.setattr(
                variable, "numpy", lambda v=variable: together.append(v)
            )
        saved_model.read_together(model)
        found = [id(v) for v in read if id(v) in divided]
        assert found == [id(v) for v in together] and len(found) > 3

    def test_one_that_fails_ends_the_run_at_once(self, tmp_path):
        folder = tmp_path / "run"
        checkpoint = Checkpoint(folder, save_steps=2, background=False)
        seen = []

        def vanish():
            shutil.rmtree(folder)
            folder.write_text("in the way")

        in_the_way = Breaks(2, vanish)
        counts = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.append(batch)
        )
        with pytest.raises(SaveError, match=r"nothing was saved yet[.]"):
            fit(as_new("adam"), checkpoint, in_the_way, counts, epochs=1)
        assert len(seen) == 2


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

        def vanish():
            shutil.rmtree(folder)
            folder.write_text("in the way")

        with pytest.raises(SaveError, match=r"nothing was saved yet[.]"):
            fit_traced(checkpoint, Breaks(STEPS, vanish), epochs=1)

    def test_a_directory_that_is_gone_is_not_made_anew(self, tmp_path):
        checkpoint = Checkpoint(tmp_path / "run", save_steps=1)

        def vanish():
            checkpoint.run.checkpoints.wait()
            shutil.rmtree(tmp_path / "run")

        words = "the directory is gone; the last one is .*/run/ckpt-0-2[.]"
        with pytest.raises(SaveError, match=words):
            fit_traced(checkpoint, Breaks(3, vanish))
        assert not (tmp_path / "run").exists()

    @pytest.mark.slow
    def test_a_limit_on_files_leaves_the_one_before(self, tmp_path):
        import resource

        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        checkpoint = Checkpoint(tmp_path, save_steps=2)

        def limit():
            checkpoint.run.checkpoints.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

        try:
            with pytest.raises(SaveError):
                fit(as_new(make=build), checkpoint, Breaks(3, limit))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt-0-2"]
        assert Checkpoint(tmp_path).restore(build())


class TestDamage:
    @staticmethod
    def make(optimizer="adam", units=4):
        return tiny(optimizer, units=units, metrics=["accuracy"])

    @pytest.fixture(scope="class")
    def saved(self, tmp_path_factory):
        """Two checkpoints; not to be changed."""
        folder = tmp_path_factory.mktemp("saved")
        fit(as_new(make=self.make), Checkpoint(folder), epochs=2)
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

    @pytest.mark.slow
    def test_it_is_written_anew(self, saved, tmp_path):
        run = tmp_path / "run"
        shutil.copytree(saved, run)
        (run / "ckpt-2-0/variables.index").write_bytes(b"")
        fit(as_new(make=self.make), Checkpoint(run), epochs=2)
        assert store.load(f"{run}/ckpt-2-0").about["step"] == 2 * STEPS
        assert sorted(p.name for p in (run / "ckpt-2-0").iterdir()) == [
            "variables.data-00000-of-00001",
            "variables.index",
        ]

    @pytest.mark.slow
    def test_links_and_lists_lead_nowhere(self, saved, tmp_path):
        run, other = tmp_path / "run", tmp_path / "other"
        shutil.copytree(saved, run)
        shutil.copytree(saved / "ckpt-2-0", other)
        os.symlink(other, run / "ckpt-9-0")
        (run / "checkpoint").write_text(f'model_checkpoint_path: "{other}"\n')
        checkpoint = Checkpoint(run, keep_checkpoints=1)
        fit(as_new(make=self.make), checkpoint, epochs=3)
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


def test_what_is_known_of_the_data_and_of_the_best(tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path, monitor="val_loss")
    assert (checkpoint.batch_size, checkpoint.epochs_since_best) == (None, 0)
    about = {"data": {"batch size": 8}}
    checkpoint.run.known = store.Contents({}, about)
    assert checkpoint.batch_size == 8
    about["callbacks"] = [["BatchPerTower", {"size": 6}], ["BatchPerTower", {}]]
    assert checkpoint.batch_size == 6
    about["history"] = {"history": {"val_loss": [3.0, 1.0, float("nan"), 2.0]}}
    monkeypatch.setattr(store, "load_about", lambda path: about)
    checkpoint.run.checkpoints.latest = "ckpt-4-0"
    assert checkpoint.epochs_since_best == 2


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
        fit(as_new(), Checkpoint(tmp_path), Checkpoint(tmp_path))
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_what_a_checkpoint_says_is_json(tmp_path):
    stopping = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    fit(as_new("adam"), stopping, Checkpoint(tmp_path), epochs=1)
    about = store.load_about(f"{tmp_path}/ckpt-1-0")
    assert json.loads(json.dumps(about)) == about
    again = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    fit(as_new("adam"), again, Checkpoint(tmp_path), epochs=2)
    assert again.best <= stopping.best
    assert len(again.best_weights) == len(stopping.best_weights)


def test_what_waits_for_a_better_epoch_goes_on_waiting(tmp_path):
    def trained(name, *epochs):
        for count in epochs:
            never_better = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: logs.update(score=1.0)
            )
            history = fit(
                as_new("adam"),
                never_better,
                keras.callbacks.EarlyStopping("score", patience=3, mode="min"),
                keras.callbacks.ReduceLROnPlateau("score", patience=2, mode="min"),
                Checkpoint(tmp_path / name),
                epochs=count,
            )
        return history.history["learning_rate"]

    rates = trained("whole", 9)
    assert len(rates) == 4 and rates[0] > rates[-1]
    assert trained("in two parts", 2, 9) == rates


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
    fit(as_new(), knows, Checkpoint(tmp_path), epochs=2)
    np.testing.assert_array_equal(knows.state.pop("values"), np.arange(3))
    assert knows.state == state


def test_what_callbacks_knew_in_older_checkpoints():
    saved = {"wait": 1, "weights": [{"array": 0}], "more": {}}
    found = states._from_json(saved, [np.ones(2)])
    assert found["wait"] == 1 and found["more"] == {}
    np.testing.assert_array_equal(found["weights"][0], np.ones(2))


KERAS = {
    "EarlyStopping": lambda: keras.callbacks.EarlyStopping("loss"),
    "ReduceLROnPlateau": lambda: keras.callbacks.ReduceLROnPlateau("loss"),
    "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint("here.keras"),
    "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore("here"),
    "TensorBoard": lambda: keras.callbacks.TensorBoard("here"),
    "CSVLogger": lambda: keras.callbacks.CSVLogger("here.csv"),
    "LambdaCallback": keras.callbacks.LambdaCallback,
}


@pytest.mark.parametrize("name", KERAS)
def test_a_checkpoint_sets_no_more_of_a_callback_than_its_numbers(capsys, name):
    callback = KERAS[name]()
    before = {**vars(callback)}
    known = states._state(callback) or {}
    good = {known: 0.25 for known in known}
    forged = dict.fromkeys(
        [
            *before,
            *("filepath", "backup_dir", "_training_state_path", "log_dir", "filename"),
            *("__class__", "on_epoch_end", "new"),
        ],
        "/tmp/elsewhere",
    )
    about = {
        "history": {"epoch": [], "history": {}},
        "callbacks": [[name, states._to_json(forged | good, [])]],
        "random": random_states(),
    }
    states.give_back(keras.Sequential(), [callback], about, [])
    assert vars(callback) == before | good
    assert type(callback).__name__ == name
    said = capsys.readouterr().err
    assert f"The checkpoint's {name} has " in said and "filepath" in said
    if good:
        # The names are known, and the values are paths.
        states._set_known(callback, dict.fromkeys(good, "/tmp/elsewhere"))
        states._set_known(callback, {key: ["/tmp/elsewhere"] for key in good})
        assert vars(callback) == before | good


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
    history = fit(as_new(), Checkpoint(tmp_path), epochs=2).history
    assert history["text"] == ["a"] and history["nothing"] == [None]
    assert len(history["loss"]) == 2 and "array" not in history

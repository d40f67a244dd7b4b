"""towers.callbacks, each in a real `fit` on two towers where that is possible."""

import functools
import io
import re
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import small
from towers import multi_gpu_model
from towers.monitoring.lines import Lines, ProgressBar
from towers.monitoring.throughput import Throughput
from towers.program import words
from towers.train.callbacks import StopAtStep


def data(examples=20, batch=8):
    """Batches of (images in [-1, 1], labels), the last one short."""
    random = np.random.default_rng(0)
    x = random.uniform(-1, 1, (examples, 4, 4, 1)).astype("float32")
    y = random.integers(0, 3, examples)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


# A model that is fitted again is not traced again.
towers = functools.cache(multi_gpu_model)


@functools.cache
def _made(steps_per_execution):
    return small.tiny(metrics=["accuracy"], steps_per_execution=steps_per_execution)


def build(steps_per_execution=1):
    """The model of other tests, with no step done."""
    model = _made(steps_per_execution)
    model.optimizer.iterations.assign(0)
    return model


def fit(model, *callbacks, **options):
    """Fits on two towers: three steps an epoch."""
    return towers(model, gpus=2).fit(
        data(), callbacks=list(callbacks), verbose=0, shuffle=False, **options
    )


class TestThroughput:
    def drive(self, throughput, calls, begin=0):
        """Plays calls of (last batch, seconds); returns what each logged."""
        clock = self.clock
        throughput.on_epoch_begin(0)
        rates = []
        for batch, seconds in calls:
            logs = {}
            throughput.on_train_batch_begin(begin)
            clock.now += seconds
            throughput.on_train_batch_end(batch, logs)
            clock.now += 1000.0  # not training
            begin = batch + 1
            rates.append(logs.get("examples_per_sec"))
        epoch_logs = {}
        throughput.on_epoch_end(0, epoch_logs)
        return rates, epoch_logs.get("examples_per_sec")

    def make(self, *args, **options):
        self.clock = types.SimpleNamespace(now=0.0)
        return Throughput(*args, clock=lambda: self.clock.now, **options)

    def test_leaves_out_the_warm_up_and_what_is_not_training(self):
        throughput = self.make(batch_size=10, warmup_steps=2)
        rates, epoch = self.drive(throughput, [(0, 99.0), (1, 99.0), (2, 2.0)])
        assert rates == [None, None, 5.0]
        assert epoch == throughput.examples_per_sec == 5.0

    def test_is_silent_during_warm_up(self):
        throughput = self.make(batch_size=10, warmup_steps=2)
        assert self.drive(throughput, [(0, 1.0), (1, 1.0)]) == ([None, None], None)
        assert throughput.examples_per_sec is None

    def test_counts_the_short_last_batch_as_it_is(self):
        throughput = self.make(batch_size=10, examples=23, warmup_steps=0)
        rates, epoch = self.drive(throughput, [(0, 1.0), (1, 1.0), (2, 1.0)])
        assert rates == [10.0, 10.0, pytest.approx(23 / 3)]
        assert epoch == pytest.approx(23 / 3)

    def test_counts_all_steps_of_a_call(self):
        throughput = self.make(batch_size=10, examples=65, warmup_steps=2)
        # Steps 0-2 are the warm-up, as the call that ends it is not counted.
        rates, epoch = self.drive(throughput, [(2, 9.0), (5, 2.0), (6, 1.0)])
        assert rates == [None, 15.0, pytest.approx(35 / 3)]
        assert epoch == pytest.approx(35 / 3)

    def test_counts_from_where_a_run_goes_on(self):
        throughput = self.make(batch_size=10, warmup_steps=0)
        rates, _ = self.drive(throughput, [(7, 1.0), (8, 1.0)], begin=7)
        assert rates == [10.0, 10.0]

    def test_an_epoch_has_a_mean_of_its_own(self):
        throughput = self.make(batch_size=10, examples=20, warmup_steps=0)
        _, first = self.drive(throughput, [(0, 1.0), (1, 1.0)])
        _, second = self.drive(throughput, [(0, 4.0), (1, 4.0)])
        assert (first, second) == (10.0, 2.5)
        assert throughput.examples_per_sec == 4.0

    def test_says_the_median_and_the_slowest_tenth(self):
        throughput = self.make(batch_size=10_000, warmup_steps=0)
        assert throughput.text().startswith("The speed was not measured, as the run")
        # 10,000 down to 500 examples per second.
        seconds = [20 / rate for rate in range(20, 0, -1)]
        self.drive(throughput, list(enumerate(seconds)))
        assert throughput.text() == (
            "5,250 examples/sec (median); 1,000 examples/sec or fewer in the slowest "
            "tenth of the steps"
        )
        assert throughput.text(0.5) == "2,625 examples/sec"

    def test_a_few_steps_have_no_slowest_tenth(self):
        throughput = self.make(batch_size=10, warmup_steps=0)
        self.drive(throughput, [(0, 1.0), (1, 2.0), (2, 20.0)])
        assert throughput.text() == "5.0 examples/sec"

    def test_says_tokens_of_text(self):
        throughput = self.make(batch_size=10, warmup_steps=0, tokens=128)
        assert throughput.tokens_per_sec is None
        self.drive(throughput, [(0, 1.0), (1, 3.0)])
        assert throughput.tokens_per_sec == 640.0
        # The median of 10 and 3 1/3 examples per second, and not the mean.
        assert throughput.text() == "6.7 examples/sec, 853 tokens/sec"
        assert throughput.text(0.5) == "3.3 examples/sec, 427 tokens/sec"
        assert throughput.measured() == {
            "examples_per_sec": 5.0,
            "tokens_per_sec": 640.0,
        }

    def test_measures_since_it_was_last_asked_by_tower(self):
        throughput = self.make(10, warmup_steps=1, fractions=(0.6, 0.4))
        self.drive(throughput, [(0, 9.0)])
        assert throughput.measured() == {}
        self.drive(throughput, [(1, 2.0), (2, 2.0)], begin=1)
        assert throughput.measured() == {
            "examples_per_sec": 5.0,
            "examples_per_sec/tower_0": 3.0,
            "examples_per_sec/tower_1": 2.0,
        }
        self.drive(throughput, [(3, 1.0)], begin=3)
        assert throughput.measured()["examples_per_sec"] == 10.0

    def test_later_callbacks_see_it(self):
        seen = {}
        later = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: seen.update({batch: dict(logs)})
        )
        history = fit(build(), Throughput(8, 20, warmup_steps=1), later)
        assert "examples_per_sec" not in seen[0]
        assert seen[1]["examples_per_sec"] > 0
        assert history.history["examples_per_sec"][0] > 0


class Clock:
    """Seconds that only pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Passing(keras.callbacks.Callback):
    """Lets seconds pass in each step."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def on_train_batch_begin(self, batch, logs=None):
        self.clock.now += self.seconds


class TestLines:
    def lines(self, *callbacks, log_steps=2, model=None, **options):
        """Fits for some epochs of three steps; returns what was printed."""
        stream, clock = io.StringIO(), Clock()
        of_lines = {k: options.pop(k) for k in ("last_step",) if k in options}
        shown = Lines(log_steps, stream, clock=clock, **of_lines)
        passing = Passing(clock, options.pop("seconds", 1.0))
        fit(model or build(), passing, *callbacks, shown, **options)
        return stream.getvalue().splitlines()

    def test_lines(self):
        lines = self.lines(Throughput(8, 20, 1), epochs=2)
        figures = r"loss [\d.]+, accuracy [\d.]+"
        rate = r"[\d,.]+ examples/sec"
        for line, expected in zip(
            lines,
            [
                rf"step 2/6: {figures}, {rate}, after 2 s, 4 s left",
                rf"epoch 1/2 done, step 3/6: {figures}, {rate}, after 3 s, 3 s left",
                rf"step 4/6: {figures}, {rate}, after 4 s, 2 s left",
                rf"epoch 2/2 done, step 6/6: {figures}, {rate}, after 6 s",
            ],
            strict=True,
        ):
            assert re.fullmatch(expected, line)

    def test_validation_comes_after_training_and_long_lines_are_wrapped(self):
        logs = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(
                dict.fromkeys(["a" * 30, "b" * 30], 0.25)
            )
        )
        first, second = self.lines(logs, log_steps=9, validation_data=data())
        assert re.match(
            r"epoch 1/1 done, step 3/3: loss [\d.]+, accuracy [\d.]+, a+ 0.25,$", first
        )
        assert re.match(
            r"  b+ 0.25, val_loss [\d.]+, val_accuracy [\d.]+, after 3 s$", second
        )

    def test_a_line_a_minute(self):
        lines = self.lines(log_steps=10**6, seconds=25.0, epochs=2)
        starts = [line.partition(":")[0] for line in lines]
        assert starts == ["epoch 1/2 done, step 3/6", "epoch 2/2 done, step 6/6"]
        lines = self.lines(log_steps=10**6, seconds=60.0)
        starts = [line.partition(":")[0] for line in lines]
        assert starts == ["step 1/3", "step 2/3", "epoch 1/1 done, step 3/3"]

    def test_goes_on_counting(self):
        model = build()
        fit(model, epochs=1)
        (line,) = self.lines(log_steps=100, model=model, initial_epoch=1, epochs=2)
        assert line.startswith("epoch 2/2 done, step 6/6: ")

    def test_several_steps_in_a_call(self):
        # One call of the graph makes steps 1 to 3, and goes past the 2nd.
        (line,) = self.lines(model=build(steps_per_execution=3))
        assert line.startswith("epoch 1/1 done, step 3/3: ")

    def test_a_last_call_of_fewer_steps(self):
        model = build(steps_per_execution=2)
        lines = self.lines(log_steps=1, epochs=2, model=model)
        starts = [line.partition(":")[0] for line in lines]
        assert starts == [
            *("step 2/6", "epoch 1/2 done, step 3/6"),
            *("step 5/6", "epoch 2/2 done, step 6/6"),
        ]

    def test_a_run_that_ends_within_an_epoch(self):
        lines = self.lines(StopAtStep(5), log_steps=1, epochs=9, last_step=5)
        starts = [line.partition(":")[0] for line in lines]
        assert starts == [
            *("step 1/5", "step 2/5", "epoch 1/9 done, step 3/5", "step 4/5"),
            "epoch 2/9 stopped, step 5/5",
        ]
        assert "left" in lines[-2] and "left" not in lines[-1]

    def test_data_whose_length_is_not_known(self):
        stream, clock = io.StringIO(), Clock()
        lines = Lines(2, stream, clock=clock)
        some = data().filter(lambda x, y: True)
        towers(build(), gpus=2).fit(
            some, epochs=2, verbose=0, callbacks=[Passing(clock, 1.0), lines]
        )
        starts = [line.partition(":")[0] for line in stream.getvalue().splitlines()]
        assert starts == [
            *("step 2", "epoch 1/2 done, step 3/6"),
            *("step 4/6", "epoch 2/2 done, step 6/6"),
        ]

    def test_an_epoch_of_unknown_length_that_is_stopped(self):
        stream = io.StringIO()
        some = data().filter(lambda x, y: True)
        towers(build(), gpus=2).fit(
            *(some, None),
            epochs=2,
            verbose=0,
            callbacks=[StopAtStep(2), Lines(9, stream)],
            shuffle=False,
        )
        assert stream.getvalue().startswith("epoch 1/2 stopped, step 2: ")

    def test_an_epoch_longer_than_the_one_before(self):
        stream, model = io.StringIO(), build()
        model.stop_training = False
        shown = Lines(1, stream, clock=Clock())
        shown.set_model(model)
        shown.set_params({"epochs": 2, "steps": None})
        shown.on_train_begin()
        for epoch, batches in enumerate((1, 3)):
            shown.on_epoch_begin(epoch)
            for batch in range(batches):
                model.optimizer.iterations.assign_add(1)
                shown.on_train_batch_end(batch, {})
            shown.on_epoch_end(epoch, {})
        starts = [line.partition(":")[0] for line in stream.getvalue().splitlines()]
        assert starts == [
            *("step 1", "epoch 1/2 done, step 1/2"),
            *("step 3", "step 4", "epoch 2/2 done, step 4/4"),
        ]

    def test_bad_number_of_steps(self):
        with pytest.raises(ValueError, match=r"log_steps=0; expected at least 1"):
            Lines(0)


class TestProgressBar:
    def show(self, capsys, steps, logs, more=()):
        """Shows an epoch; returns what a terminal has, a line each."""
        bar = ProgressBar()
        bar.set_params({"verbose": 1, "epochs": 2, "steps": steps})
        bar.on_train_begin()
        bar.on_epoch_begin(0)
        for batch in range(steps or 3):
            bar.on_train_batch_end(batch, dict(logs))
        bar.on_epoch_end(0, {**logs, **dict(more)})
        shown = re.sub("\x1b\\[\\d+m|\b", "", capsys.readouterr().out)
        # What a carriage return begins anew is drawn over.
        return [line.rpartition("\r")[2] for line in shown.splitlines()]

    @pytest.mark.parametrize("steps", [3, 57, 1563, 100_000, None])
    def test_it_fits_80_columns(self, capsys, steps):
        logs = {"accuracy": 0.75, "examples_per_sec": 3210.0, "loss": 1.23e-4}
        more = {"val_accuracy": 0.5, "val_loss": 0.625}
        head, *bars, rest = self.show(capsys, steps, logs, more)
        assert head == "Epoch 1/2"
        assert all(len(line.rstrip()) <= 80 for line in bars)
        assert "loss: 1.2300e-04 - accuracy: 0.7500" in bars[-1]
        assert rest == "  val_loss 0.625, val_accuracy 0.5, 3,210 examples/sec"

    @pytest.mark.parametrize("columns", [60, 40, 30])
    def test_it_fits_a_narrow_terminal(self, capsys, monkeypatch, columns):
        monkeypatch.setattr(words, "line_width", lambda: columns)
        logs = {"loss": 0.5, "accuracy": 0.75, "examples_per_sec": 3210.0}
        _, *lines = self.show(capsys, 57, logs, {"val_loss": 0.625})
        assert all(len(line.rstrip()) <= columns for line in lines)
        shown = " ".join("".join(lines).split())
        assert all(name in shown for name in ("loss", "accuracy 0.75", "val_loss"))

    def test_small_and_large_values_fit(self, capsys):
        logs = {"loss": 1.23e-4, "a": 0.0, "b": 12345.678}
        _, *bars = self.show(capsys, 3, logs)
        assert all(len(line.rstrip()) <= 80 for line in bars)
        assert "loss: 1.2300e-04 - a: 0.0000e+00 - b: 12345.6780" in bars[-1]

    def test_metrics_without_room_follow_as_the_epoch_ends(self, capsys):
        names = [f"metric_number_{k}" for k in range(6)]
        lines = self.show(capsys, 5, dict.fromkeys([*names, "loss"], 0.5))
        assert all(len(line.rstrip()) <= 80 for line in lines)
        assert "loss: 0.5000" in lines[-3] and names[5] not in lines[-3]
        assert f"{names[5]} 0.5" in lines[-1]

    def test_nothing_follows_where_all_is_shown(self, capsys):
        assert "loss: 0.5000" in self.show(capsys, 5, {"loss": 0.5})[-1]

    def test_fit_has_one_bar(self, capsys):
        towers(build(), gpus=2).fit(
            *(data(), None),
            epochs=2,
            callbacks=[Throughput(8, 20, 1), ProgressBar()],
            shuffle=False,
        )
        out = capsys.readouterr().out
        assert [out.count(f"Epoch {k}/2") for k in (1, 2)] == [1, 1]
        assert "examples_per_sec" not in out
        assert len(re.findall(r"^  [\d,.]+ examples/sec$", out, re.M)) == 2


class TestStopAtStep:
    @pytest.mark.parametrize(("steps_per_call", "made"), [(1, 4), (3, 6)])
    def test_stops(self, steps_per_call, made):
        model = build(steps_per_execution=steps_per_call)
        fit(model, StopAtStep(4), epochs=9)
        # A call that was begun is finished.
        assert int(model.optimizer.iterations) == made

    def test_counts_earlier_runs(self):
        model = build()
        fit(model, epochs=1)
        fit(model, StopAtStep(4), epochs=9)
        assert int(model.optimizer.iterations) == 4

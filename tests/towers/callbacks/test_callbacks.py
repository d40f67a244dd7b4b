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
from towers.monitoring.lines import Lines
from towers.monitoring.throughput import Throughput
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

    def test_says_mean_standard_error_and_jitter(self):
        throughput = self.make(batch_size=10, warmup_steps=0)
        assert throughput.text().startswith(
            "examples/sec: not measured, as the run ended"
        )
        # Rates of 10, 5, 2, 2 and 2000 examples per second: the mean is by time.
        seconds = [1.0, 2.0, 5.0, 5.0, 0.005]
        self.drive(throughput, list(enumerate(seconds)))
        rates = [10 / each for each in seconds]
        error, jitter = np.std(rates) / 5**0.5, 1.4826 * 3
        expected = f"{50 / 13.005:,.1f} +/- {error:,.1f} (jitter = {jitter:.1f})"
        assert throughput.text() == f"examples/sec: {expected}"
        assert f"examples/sec: {25 / 13.005:,.1f} +/- " in throughput.text(0.5)

    def test_says_tokens_of_text(self):
        throughput = self.make(batch_size=10, warmup_steps=0, tokens=128)
        assert throughput.tokens_per_sec is None
        self.drive(throughput, [(0, 1.0), (1, 3.0)])
        assert throughput.tokens_per_sec == 640.0
        assert throughput.text().endswith("), tokens/sec: 640")
        assert throughput.text(0.5).endswith("), tokens/sec: 320")
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


class TestLines:
    def test_lines(self):
        stream = io.StringIO()
        fit(build(), Throughput(8, 20, 1), Lines(2, stream), epochs=2)
        lines = stream.getvalue().splitlines()
        starts = [line.partition(":")[0] for line in lines]
        assert starts == [
            "epoch 1/2, step 2",
            "epoch 1/2 done, step 3",
            "epoch 2/2, step 4",
            "epoch 2/2, step 6",
            "epoch 2/2 done, step 6",
        ]
        for line in lines:
            assert re.search(
                r": examples/sec: [\d,.]+, accuracy \d\.\d+, loss \d", line
            )

    def test_goes_on_counting(self):
        model, stream = build(), io.StringIO()
        fit(model, epochs=1)
        fit(model, Lines(100, stream), initial_epoch=1, epochs=2)
        assert stream.getvalue().startswith("epoch 2/2 done, step 6: ")

    def test_several_steps_in_a_call(self):
        stream = io.StringIO()
        # One call of the graph makes steps 1 to 3, and goes past the 2nd.
        fit(build(steps_per_execution=3), Lines(2, stream))
        starts = [line.partition(":")[0] for line in stream.getvalue().splitlines()]
        assert starts == ["epoch 1/1, step 3", "epoch 1/1 done, step 3"]

    def test_bad_number_of_steps(self):
        with pytest.raises(ValueError, match=r"log_steps=0; expected at least 1"):
            Lines(0)


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

"""Samples of how busy devices are: of a made-up saw-tooth, and of this real process."""

import json
import threading
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from tests import warm
from tests.limits import HANG_S
from tests.small import tiny
from tests.towers.monitoring.test_device_report import (
    ON_CPU,
    ON_GPUS,
    Nvml,
    cards,
    columns,
    of,
)
from towers import multi_gpu_model
from towers.loop.timers import Totals
from towers.machine.nvml import Driver
from towers.monitoring.device_report import CpuLoad, DeviceReport, Sample, Sampler
from towers.monitoring.tensorboard import pictures
from towers.monitoring.tensorboard.callback import TensorBoard

__all__ = ["cards"]  # a fixture

# Computes for three samples, and waits for one.
ROWS = {"cpu:0": np.array([0.5, 1.0])}
TEETH = [100, 90, 80, 10] * 5


@pytest.fixture(autouse=True)
def _leaves_no_thread():
    yield
    assert "utilization" not in {each.name for each in threading.enumerate()}


def sampled(device_report, nvml, teeth):
    for busy in teeth:
        nvml.busy["GPU-three"] = busy
        device_report._sampler.sample()


def test_minimum_median_and_tenth_percentile_of_each_interval(cards):
    nvml = Nvml()
    device_report = DeviceReport(ON_GPUS, Driver(nvml))
    sampled(device_report, nvml, TEETH)
    first = of(device_report.measured(), "device/gpu:1")
    assert first["utilization"] == pytest.approx(np.mean(TEETH) / 100)
    found = [first[f"utilization_{each}"] for each in ("min", "p10", "median")]
    assert found == pytest.approx([0.1, 0.1, 0.85])
    sampled(device_report, nvml, range(0, 101, 10))
    second = of(device_report.measured(), "device/gpu:1")
    found = [second[f"utilization_{each}"] for each in ("min", "p10", "median")]
    assert found == pytest.approx([0, 0.1, 0.5])
    # Between two samples: what the driver says at the moment, and no more.
    third = of(device_report.measured(), "device/gpu:1")
    assert third["utilization"] == 1.0
    assert "utilization_min" not in third
    # The other GPU was at 25% all the time.
    every = [*TEETH, *range(0, 101, 10)]
    expected = {"min": 0, "p10": np.percentile(every, 10), "median": np.median(every)}
    found = device_report.utilization()
    assert found["gpu:0"] == {"min": 0.25, "p10": 0.25, "median": 0.25}
    assert found["gpu:1"] == pytest.approx({k: v / 100 for k, v in expected.items()})
    row = columns(device_report.text())[0]
    assert [row[each] for each in ("median", "p10", "min")] == ["80%", "10%", "0%"]


def test_the_process_on_the_host_goes_the_same_way(monkeypatch):
    now = types.SimpleNamespace(s=0.0, cpu_s=0.0)
    device_report = DeviceReport(
        ON_CPU, clock=lambda: now.s, cpu_clock=lambda: now.cpu_s
    )
    cpus = device_report._load._cpus
    device_report.on_train_begin()
    for busy in TEETH:
        now.s += 0.25
        now.cpu_s += 0.25 * cpus * busy / 100
        device_report._sampler.sample()
    values = of(device_report.measured(), "device/cpu:0")
    found = [values[f"utilization_{each}"] for each in ("min", "p10", "median")]
    assert found == pytest.approx([0.1, 0.1, 0.85])
    assert values["utilization"] == pytest.approx(np.mean(TEETH) / 100)


def test_what_the_driver_does_not_tell_is_left_out(cards):
    device_report = DeviceReport(ON_GPUS, Driver(Nvml(["utilization"])))
    device_report._sampler.sample()
    device_report._sampler.sample()
    assert set(device_report.utilization()) == {"cpu:0"}
    assert not any("gpu" in name for name in device_report.timeline())


def test_a_driver_that_hangs_holds_nothing_up():
    asked, answers = threading.Event(), threading.Event()

    def take():
        asked.set()
        answers.wait(HANG_S)
        return Sample(0.0, {"gpu": 1.0})

    sampler = Sampler(take, period_s=0.0)
    sampler.start()
    assert asked.wait(HANG_S)
    (thread,) = (each for each in threading.enumerate() if each.name == "utilization")
    sampler.stop()
    assert sampler.since_last_call() == {}
    answers.set()
    thread.join(HANG_S)
    assert sampler.since_last_call() == {}  # the run has ended
    assert not thread.is_alive()


def test_an_error_ends_sampling_and_is_said_once(capsys):
    device_report = DeviceReport(ON_CPU)
    failed = threading.Event()

    def take():
        failed.set()
        raise OSError("no driver")

    device_report._sampler = Sampler(take, period_s=0.0)
    device_report.on_train_batch_end(0)
    assert failed.wait(HANG_S)
    device_report._sampler._thread.join(HANG_S)
    for _ in range(2):
        device_report.measured()
    device_report.on_train_end()
    assert capsys.readouterr().err == (
        "towers: How busy devices are is no longer sampled: OSError('no driver').\n"
    )


def test_samples_come_from_a_thread_until_it_is_stopped():
    taken = threading.Semaphore(0)

    def take():
        taken.release()
        return Sample(0.0, {"cpu": 0.5})

    sampler = Sampler(take, period_s=0.0)
    for _ in range(2):  # it may start again
        sampler.start()
        for _ in range(3):
            assert taken.acquire(timeout=HANG_S)
        sampler.stop()
        assert sampler.since_last_call()["cpu"]["min"] == 0.5


def test_rows_of_the_picture():
    sampler = Sampler(
        iter(
            [
                Sample(0.0, {"gpu:0": 0.3}, 10, 1.0),
                Sample(1.0, {"gpu:0": 1.0}, 14, 1.5),  # waited half of it
                Sample(2.0, {}, 14, 1.5),  # in the middle of a step
                Sample(3.0, {"gpu:0": 0.0}, 15, 1.75),  # which waited 0.25 of 2
                Sample(4.0, {"gpu:0": 0.5}, 2, 0.1),  # other towers count anew
                Sample(5.0, {"gpu:0": 0.5}, 4, 0.3),
            ]
        ).__next__
    )
    sampler.sample()
    assert sampler.rows() == {}
    for _ in range(5):
        sampler.sample()
    rows = sampler.rows()
    assert [*rows] == ["gpu:0", "steps, at most 4", "waiting for input"]
    np.testing.assert_array_equal(rows["gpu:0"], [1, np.nan, 0, 0.5, 0.5])
    np.testing.assert_array_equal(rows["steps, at most 4"], [1, 0, 0.25, 0, 0.5])
    waiting = rows["waiting for input"]
    np.testing.assert_allclose(waiting, [0.5, 0.125, 0.125, 0, 0.2])


def test_the_picture_is_as_high_as_the_values():
    values = np.array([0, 0.25, 1, np.nan, 0.5])
    picture = pictures.areas({"gpu:0": values, "waiting": values[::-1]}, "a caption")
    blue = (picture == (33, 113, 181)).all(axis=-1)
    columns = blue.sum(axis=0)
    drawn = columns[columns > 0]
    # Both rows are in a column, six pixels wide.
    np.testing.assert_array_equal(
        drawn, np.repeat([30, 15, 120, 15, 30], pictures._COLUMN)
    )


def test_a_picture_is_drawn_at_most_twice_a_minute(tmp_path):
    now, rows = [0.0], [{}]
    timeline = pictures.Timeline(lambda: rows[0], clock=lambda: now[0])
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for step, (now[0], rows[0]) in enumerate(
            [(0, {}), (1, ROWS), (29, ROWS), (31, ROWS), (60, ROWS), (90, ROWS)]
        ):
            tf.summary.experimental.set_step(step)
            timeline.write_if_due()
        tf.summary.experimental.set_step(9)
        timeline.write()
    events = EventAccumulator(str(tmp_path), {"tensors": 0}).Reload()
    assert [each.step for each in events.Tensors("utilization")] == [1, 3, 5, 9]


def test_in_fit_with_steps_and_waiting(tmp_path):
    x, y = np.zeros((64, 4, 4, 1), "float32"), np.zeros(64, "int32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    device_report = DeviceReport(ON_CPU)
    parallel = multi_gpu_model(tiny(), gpus=2)
    enough = threading.Semaphore(0)
    device_report._sampler = Sampler(
        lambda: (enough.release(), device_report._sample())[1], period_s=0.001
    )

    def measured():
        assert enough.acquire(timeout=HANG_S)
        return device_report.measured()

    board = TensorBoard(
        str(tmp_path), 4, measures=[measured], timeline=device_report.timeline
    )
    parallel.fit(data, epochs=3, verbose=0, callbacks=[device_report, board])
    events = EventAccumulator(str(tmp_path / "train"), {"tensors": 0}).Reload()
    steps = [each.step for each in events.Tensors("device/cpu:0/utilization_p10")]
    assert set(steps) <= {4, 8, 12, 16, 20, 24}
    low, middle, least = (
        float(tensor_util.make_ndarray(events.Tensors(tag)[-1].tensor_proto))
        for tag in (f"device/cpu:0/utilization_{of}" for of in ("p10", "median", "min"))
    )
    assert 0 <= least <= low <= middle <= 1
    picture = tensor_util.make_ndarray(events.Tensors("utilization")[-1].tensor_proto)
    assert picture[2].startswith(b"\x89PNG")
    rows = device_report.timeline()
    assert rows.keys() >= {"cpu:0", "waiting for input"}
    # They began behind the first step, and saw the last.
    totals = parallel.builder.timers.totals()
    assert isinstance(totals, Totals)
    assert totals.steps == 24
    assert device_report._sampler.recent[-1].steps <= 24


def test_an_error_in_fit_ends_the_thread():
    x, y = np.zeros((64, 4, 4, 1), "float32"), np.zeros(64, "int32")

    class Fails(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:
                raise OSError("as a disk is full")

    parallel = multi_gpu_model(tiny(), gpus=2)
    device_report = DeviceReport(ON_CPU)
    with pytest.raises(OSError, match="disk"):
        parallel.fit(x, y, 8, verbose=0, callbacks=[device_report, Fails()])
    assert not device_report._sampler.started


def test_load_is_nothing_at_once():
    now = [1.0]
    load = CpuLoad(lambda: now[0], lambda: now[0])
    assert load.since() is None


@pytest.mark.slow
def test_towers_train_writes_them(tmp_path):
    done = warm.run(
        "towers.train",
        f"--model_dir={tmp_path / 'run'}",
        f"--data_dir={tmp_path / 'data'}",
        *("--model=mlp", "--train_epochs=4", "--log_steps=10"),
        *("--variable_update=parameter_server", "--enable_xla=false"),
        # So that this short run has some.
        changed={"towers.monitoring.device_report.PERIOD_S": 0.01},
    )
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run/train"), {"tensors": 0}).Reload()
    tags = events.Tags()["tensors"]
    for name in ("utilization_min", "utilization_p10", "utilization_median"):
        assert f"device/cpu:0/{name}" in tags
    assert "utilization" in tags
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    found = summary["utilization"]["cpu:0"]
    assert 0 <= found["min"] <= found["p10"] <= found["median"] <= 1
    assert " p10 " in done.stdout

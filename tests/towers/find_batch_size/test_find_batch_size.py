"""Which batch sizes are tried, what is said of them, and whether the limit is found."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import types
from concurrent import futures
from unittest import mock

import keras
import numpy as np
import pytest

from tests import warm
from tests.limits import HANG_S
from tests.variants import slow
from towers.devices.configuration import Devices
from towers.find_batch_size import __main__ as main
from towers.find_batch_size import child, search_flags
from towers.find_batch_size import probe as probing
from towers.find_batch_size.report import SearchReport
from towers.find_batch_size.search import Probe, search, unit
from towers.hosts import group
from towers.hosts.group import HostFailedError
from towers.input_pipeline.sources.targets import Target
from towers.tower.errors import StageError
from towers.train.parts.facts import DataFacts

MODULE = "towers.find_batch_size"


def tried_by(room, start, step=1, most=None, speed=lambda size: 100.0):
    """The sizes that a search tries where so many examples fit, in order."""

    def probe(size):
        if size > room:
            return Probe(size, False, why="no room")
        return Probe(size, True, speed(size), 1000 * size / speed(size), 10.0 + size)

    return list(search(probe, probe(start), step, most))


def sizes(tried):
    return [probe.batch_size for probe in tried]


# The search.


def test_doubles_and_then_bisects():
    assert sizes(tried_by(21, start=8)) == [8, 16, 32, 24, 20, 22, 21, 4]
    assert sizes(tried_by(9, start=4, step=2)) == [4, 8, 16, 12, 10, 2]


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("start", [1, 64])
def test_the_largest_is_found_to_within_the_grain(step, start):
    for room in (*range(1, 200), 1000, 12345):
        tried = tried_by(room * step, start * step, step)
        assert all(size % step == 0 for size in sizes(tried))
        assert len(set(sizes(tried))) == len(tried)
        largest = max(probe.batch_size for probe in tried if probe.fits) // step
        assert largest <= room < largest + max(1, largest / 32)
        # The first, doublings or halvings to pass it, five to bisect, and one below.
        distance = abs(room.bit_length() - start.bit_length())
        assert len(tried) <= 1 + distance + 1 + 5 + 1


def test_halves_where_the_start_does_not_fit():
    tried = tried_by(6, start=64)
    assert sizes(tried) == [64, 32, 16, 8, 4, 6, 7, 2]
    assert "Fastest: 4, 100.0 examples/sec.\n" in str(report(tried))
    # Never less than an example for each tower.
    assert sizes(tried_by(0, start=64, step=16)) == [64, 32, 16]


def test_ends_at_the_largest_that_is_allowed():
    assert sizes(tried_by(10**6, start=8, most=50)) == [8, 16, 32, 50, 4]
    assert sizes(tried_by(10**6, start=8, step=4, most=51)) == [8, 16, 32, 48, 4]
    assert sizes(tried_by(10**6, start=50, most=50)) == [50, 25]
    tried = sizes(tried_by(40, start=8, most=50))
    assert tried == [8, 16, 32, 50, 41, 36, 38, 39, 40, 4]


def test_ends_where_speed_has_fallen_off_twice():
    speeds = {8: 100, 16: 120, 32: 80, 64: 110, 128: 80, 256: 60}
    tried = tried_by(10**6, start=8, speed=speeds.get)
    assert sizes(tried) == [8, 16, 32, 64, 128, 256]


def test_slow_sizes_do_not_end_a_bisection():
    tried = tried_by(21, start=16, speed=lambda size: 100.0 if size == 16 else 1.0)
    assert sizes(tried)[-2] == 21


def test_smaller_sizes_are_tried_while_they_are_faster():
    speeds = {64: 100, 128: 90, 256: 50, 512: 40, 32: 130, 16: 170, 8: 160}
    tried = tried_by(10**6, start=64, speed=speeds.get)
    assert sizes(tried) == [64, 128, 256, 512, 32, 16, 8]
    assert "Fastest: 16, 170.0 examples/sec, 1.70 times those of a ba" in str(
        report(tried)
    )
    # Each tower has an example, and what does not fit is not tried again.
    assert sizes(tried_by(9, start=8, step=4, speed=lambda size: 1 / size))[-1] == 4
    first = Probe(8, True, 9.0, 1.0, 1.0)
    tried = search(lambda size: Probe(size, False, why="no room"), first, 1, 8)
    assert sizes(tried) == [8, 4]


def test_a_unit_gives_each_tower_its_share():
    assert [unit(shares) for shares in ((1,), (1, 1, 1), (2, 3, 3), (2, 2))] == [
        1,
        3,
        8,
        2,
    ]


def test_a_unit_gives_each_micro_batch_its_share():
    assert unit((2, 3), micro_batches=4) == 20


# What is said.


def report(tried, split_ratios=(1, 1), most=None):
    towers = [f"/device:CPU:{tower}" for tower in range(len(split_ratios))]
    return SearchReport(
        tried,
        towers=towers,
        split_ratios=split_ratios,
        memory="process",
        most=most,
        learning_rate=0.1,
    )


def test_report_names_the_largest_and_the_fastest():
    speeds = {8: 100.0, 16: 1250.0, 24: 500.0, 20: 400.0, 22: 300.0}
    said = str(report(tried_by(22, start=8, step=2, speed=speeds.get)))
    assert "|    16 |         8 |      1,250.0 |    12.8 |      26 |  yes |" in said
    assert "|    32 |        16 |            - |       - |       - |   no |" in said
    assert "Largest that fits: 22 (11 per tower); 24 does not (no room)." in said
    assert (
        "Fastest: 16, 1,250.0 examples/sec, 12.50 times those of a batch of 8." in said
    )
    assert "--learning_rate=0.2 for 16" in said


def test_report_says_why_nothing_larger_was_tried():
    said = str(
        report(tried_by(99, start=8, step=8, most=20), split_ratios=(2, 3, 3), most=20)
    )
    assert "Largest that fits: 16 (4+6+6 per tower); nothing larger was tried" in said
    falling = tried_by(10**9, start=8, speed=lambda size: 1000 / size)
    assert "with larger ones, examples/sec had fallen off" in str(report(falling))
    said = str(report(tried_by(21, start=8)))
    assert "the search began with this size, and found no faster one, larger" in said


def test_report_of_stages_and_micro_batches():
    found = dataclasses.replace(
        report(tried_by(22, start=8, step=8), split_ratios=(1,)),
        towers=["/device:CPU:0 + /device:CPU:1"],
        micro_batches=4,
    )
    assert str(found).startswith("Towers: /device:CPU:0 + /device:CPU:1; ")
    assert "Largest that fits: 16 (16 per tower, in 4 micro-batches); 24" in str(found)
    assert found.as_dict()["micro_batches"] == 4


def test_report_of_a_search_that_was_stopped():
    stopped = dataclasses.replace(report([Probe(8, True, 9.0, 1.0, 1.0)]), stopped=True)
    assert "Largest that fits: 8 (4 per tower); the search was stopped" in str(stopped)
    assert stopped.as_dict()["stopped"] is True


def test_report_draws(tmp_path):
    for name, begins in (("chart.png", b"\x89PNG"), ("chart.svg", b"<?xml")):
        report(tried_by(21, start=8)).plot(str(tmp_path / name))
        assert (tmp_path / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    ("code", "stderr", "limited", "expected"),
    [
        (-signal.SIGKILL, "", False, {"fits": False}),
        (-signal.SIGABRT, "x\nwhat():  std::bad_alloc\ny", False, {"fits": False}),
        (1, "W CUDA_ERROR_OUT_OF_MEMORY: out of memory\nz", False, {"fits": False}),
        (-signal.SIGSEGV, "", True, {"fits": False}),
        (-signal.SIGSEGV, "ends", False, {"error": "A probe ended with exit code -11"}),
        (1, "No ROOM here", True, {"error": "A probe ended with exit code 1: No ROOM"}),
    ],
)
def test_how_a_probe_died(code, stderr, limited, expected):
    told = child.how_it_died(code, stderr, limited)
    assert told.keys() == {"fits", "why"} if "fits" in expected else {"error"}
    for name, value in expected.items():
        assert str(told[name]).startswith(str(value))


# As TensorFlow and oneDNN say it.
OOM = """Graph execution error:
  (0) RESOURCE_EXHAUSTED:  failed to allocate memory
OOM when allocating tensor with shape[65536,64] and type float on CPU:0 by cpu
\t [[{{node dense/MatMul}}]]
Hint: If you want to see a list of allocated tensors when OOM happens, add this."""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (OOM, OOM.splitlines()[2]),
        (OOM[OOM.index("Hint") :], ""),
        ("x\nwhat():  std::bad_alloc\ny", "std::bad_alloc"),
        (f"OOM {'size ' * 30}", f"OOM{' size' * 22}..."),
        ("all is well", ""),
    ],
)
def test_what_tells_of_a_lack_of_memory(text, why):
    assert child.no_memory(text) == why


# A probe.


@pytest.mark.parametrize(("call_s", "measured"), [(0.5, 5), (10, 2), (1.3, 3)])
def test_fewer_calls_are_measured_where_they_take_long(monkeypatch, call_s, measured):
    now = itertools.count()
    monkeypatch.setattr(probing.time, "perf_counter", lambda: call_s * next(now))
    clock = probing.Clock()
    clock.set_model(types.SimpleNamespace(stop_training=False))
    for batch in range(probing._WARM_UP + 5):
        if not clock.model.stop_training:
            clock.on_train_batch_end(batch, {"loss": 1.0})
    assert clock.measured_s() == pytest.approx([call_s] * measured)


def test_a_probe_trains_within_what_memory_is_left(monkeypatch):
    limits, told = [], {}
    take = lambda kind, both: limits.append(both)  # noqa: E731
    monkeypatch.setattr(probing.resource, "setrlimit", take)
    monkeypatch.setattr(probing, "free_memory", lambda: 2**40)
    taken = child.of_process_mb("VmData") * 2**20
    settings = read("--batch_size=5", "--model=mlp", *FLAGS)
    probing.probe(settings, lambda **facts: told.update(facts))
    ((soft, hard),) = limits
    # TensorFlow may reserve some before it is asked for how much there is.
    assert soft == hard and taken - 1 < soft - 0.9 * 2**40 < taken + 2**36
    assert (told["batch_size"], told["fits"], told["memory"]) == (4, True, "process")
    assert told["examples_per_sec"] == pytest.approx(4000 / told["step_ms"])
    assert 100 < told["peak_memory_mb"] <= child.of_process_mb("VmHWM")


def tensor(*shape):
    return keras.KerasTensor((None, *shape))


@pytest.mark.parametrize(
    ("kind", "inputs", "target", "y_shape", "y_type", "most", "options"),
    [
        ("image", tensor(4, 4, 1), Target("class", 3), (), "int64", 255, {}),
        ("row", tensor(7), Target("numbers", 2), (2,), "float32", 1, {}),
        (
            *("tokens", tensor(None), Target("labels", 2), (2,), "float32", 8),
            {"vocabulary_size": 9},
        ),
        (
            *("columns", {"a": tensor()}, Target("class", 2), (), "int64", 4),
            {"table_sizes": {"a": 5}},
        ),
    ],
)
def test_a_probe_has_random_batches_like_those_of_the_data(
    kind, inputs, target, y_shape, y_type, most, options
):
    facts = DataFacts("x", kind, inputs, target, y_shape, **options)
    about = types.SimpleNamespace(
        settings=search_flags.Search(batch_size=70), facts=facts
    )
    x, y = next(iter(probing.batches(about)))
    x = x["a"] if kind == "columns" else x
    # As many different ones as `_POOL`, and then the first again.
    assert (x.shape[0], y.shape) == (70, (70, *y_shape))
    np.testing.assert_array_equal(x[64:], x[:6])
    assert most / 2 < np.max(x) <= most and np.min(x) >= 0
    assert y.dtype == y_type and 0 <= np.min(y) < np.max(y) < max(target.num_classes, 2)
    if target.kind == "labels":
        assert {*np.ravel(y)} == {0, 1}


# The program, with real probes.

MB = 512
# It keeps so many MB for each example that it is trained on. They are never touched:
# they cost a limit, but no memory.
MODEL = f"""
import keras, numpy as np, tensorflow as tf

KEPT = {{}}

def keep(x):
    # By what is in a share: that of another tower is another.
    if x.tobytes() not in KEPT:
        KEPT[x.tobytes()] = np.empty((len(x), {MB} * 2**20), np.uint8)
    return np.float32(0)

class Keep(keras.layers.Layer):
    def call(self, x, training=None):
        if not training:
            return x
        with tf.control_dependencies([tf.numpy_function(keep, [x], tf.float32)]):
            return tf.identity(x)

def build(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Flatten(),
        Keep(),
        keras.layers.Dense(num_classes),
    ])
"""

# Its second stage needs so much memory for each example.
LARGE = """
import keras, tensorflow as tf

class Large(keras.layers.Layer):
    def call(self, x):
        size = 20 * tf.shape(x)[0]
        return x + 0 * tf.reduce_sum(tf.ones([size, 1_000_000]))

def build(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape),
        keras.layers.Flatten(),
        keras.layers.Dense(4, name="a"),
        Large(),
        keras.layers.Dense(num_classes, name="b"),
    ])
"""

# With a larger batch than 2, it tells a pipe which process tries it, and never returns;
# the pipe stays open while it lives.
WAITING = """
import os, sys, threading
import keras

def build(input_shape, num_classes):
    if "--batch_size=2" not in sys.argv:
        with open("{pipe}", "w") as pipe:
            print(os.getppid(), file=pipe, flush=True)
            threading.Event().wait()
    layers = keras.layers.Flatten(), keras.layers.Dense(num_classes)
    return keras.Sequential([keras.Input(input_shape), *layers])
"""

FLAGS = (
    "--dataset=synthetic:4x4x1:3",
    "--num_gpus=2",
    "--variable_update=parameter_server",
    "--enable_xla=false",
    "--probe_steps=1",
)


def run(*flags):
    return warm.run(MODULE, *FLAGS, *flags)


def write(folder, text):
    (folder / "model.py").write_text(text)
    return f"--model={folder / 'model.py'}:build"


@pytest.mark.slow
def test_finds_the_batch_of_the_memory_limit(tmp_path):
    # TensorFlow itself takes between 0 and 1000 MB, two towers by two examples.
    room, own_mb = 6, 1000
    limit = f"--memory_limit_mb={room * MB + own_mb}"
    chart = tmp_path / "chart.svg"
    model = write(tmp_path, MODEL)
    sizes = ("--batch_size=7", f"--max_batch_size={room + 2}")
    done = run(model, *sizes, "--json", limit, f"--plot={chart}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["largest"], found["too_large"]) == (room, room + 2)
    # Smaller ones may have been tried for their speed.
    *_, fits, fails = found["probes"]
    assert [(each["batch_size"], each["fits"]) for each in (fits, fails)] == [
        (6, True),
        (8, False),
    ]
    assert fits["examples_per_sec"] == pytest.approx(1000 * room / fits["step_ms"])
    # What is kept was not touched.
    assert 100 < fits["peak_memory_mb"] < 8 * MB
    assert "allocate" in fails["why"]
    assert "batch 8: does not fit" in done.stderr
    assert chart.exists()


def test_why_a_stage_failed_is_read_from_what_tensorflow_writes(monkeypatch, capsys):
    def fails(tell):
        tell(batch_size=8, memory="GPU")
        raise StageError("A stage has failed.")

    monkeypatch.setattr(group, "together", contextlib.nullcontext)
    assert child.answer(fails) == 1
    written = capsys.readouterr()
    assert "error" not in written.out
    last = child.how_it_died(1, written.err, limited=False)["error"]
    assert last.endswith("StageError: A stage has failed.")
    warned = f"{OOM}\n{written.err}"
    assert child.how_it_died(1, warned, limited=False)["fits"] is False


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (HostFailedError(1, "b"), 75, ""),
        (MemoryError("no page"), 0, '{"fits": false, "why": "MemoryError: no page"}\n'),
        (ValueError("a\n b"), 0, '{"error": "a b"}\n'),
    ],
)
def test_a_probe_says_why_it_ends(monkeypatch, capsys, error, code, told):
    monkeypatch.setattr(group, "together", contextlib.nullcontext)
    assert child.answer(mock.Mock(side_effect=error)) == code
    assert capsys.readouterr().out == told


@pytest.mark.slow
def test_memory_that_a_stage_lacks_does_not_end_the_search(tmp_path):
    model = write(tmp_path, LARGE)
    sizes = ("--batch_size=64", "--max_batch_size=64", "--memory_limit_mb=2500")
    stages = ("--num_gpus=2", "--stages=2", "--placement=a=0,.*=1", "--nostrict")
    done = run(model, *sizes, *stages, "--json", "--split_ratios=1")
    assert done.returncode == 0, done.stderr
    assert "batch 64: does not fit" in done.stderr
    assert json.loads(done.stdout)["largest"] < 64


@pytest.mark.slow
def test_nothing_fits(tmp_path):
    model = write(tmp_path, MODEL)
    done = run(model, "--batch_size=2", f"--memory_limit_mb={MB + 500}")
    assert done.returncode == 1
    assert "No batch fits, not even 2 (" in done.stderr
    assert "Traceback" not in done.stderr


def read(*given):
    return search_flags.read([MODULE, *given], "What it is for.")


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--max_batch_size=0", "expected at least 1"),
        ("--plot=chart.gif", "expected a PNG or SVG file"),
        ("--plot=/nowhere/chart.svg", "in a folder that exists"),
        ("more", "'more'; expected flags only"),
        ("--num_gpus=auto", "auto, which only towers.train takes; expected a number"),
        ("--elastic_batch=at_start", "=at_start; expected --batch_size to be the ex"),
    ],
)
def test_bad_flags(flag, expected):
    with pytest.raises(ValueError, match=expected):
        read(flag)


def test_flags_without_effect_are_told(capsys):
    read("--model_dir=x", "--clean", "--train_epochs=1", "--cache=none", "--ema=0.9")
    assert capsys.readouterr().err == (
        f"{MODULE}: These flags have no effect here: --train_epochs=1 --cache=none.\n"
    )
    read("--model=mlp", "--batch_size=8", "--train_epochs=30")
    assert not capsys.readouterr().err


def test_a_probe_reads_what_the_search_was_given(tmp_path):
    given = f"--model_dir={tmp_path}", "--probe_steps=2", "--split_ratios=2,3"
    asked = read("--nostrict", "--learning_rate=1e-5", f"--data_dir={tmp_path}", *given)
    found = search_flags.read_checked([MODULE, *asked.for_a_probe(32)])
    assert (found.batch_size, found.probe_steps, found.strict) == (32, 2, False)
    assert found == asked.but(batch_size=32)


def stand_in(room):
    """Makes what stands for the process of a probe, where so many examples fit."""

    def launch(command, **options):
        (size,) = (each for each in command if each.startswith("--batch_size="))
        told = {"batch_size": int(size.partition("=")[2]), "memory": "process"}
        towers = {"towers": ["a", "b"], "split_ratios": [1, 1], "note": ""}
        lines = [told | towers]
        if fits := told["batch_size"] <= room:
            figures = {"examples_per_sec": 1250.0, "step_ms": 1.0}
            lines.append({"fits": True, "peak_memory_mb": 70.0} | figures)
        out = "\n".join(map(json.dumps, lines))
        return subprocess.CompletedProcess(command, 0 if fits else -9, out, "")

    return launch


def search_here(monkeypatch, process, *flags):
    """Runs the program in this process, with what stands for its probes."""
    monkeypatch.setattr(child.subprocess, "run", process)
    return main.find(read("--model=mlp", "--num_gpus=2", *flags))


def test_what_is_tried_is_shown(monkeypatch, capsys, tmp_path):
    flags = "--batch_size=4", "--max_batch_size=8"
    chart = f"--plot={tmp_path / 'chart.svg'}"
    assert search_here(monkeypatch, stand_in(6), *flags, chart) == 0
    shown, said = capsys.readouterr()
    killed = "killed, as the kernel does for want of memory"
    assert f"Largest that fits: 6 (3 per tower); 8 does not ({killed}).\n" in shown
    assert f"{MODULE}: batch 4: 1,250.0 examples/sec, 70 MB\n" in said
    assert f"{MODULE}: batch 8: does not fit ({killed})\n" in said
    assert (tmp_path / "chart.svg").exists()
    search_here(monkeypatch, stand_in(6), *flags, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["largest"], found["too_large"]) == (6, 8)


def test_a_search_that_is_stopped_shows_what_was_tried(monkeypatch, capsys):
    launch = stand_in(6)

    def stopped(command, **options):
        if "--batch_size=4" in command:
            raise KeyboardInterrupt
        return launch(command)

    assert search_here(monkeypatch, stopped, "--batch_size=2") == 130
    shown, said = capsys.readouterr()
    assert said.endswith(f"{MODULE}: Stopped by Ctrl-C.\n")
    assert "Largest that fits: 2 (1 per tower); the search was stopped" in shown


def ended(code, out):
    return lambda command, **options: subprocess.CompletedProcess(
        command, code, out, "the last line"
    )


@pytest.mark.parametrize(
    ("process", "flags", "expected"),
    [
        (stand_in(1), ["--batch_size=9"], r"No batch fits, not even 2 \(killed, as"),
        (stand_in(9), ["--max_batch_size=1"], "at least 2, the .* among 2 towers.$"),
        (
            *(stand_in(9), ["--max_batch_size=7", "--micro_batches=4"]),
            "at least 8, the .* among 2 towers of 4 micro-batches.$",
        ),
        (ended(0, '{"error": "a is b."}'), [], "^a is b.$"),
        (ended(1, ""), [], "A probe ended with exit code 1: the last line"),
        (ended(-9, ""), [], r"before it had any tower \(killed, as the kernel"),
        (
            mock.Mock(side_effect=subprocess.TimeoutExpired("a", 900)),
            *(["--batch_size=9"], "A batch of 9 took longer than 900 s; expected less"),
        ),
    ],
)
def test_a_search_without_a_result(monkeypatch, process, flags, expected):
    with pytest.raises(ValueError, match=expected):
        search_here(monkeypatch, process, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--batch_size=0"], "Received --batch_size=0; expected at least 1."),
        # A probe's own.
        (["--dataset=folder:/nowhere"], "/nowhere"),
    ],
)
def test_wrong_usage_is_said_in_a_sentence(flags, expected):
    done = run(*flags)
    assert done.returncode == 1
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if line.startswith(MODULE)]
    assert len(said) == 1
    assert expected in said[0]
    assert "Traceback" not in done.stderr


def test_a_limit_that_is_too_low_is_said_by_the_probe():
    flags = ("--dataset=digits", "--memory_limit_mb=10", "--batch_size=2")
    done = warm.run(probing.__name__, *FLAGS, *flags)
    (error,) = (
        found["error"]
        for found in map(json.loads, done.stdout.splitlines())
        if "error" in found
    )
    assert "--memory_limit_mb=10; expected at least " in error


@pytest.mark.parametrize(
    ("number", "code", "cause", "first"),
    # In the second probe, and in the first.
    [slow(signal.SIGINT, 130, "Ctrl-C", 2), (signal.SIGTERM, 143, "SIGTERM", 4)],
)
def test_a_signal_ends_the_probe(tmp_path, number, code, cause, first):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    model = write(tmp_path, WAITING.format(pipe=pipe))
    with futures.ThreadPoolExecutor() as pool:
        program = pool.submit(run, f"--batch_size={first}", model)
        with pipe.open() as of_probe:
            os.kill(int(of_probe.readline()), number)
            done = program.result(HANG_S)
            assert of_probe.read() == ""  # when the probe has ended
    assert done.returncode == code
    assert f"{MODULE}: Stopped by {cause}." in done.stderr
    if first == 2:
        found = "Largest that fits: 2 (1 per tower); the search was stopped"
        assert found in done.stdout
    else:
        assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([{"fits": True, "peak_memory_mb": 30.0}], {"peak_memory_mb": 30.0}),
        ([{"fits": False, "why": "OOM"}], {"fits": False, "why": "OOM"}),
        ([{"error": "bad"}, {"fits": False, "why": "OOM"}], {"fits": False}),
        ([{}, {}], {"peak_memory_mb": 20.0}),
    ],
)
def test_what_hosts_tell_is_put_together(others, expected):
    first = {"batch_size": 8, "fits": True, "peak_memory_mb": 20.0}
    found = child.of_all_hosts(first, others)
    assert found.items() >= expected.items() and found["batch_size"] == 8
    # The first one, which has only heard of it, says nothing.
    found = child.of_all_hosts({"batch_size": 8}, others)
    assert (found.get("fits") is False) == ("why" in expected or "fits" in expected)


def test_hosts_try_a_size_together(monkeypatch):
    def launch(command, **options):
        folder = next(each for each in command if each.startswith("--log_dir="))
        with open(f"{folder.removeprefix('--log_dir=')}/host1.log", "w") as log:
            log.write('a warning\n{"fits": false, "why": "OOM when allocating"}\n')
        said = '{"batch_size": 32, "towers": ["a"]}\n'
        return subprocess.CompletedProcess(command, 75, said, "")

    started = mock.Mock(side_effect=launch)
    monkeypatch.setattr(child.subprocess, "run", started)
    told = main.run(read("--hosts=2", "--num_gpus=3", "--model=mlp"), 32)
    why = {"fits": False, "why": "OOM when allocating"}
    assert told == {"batch_size": 32, "towers": ["a"], **why}
    command = started.call_args.args[0]
    assert command[1:5] == ["-m", "towers.launch", "--hosts=2", "--num_gpus=3"]
    assert command[6:9] == ["--", "-m", "towers.find_batch_size.probe"]
    assert "--hosts=2" not in command[9:]


@pytest.mark.parametrize(
    ("limits_mb", "flags", "ratios"),
    [
        ((24000, 16000), {}, ("3", "2")),
        ((80000, 40000, 40000), {}, ("2", "1", "1")),
        ((16000, 15500), {}, None),
        ((24000, 16000), {"split_ratios": ("1", "1")}, ("1", "1")),
        ((24000, 16000, 24000, 8000), {"stages": 2}, ("2", "1")),
    ],
)
def test_gpus_that_differ_in_memory(limits_mb, flags, ratios):
    names = [f"/device:GPU:{k}" for k in range(len(limits_mb))]
    limits = {name: mb * 2**20 for name, mb in zip(names, limits_mb, strict=True)}
    found, note = probing.with_ratios_by_memory(
        search_flags.Search(**flags),
        Devices(tuple(names), names[0], tuple(range(len(names)))),
        lambda: limits,
    )
    assert found.split_ratios == ratios
    changed = ratios is not None and "split_ratios" not in flags
    assert bool(note) == changed
    if changed:
        assert f"--split_ratios={','.join(ratios)}." in note


def test_without_gpus_nothing_is_asked():
    settings = search_flags.Search()
    found = probing.with_ratios_by_memory(settings, Devices(("a", "b"), "a"), None)
    assert found == (settings, "")

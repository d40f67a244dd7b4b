"""The verdict on the input: on pipelines that are slow on purpose."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from towers import multi_gpu_model
from towers.input_pipeline import ArraySource, make_dataset, open_source
from towers.loop.timers import Totals
from towers.monitoring.bottleneck import tfdata_stats, uneven
from towers.monitoring.bottleneck.starvation import Starvation
from towers.monitoring.bottleneck.tfdata_stats import Stage
from towers.monitoring.bottleneck.verdict import (
    Advice,
    News,
    SpeedFinding,
    SpeedVerdict,
    bound_by,
    verdict,
)

ROOT = Path(__file__).parents[3]

# The verdict: a pure function.


def parts(**ms):
    """A step's parts, in ms; those that are not named take no time."""
    return dict.fromkeys(("input", "copy", "compute", "reduce", "python"), 0.0) | ms


def waits(waiting, step_ms):
    """A step of which the towers wait for a share, and compute for the rest of it."""
    return parts(input=step_ms * waiting / (1 - waiting), compute=step_ms)


def judge(parts_ms, found=(), advice=None):
    return str(verdict(parts_ms, bound_by(parts_ms), found, advice))


# Which verdicts are news.


def a_verdict(kind, *topics):
    tips = tuple(Advice(topic, f"try {topic}") for topic in topics)
    return SpeedVerdict(f"{kind}-bound", "towers waited", tips)


def said_of_intervals(*verdicts):
    news = News()
    return [news.of_interval(each) for each in verdicts]


def test_a_kind_is_said_once_it_has_lasted_two_intervals():
    compute, copy = a_verdict("compute"), a_verdict("copy")
    said = said_of_intervals(compute, compute, compute, copy, compute, copy, copy)
    assert [each and each.partition(":")[0] for each in said] == [
        *(None, "compute-bound", None),
        *(None, None, None, "copy-bound"),
    ]


def test_new_advice_is_said_at_once_and_only_once():
    said = said_of_intervals(
        a_verdict("input", "cache"),
        a_verdict("input", "cache"),
        a_verdict("input", "cache", "prefetch"),
        a_verdict("copy"),
        a_verdict("copy"),
        a_verdict("input", "cache"),
        a_verdict("input", "cache"),
    )
    assert said == [
        "input-bound: towers waited; try cache",
        None,
        "input-bound: towers waited; try prefetch",
        None,
        "copy-bound: towers waited",
        None,
        "input-bound: towers waited",
    ]


def test_advice_with_other_figures_is_not_new():
    news, one = News(), a_verdict("compute")
    for ratios, is_new in (("3,2", True), ("5,3", False)):
        tip = Advice("split_ratios", f"try --split_ratios={ratios}")
        said = news.of_interval(one.plus(SpeedFinding("tower 1 is slowest", tip)))
        assert (said is not None) is is_new


def test_ratios_are_advised_once_whichever_tower_is_slow():
    news, one = News(), a_verdict("compute")
    for times_ms, is_new in (([1.0, 3.0], True), ([3.0, 1.0], False)):
        said = news.of_interval(one.plus(uneven.finding(times_ms, [1, 1])))
        assert ("--split_ratios" in (said or "")) is is_new


def test_the_last_verdict_is_always_said():
    news, one = News(), a_verdict("input", "cache")
    assert news.of_interval(one) == str(one)
    assert news.sentence(one) == "input-bound: towers waited"


def test_a_verdict_with_a_finding():
    one = a_verdict("compute").plus(SpeedFinding("hosts: none")).plus(None)
    assert str(one) == "compute-bound: towers waited; hosts: none"


PREFETCH = Stage("prefetch", "", 0.1, 1, 1, 2)
MAP = Stage("map", "decode", 60.0, 2, 2, 2)
BATCH = Stage("batch", "", 1.0, 1, 3, 0)
READ = Stage("TFRecord", "read", 20.0, 1, 3, 0)
INPUT = [PREFETCH, MAP, BATCH, READ]


BOUND = {
    # What an outside trial has seen called input-bound.
    "compute-bound: towers waited 8.3% of the time, computing took 92%": parts(
        input=1.2, compute=13.2
    ),
    "compute-bound: towers waited 1.2% of the time, computing took 99%": waits(
        0.012, 40
    ),
    "input-bound: towers waited 70% of the time": parts(input=7, compute=2, python=1),
    "copy-bound: towers waited 1.0% of the time, copying to towers took 60%": parts(
        input=1, copy=60, compute=39
    ),
    "reduce-bound: towers waited 0% of the time, reducing and applying took 70%": parts(
        reduce=7, compute=3
    ),
    "Python-bound: towers waited 0% of the time, Python took 80%": parts(
        python=0.8, compute=0.2
    ),
    # Ties, exact and close, in one order.
    "input- and compute-bound: towers waited 50% of the time, computing took 50%": (
        parts(input=5, compute=5)
    ),
    "input- and compute-bound: towers waited 48% of the time, computing took 52%": (
        parts(input=48, compute=52)
    ),
    "input- and compute-bound: towers waited 52% of the time, computing took 48%": (
        parts(input=52, compute=48)
    ),
    "copy- and reduce-bound: towers waited 0% of the time, copying to towers took 42%, "
    "reducing and applying took 38%": parts(copy=42, reduce=38, compute=20),
    "input- and compute- and copy- and reduce- and Python-bound: towers waited 20%": (
        dict.fromkeys(parts(), 1.0)
    ),
    # Steps of a microsecond.
    "Python-bound: towers waited 10% of the time, Python took 60%": parts(
        input=1e-4, compute=3e-4, python=6e-4
    ),
    "input-bound: towers waited 100% of the time": parts(input=1e-6),
}


@pytest.mark.parametrize("said", BOUND)
def test_a_step_is_bound_by_its_largest_part(said):
    assert judge(BOUND[said]).startswith(said)


@pytest.mark.parametrize("said", BOUND)
def test_only_what_takes_most_is_named(said):
    """The figures in the sentence are the largest, besides that of waiting."""
    parts_ms = BOUND[said]
    bound = bound_by(parts_ms)
    assert max(parts_ms, key=parts_ms.get) in bound
    others = [ms for name, ms in parts_ms.items() if name not in bound]
    assert min(parts_ms[name] for name in bound) > max(others, default=-1)


def test_lines_that_follow_one_another_say_the_same():
    """Of two parts that are as long, now this is longer, and now that."""
    random = np.random.default_rng(0)
    for share in (0.3, 0.4, 0.45, 0.5):
        bound, changes = (), -1
        for noise in random.uniform(-0.04, 0.04, 200):
            waited = share + noise
            now = bound_by(parts(input=waited, compute=1 - waited), bound)
            changes, bound = changes + (now != bound), now
        # Where it is close to a border, it may cross it once.
        assert changes <= 1
    assert bound_by(parts(input=30, compute=70), bound) == ("compute",)


def test_a_slow_map():
    assert judge(waits(0.6, 15), INPUT) == (
        "input-bound: towers waited 60% of the time; the slowest stage is `map` "
        "(decode); try this: do less in it, .cache() what it makes, or give the input "
        "more CPU cores, here or by tf.data's service"
    )
    one = MAP._replace(threads=1)
    assert "num_parallel_calls=tf.data.AUTOTUNE" in judge(waits(0.6, 15), [one])


def test_waiting_is_explained_where_it_is_worth_it():
    said = judge(waits(0.3, 15), INPUT)
    assert said.startswith(
        "compute-bound: towers waited 30% of the time, computing took 70%; the slowest "
        "stage is `map` (decode); try this: "
    )
    said = judge(waits(0.09, 15), INPUT)
    assert said == "compute-bound: towers waited 9.0% of the time, computing took 91%"


def test_advice_of_ones_own_is_by_label():
    said = judge(waits(0.43, 15), INPUT, {"decode": "take smaller images"})
    assert said.endswith("`map` (decode); try this: take smaller images")


def test_slow_storage():
    stages_ = [PREFETCH, MAP, READ._replace(ms_per_batch=60.0)]
    said = judge(waits(0.12, 50), stages_)
    assert "the slowest stage is `TFRecord` (read); try this: keep the data on" in said


def test_stages_of_one_thread_add_up():
    several = [PREFETCH] + [Stage("map", n, 30.0, 1, 1, 0) for n in "ab"]
    assert tfdata_stats.pace_ms(several) == pytest.approx(60.1)
    assert "the slowest stage is `map` (a)" in judge(waits(0.2, 50), several)


@pytest.mark.parametrize("part", ["copy", "reduce", "python"])
def test_something_else_has_a_way_to_less_of_it(part):
    said = judge(parts(input=0.3, compute=4.0) | {part: 19.0}, INPUT)
    assert said.partition("82%; try ")[2]


def test_enough_batches_are_ahead():
    ready = [PREFETCH._replace(ahead=16)]
    said = judge(waits(0.11, 25), ready)
    assert said.endswith(
        "computing took 89%; a batch that is ready is handed over in 3.1 ms"
    )
    said = judge(waits(0.6, 0.2), ready)
    assert "is handed over in 0.3 ms; try a larger batch, or more steps" in said


def test_too_small_a_prefetch():
    said = judge(waits(0.43, 50), INPUT)
    assert "no stage is slower than a step, but the input runs no more than 2" in said
    assert said.endswith("try .prefetch(8) at its end, or more steps in a call")
    alone = [MAP._replace(segment=0, ahead=0)]
    assert "but the input runs no batch ahead" in judge(waits(0.43, 80), alone)
    assert judge(waits(0.43, 80), INPUT, {"prefetch": "more"}).endswith("try more")


def test_nothing_is_known():
    assert "tf.data has no statistics of this input" in judge(waits(0.43, 80), [])
    assert tfdata_stats.slowest([]) is None


# Real iterators with real statistics. How long a step takes is made up: a sleep takes
# at least its time, however busy the machine is, but nothing takes at most some time.

STEPS = 8


def nap(seconds, every=1):
    """A function of tensors that returns them, and sleeps at each `every`-th call."""
    calls = iter(range(10**6))

    def sleeps(value):
        if next(calls) % every == 0:
            time.sleep(seconds)
        return value

    def in_graph(x):
        return tf.ensure_shape(tf.numpy_function(sleeps, [x], x.dtype), x.shape)

    return in_graph


def numbers(function=None, name=None):
    data = tf.data.Dataset.range(10**6)
    if function is not None:
        data = data.map(function, name=name)
    return data.batch(2)


def zipped(path, mb):
    """A file of large records that take long to unpack: more of them than a test reads.

    The next file has a reader of its own, which begins without statistics.
    """
    options = tf.io.TFRecordOptions(compression_type="GZIP")
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for _ in range(32):
            writer.write(bytes(mb * 2**20))
    return str(path)


def without(data, **off):
    options = tf.data.Options()
    for name in off:
        setattr(options.experimental_optimization, name, off[name])
    return data.with_options(options)


def said_of(data, step_ms, steps=STEPS):
    """The verdict on so many batches, for steps that wait for more than half."""
    iterator = iter(data)
    for _ in range(steps):
        next(iterator)
    return judge(waits(0.6, step_ms), tfdata_stats.read(iterator).stages())


def decode(x):
    return nap(0.01)(x)


@pytest.mark.parametrize("name", [None, "resize"])
def test_a_map_that_sleeps(name):
    data = numbers(decode, name).prefetch(4)
    said = said_of(data, 5)
    assert f"the slowest stage is `map` ({name or 'decode'}); try this: pass it" in said


def test_a_map_that_sleeps_in_parallel():
    data = tf.data.Dataset.range(10**6).map(nap(0.04), num_parallel_calls=2)
    said = said_of(data.batch(2).map(lambda x: x + 1).prefetch(4), 5)
    # `in_graph`, as the function is called.
    assert "slowest stage is `map` (in_graph); try this: do less in it" in said


def test_storage_that_is_slow(tmp_path):
    files = tf.data.Dataset.from_tensors(zipped(tmp_path / "a", 2)).repeat()
    data = files.flat_map(lambda path: tf.data.TFRecordDataset(path, "GZIP"))
    said = said_of(data.map(tf.strings.length).batch(1).prefetch(4), 1)
    assert "the slowest stage is `TFRecord` (read); try this: keep the data on" in said


@pytest.mark.slow
def test_files_that_are_slow_in_parallel(tmp_path):
    paths = [zipped(tmp_path / name, 2) for name in "ab"]
    files = tf.data.Dataset.from_tensor_slices(paths).repeat()
    data = files.interleave(
        lambda path: tf.data.TFRecordDataset(path, "GZIP"),
        cycle_length=2,
        num_parallel_calls=2,
    )
    said = said_of(data.map(tf.strings.length).batch(1).prefetch(4), 1)
    assert "the slowest stage is `TFRecord` (read); try this: keep the data on" in said


def test_a_generator_that_is_slow():
    def generate():
        while True:
            time.sleep(0.01)
            yield 0

    spec = tf.TensorSpec([], tf.int64)
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    said = said_of(data.batch(2).prefetch(4), 5)
    assert (
        "slowest stage is `Generator` (read); try this: make a keras.utils.PyD" in said
    )


@pytest.mark.parametrize("ahead", [1, 16])
def test_bursts(ahead):
    said = said_of(numbers(nap(0.01, every=4)).prefetch(ahead), 1000)
    if ahead == 1:
        assert "no stage is slower than a step, but the input runs no more" in said
        assert "try .prefetch(8)" in said
    else:
        assert "a batch that is ready is handed over in" in said


def test_no_prefetch():
    data = without(numbers(nap(0.005)), inject_prefetch=False)
    said = said_of(without(data, map_and_batch_fusion=False), 1000)
    assert "no stage is slower than a step, but the input runs no batch ahead" in said


def test_later_readings_forget_earlier_ones():
    late = iter(range(10**6))

    def slows(x):
        time.sleep(0.02 if next(late) > 40 else 0)
        return x

    data = tf.data.Dataset.range(10**6).map(
        lambda x: tf.numpy_function(slows, [x], x.dtype), name="slows"
    )
    iterator = iter(without(data, inject_prefetch=False))
    for _ in range(40):
        next(iterator)
    first = tfdata_stats.read(iterator)
    for _ in range(5):
        next(iterator)
    reading = tfdata_stats.read(iterator, first)
    now, ever = (
        tfdata_stats.slowest(found)
        for found in (reading.stages(since=first), reading.stages())
    )
    assert now.label == ever.label == "slows"
    assert now.ms_per_batch > 15 > 5 > ever.ms_per_batch


class Slow(ArraySource):
    """A source that sleeps in one of the stages."""

    def __init__(self, stage, function):
        images = np.zeros([640, 4, 4, 1], np.uint8)
        super().__init__(images, np.zeros(640, np.int64), num_classes=2)
        self.stage, self.function = stage, function

    def parse(self, records):
        images, labels = super().parse(records)
        return images, self.function(labels) if self.stage == "parse" else labels


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("repeat", [True, False])
def test_our_own_stages_have_their_names(repeat):
    data = make_dataset(
        *(Slow("parse", nap(0.04)), "train"),
        batch_size=4,
        image_shape=(4, 4, 1),
        training=True,
        recipe="cifar",
        repeat=repeat,
    )
    iterator = iter(data)
    next(iterator)
    begun = tfdata_stats.read(iterator)
    for _ in range(8):
        next(iterator)
    found = tfdata_stats.read(iterator).stages(since=begun)
    labels = [stage.label for stage in found if stage.label]
    assert labels[:2] == ["augment", "parse"]
    assert str(tfdata_stats.slowest(found)) == "`map` (parse)"


def test_encoded_images_are_decoded(tmp_path):
    picture = tf.io.encode_png(np.zeros([4, 4, 1], np.uint8)).numpy()
    (tmp_path / "a").mkdir()
    for number in range(64):
        (tmp_path / "a" / f"{number}.png").write_bytes(picture)
    source = open_source(f"folder:{tmp_path}")
    data = make_dataset(
        *(source, "train"), batch_size=4, image_shape=(4, 4, 1), training=True
    )
    iterator = iter(data)
    next(iterator)
    stages = tfdata_stats.read(iterator).stages()
    found = [stage.label for stage in stages if stage.label]
    assert found[:3] == ["augment", "decode", "parse"]


def test_without_autotune_nothing_is_known():
    options = tf.data.Options()
    options.autotune.enabled = False
    iterator = iter(numbers().with_options(options))
    next(iterator)
    assert tfdata_stats.read(iterator) is None


def test_before_the_first_element():
    assert tfdata_stats.read(iter(numbers())).stages() is not None


_READS = """
import sys
import time
import tensorflow as tf
from towers.monitoring.bottleneck import tfdata_stats
from towers.monitoring.bottleneck.verdict import bound_by, verdict

data = tf.data.TFRecordDataset(sys.argv[1]).repeat().map(tf.strings.length)
iterator, waited, begun = iter(data.batch(4).prefetch(2)), 0.0, time.perf_counter()
for _ in range(30):
    asked = time.perf_counter()
    next(iterator)
    waited += time.perf_counter() - asked
    time.sleep(0.005)
waiting = waited / (time.perf_counter() - begun)
parts = {"input": waiting, "compute": 1 - waiting, "copy": 0, "reduce": 0, "python": 0}
print(verdict(parts, bound_by(parts), tfdata_stats.read(iterator).stages()))
"""


def can_slow_disks():
    if shutil.which("strace") is None:
        return False
    return not subprocess.run(["strace", "true"], capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(not can_slow_disks(), reason="strace is missing, or not allowed")
def test_a_disk_that_is_slow(tmp_path):
    path = str(tmp_path / "records")
    with tf.io.TFRecordWriter(path) as writer:
        for _ in range(300):
            writer.write(bytes(100_000))
    # The kernel takes 8 ms for each read of that file.
    slow = ["-e", "trace=pread64", "-P", path, "-e", "inject=pread64:delay_enter=8000"]
    done = subprocess.run(
        [
            "strace",
            "-f",
            "--seccomp-bpf",
            "-o",
            os.devnull,
            *slow,
            sys.executable,
            "-c",
            _READS,
            path,
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    assert "slowest stage is `TFRecord` (read); try this: keep the data" in done.stdout


# The callback, with phases of our own making.


class Phases:
    """Steps that take and wait as they are told."""

    hosts = None

    def __init__(self):
        self.steps, self.input_s, self.iterator = 0, 0.0, None

    def totals(self):
        return Totals(self.steps, self.input_s, 0.0, 0.0, 0.0, (0.0,))


class Run:
    """Calls a callback as Keras does; the clock is its own."""

    def __init__(self, **options):
        self.now, self.said = 0.0, []
        options = {"warmup_steps": 2, "terminal": False, "log_steps": 4} | options
        self.callback = Starvation(
            clock=lambda: self.now, say=self.said.append, **options
        )
        self.phases = Phases()
        builder = types.SimpleNamespace(timers=self.phases)
        optimizer = types.SimpleNamespace(iterations=0)
        model = types.SimpleNamespace(builder=builder, optimizer=optimizer)
        self.model = self.callback._model = model

    def steps(self, count, waits_s, takes_s=1.0, first=0):
        for batch in range(first, first + count):
            self.callback.on_train_batch_begin(batch)
            self.now += waits_s + takes_s
            self.phases.input_s += waits_s
            self.phases.steps += 1
            self.model.optimizer.iterations += 1
            self.callback.on_train_batch_end(batch)
            # Validation, saving, other callbacks.
            self.now += 5.0


def starts(run):
    """The beginnings of what was said, up to the share of waiting."""
    return [line.partition(" of the")[0] for line in run.said]


@pytest.fixture
def run():
    run = Run()
    run.callback.on_train_begin()
    return run


def test_the_share_is_that_of_the_training_calls(run):
    run.steps(2, waits_s=100.0)
    assert run.callback.waiting is None
    run.steps(4, waits_s=1.0)
    assert run.callback.waiting == pytest.approx(0.5)
    run.steps(4, waits_s=0.0)
    run.callback.on_train_end()
    assert run.callback.waiting == pytest.approx(4 / 12)
    assert starts(run) == [
        "step 4: input- and Python-bound: towers waited 50%",
        "whole run: Python-bound: towers waited 33%",
    ]
    # What it advises was said before.
    verdict = run.callback.verdict
    last = " ".join(run.said[-1].split())
    assert last == f"whole run: {verdict.kind}: {verdict.text}"


def test_data_that_end_keep_their_stages(run):
    # Longer than a busy machine may keep a thread of tf.data waiting.
    data = numbers(nap(0.02), "load").take(12)
    iterator = run.phases.iterator = iter(data)
    for _ in range(4):
        next(iterator)
    run.steps(5, waits_s=0.002, takes_s=0.001)
    assert "the slowest stage is `map` (load)" in run.callback.verdict.text
    for _ in iterator:
        pass
    # Of what is left of the pipeline, nobody could tell.
    run.steps(4, waits_s=0.002, takes_s=0.001)
    assert len(run.said) == 1
    assert "the slowest stage is `map` (load)" in run.callback.verdict.text


def test_measured_is_what_came_since(run):
    assert run.callback.measured() == {}
    run.steps(2, waits_s=9.0)
    assert run.callback.measured() == {}
    run.steps(3, waits_s=1.0)
    assert run.callback.measured()["waiting"] == pytest.approx(0.5)
    assert run.callback.measured() == {}
    run.steps(1, waits_s=3.0)
    assert run.callback.measured()["waiting"] == pytest.approx(0.75)


def test_sentences_split_and_curves_have_the_same_figures(run):
    """Over the same steps, without the warm-up."""
    curve = []
    for steps, waits_s in ((6, 0.5), (4, 3.0), (3, 0.25)):
        run.steps(steps, waits_s=waits_s, takes_s=0.75)
        found = run.callback.measured()
        ms = [found[f"step_ms/{name}"] for name in parts()]
        curve.append((steps - 2 * (not curve), np.array(ms), found["waiting"]))
    run.callback.on_train_end()
    # 11 steps, in which towers waited for 14.75 s.
    waited_ms, step_ms = 14750 / 11, 14750 / 11 + 750
    mean = sum(steps * ms for steps, ms, _ in curve) / 11
    np.testing.assert_allclose(mean, [waited_ms, 0, 0, 0, 750])
    for _, ms, waiting in curve:
        assert waiting == pytest.approx(ms[0] / ms.sum())
    assert run.callback.text() == (
        f"{step_ms:,.1f} ms: {waited_ms:,.1f} waiting for input, 0.0 copying to "
        "towers, 0.0 computing (by tower: 0.0), 0.0 reducing and applying, 750.0 in "
        "Python"
    )
    assert run.callback.waiting == pytest.approx(waited_ms / step_ms)
    assert f"towers waited {waited_ms / step_ms:.0%} of" in run.callback.verdict.text
    assert starts(run) == [
        "step 4: Python-bound: towers waited 40%",
        "step 12: input-bound: towers waited 68%",
        "whole run: input-bound: towers waited 64%",
    ]


def test_another_builder_begins_anew(run):
    run.steps(6, waits_s=9.0)
    run.phases = Phases()
    run.model.builder = types.SimpleNamespace(timers=run.phases)
    run.steps(1, waits_s=9.0)
    run.steps(3, waits_s=0.0)
    assert run.callback.waiting == 0


def test_on_a_terminal_the_progress_bar_stays_whole():
    run = Run(terminal=True)
    run.callback.on_train_begin()
    for epoch in range(2):
        run.callback.on_epoch_begin(epoch)
        run.steps(8, waits_s=0.0)
        assert len(run.said) == epoch
    run.callback.on_train_end()
    kinds = [line.partition(":")[0] for line in run.said]
    assert kinds == ["step 4", "whole run"]


def test_on_a_terminal_a_run_of_one_epoch_says_all_at_its_end():
    run = Run(terminal=True)
    run.callback.on_train_begin()
    run.callback.on_epoch_begin(0)
    run.steps(8, waits_s=0.0)
    assert run.said == []
    run.callback.on_train_end()
    first, last = run.said
    assert first.startswith("step 4: Python-bound") and "try a larger batch" in first
    assert last.startswith("whole run: ") and "try" not in last


def test_a_long_verdict_is_wrapped(run):
    run.steps(4, waits_s=1.0)
    first, *others = run.said[0].splitlines()
    assert first.startswith("step 4: ")
    assert len(others) > 1
    assert all(len(line) <= 100 for line in run.said[0].splitlines())
    assert all(line.startswith("  ") for line in others)


def test_what_does_not_fit():
    with pytest.raises(ValueError, match=r"log_steps=0; expected at least 1"):
        Starvation(0)


# With towers.


class Computes(keras.layers.Layer):
    """A layer that takes its time, on the first tower of each step.

    TensorFlow has a thread for each core; where both towers slept, none was left to
    look at the clock.
    """

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.lock = seconds, threading.Lock()

    def call(self, x):
        def sleeps(value):
            if self.lock.acquire(blocking=False):
                time.sleep(self.seconds)
                self.lock.release()
            return value

        # Not stateful: the towers would wait for one another.
        slept = tf.numpy_function(sleeps, [x], x.dtype, stateful=False)
        return x + 0 * tf.stop_gradient(tf.ensure_shape(slept, x.shape))


def rows(x):
    x = tf.cast(tf.reshape(x, [-1, 1]), tf.float32) / 1e6
    return x, x


@functools.cache
def trained(step_s, per_call):
    """Two towers with graphs: batches would pile up while those are built."""
    layers = [keras.layers.Dense(1), Computes(step_s)]
    model = keras.Sequential([keras.Input((1,)), *layers])
    model = multi_gpu_model(model, gpus=2, loss_placement="tower")
    model.compile(keras.optimizers.SGD(1e-3), "mse", steps_per_execution=per_call)
    model.fit(loaded(0), steps_per_epoch=per_call, verbose=0, shuffle=False)
    model.train_on_batch(*next(iter(loaded(0))))
    return model


def loaded(input_s):
    made = tf.data.Dataset.range(10**6).batch(4).map(nap(input_s), name="load")
    made = made.map(rows, name="rows").prefetch(2)
    # As it is written, and nothing else that runs ahead.
    return without(made, inject_prefetch=False, map_parallelization=False)


def from_slow_storage(input_s):
    def generate():
        while True:
            time.sleep(input_s)
            yield range(4)

    spec = tf.TensorSpec([4], tf.int64)
    data = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return data.map(rows).prefetch(2)


CASES = {
    # The data, steps in a call, steps, and what is named.
    "map": (lambda: loaded(0.15), 1, 12, "the slowest stage is `map` (load)"),
    "loop": (lambda: from_slow_storage(0.15), 4, 12, "stage is `Generator` (read)"),
    "it keeps up": (lambda: loaded(0.015), 1, 12, "compute-bound"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_bounds_a_run_is_named(case):
    data, per_call, steps, named = CASES[case]
    said = []
    callback = Starvation(5, warmup_steps=4, say=said.append, terminal=False)
    trained(0.075, per_call).fit(
        data(), steps_per_epoch=steps, callbacks=[callback], verbose=0, shuffle=False
    )
    assert named in str(callback.verdict)
    assert said[-1].startswith(f"whole run: {callback.verdict.kind}: ")

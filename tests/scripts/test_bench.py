"""The benchmark: who can race, what is made of the times, and one short race."""

import itertools
import json
import pathlib
import re
import subprocess
import sys

import pytest

from scripts import race
from scripts.bench import contenders, report, results
from scripts.bench.worker import Job
from scripts.bench.works import WORKS
from tests.limits import HANG_S

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "bench_towers.py"


_BY_HAND = ", ".join(contenders.KINDS["loop_by_hand"].works)


def _run(*flags):
    return subprocess.run(
        [sys.executable, SCRIPT, *flags], capture_output=True, text=True, timeout=HANG_S
    )


def _job(contender, work="mlp", towers=2):
    return Job(contender, work, towers, warmup=1, steps=2)


@pytest.mark.parametrize(
    ("text", "name", "way", "xla", "steps"),
    [
        ("towers", "towers", None, False, 1),
        ("towers:replicated", "towers", "replicated", False, 1),
        ("towers:parameter_server+xla@10", "towers", "parameter_server", True, 10),
        ("towers@10", "towers", None, False, 10),
        ("one_device+xla", "one_device", None, True, 1),
        ("mirrored_loop", "mirrored_loop", None, False, 1),
        ("tower_loop", "tower_loop", None, False, 1),
        ("loop_by_hand", "loop_by_hand", None, False, 1),
        ("tf_cnn:independent", "tf_cnn", "independent", False, 1),
    ],
)
def test_a_contender_is_read(text, name, way, xla, steps):
    assert contenders.parse(text) == contenders.Contender(text, name, way, xla, steps)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tower",
        "towers:",
        "towers@0",
        "towers@ten",
        "towers@10+xla",
        "towers/cells",
        "one_device/rows",
        "towers/state",
        "one_device:replicated",
        "mirrored@10",
        "jax+xla",
        "tf_cnn",
        "tf_cnn:asynchronous",
    ],
)
def test_what_is_no_contender_is_said_in_a_line(text):
    with pytest.raises(ValueError, match=r"contender") as raised:
        contenders.parse(text)
    assert repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_have_the_types_of_python():
    text = "towers@2?prefetch=0&packed=False&all_reduce=cpu&choice_file=None"
    assert dict(contenders.parse(text).options) == {
        **{"prefetch": 0, "packed": False},
        **{"all_reduce": "cpu", "choice_file": None},
    }
    for wrong in ("towers?", "towers?prefetch", "mirrored?prefetch=0"):
        with pytest.raises(ValueError, match="contender"):
            contenders.parse(wrong)


def test_labels_say_what_is_particular():
    assert contenders.parse("towers:replicated/rows").tables == "rows"
    assert contenders.parse("towers:replicated/state").shards_state
    assert contenders.parse("towers/auto").label == "Towers, tables: auto"
    label = contenders.parse("towers:replicated+xla@10").label
    assert label == "Towers, replicated, XLA, 10 steps a call"
    assert contenders.parse("mirrored").label == "Keras fit, MirroredStrategy"


def _rounds(*steps_ms):
    return [{"step_ms": ms} for ms in steps_ms]


def test_a_ratio_is_the_median_over_rounds():
    # The machine was twice as slow in the last round; ratios of medians would be 2.5.
    starts = [
        {"first_step_s": seconds, "host_mb": 100.0, "device_mb": None}
        for seconds in (3.0, 1.0, 2.0)
    ]
    result = results.summary(
        _job("mirrored"), starts, _rounds(4.0, 5.0, 8.0), _rounds(2.0, 1.0, 4.0)
    )
    assert result["ratio"] == 2.0
    assert result["step_ms"] == 5.0
    assert result["examples_per_sec"] == 2 * WORKS["mlp"].examples / 0.005
    assert result["first_step_s"] == 2.0
    assert result["device_mb"] is None
    assert result["rounds_ms"] == [4.0, 5.0, 8.0]


def test_without_the_first_contender_there_is_no_ratio():
    starts = [{"first_step_s": 1.0, "host_mb": 100.0, "device_mb": 20.0}]
    result = results.summary(_job("mirrored"), starts, _rounds(4.0), [])
    assert result["ratio"] is None
    assert report.row(report.cells(result)) == (
        "| mlp, 2 x 32 | Keras fit, MirroredStrategy | 4.00 | 16,000 | 1.0 | 100 | 20 "
        "| - |"
    )


def test_functions_take_turns():
    numbers = itertools.count()
    found = race.alternate(lambda name: f"{name}{next(numbers)}", "ab", rounds=3)
    assert found == {"a": ["a0", "a3", "a4"], "b": ["b1", "b2", "b5"]}
    assert race.ratio([4.0, 5.0, 8.0], [2.0, 1.0, 4.0]) == 2.0
    assert race.ratio([4.0], []) is None


@pytest.mark.parametrize("together", [False, True])
def test_who_fails_is_left_out(monkeypatch, together):
    times = {
        "towers": iter([2.0, 2.0, 2.0]),
        "mirrored": iter([4.0, 6.0, 8.0]),
        "ddp": iter([1.0]),
    }
    alive = []

    class Runner:
        start = {"first_step_s": 1.0, "host_mb": 1.0, "device_mb": None}  # noqa: RUF012

        def __init__(self, _, job, verbose, limit_s=None):
            self.job = job
            if job.contender == "jax":
                raise race.Failed("no jax")
            alive.append(job.contender)

        def go(self):
            for ms in times[self.job.contender]:
                return {"step_ms": ms}
            raise race.Failed("it ended")

        def close(self):
            alive.remove(self.job.contender)

    monkeypatch.setattr(results, "Runner", Runner)
    failures = []
    times = race.take_turns(
        [_job(name) for name in ("towers", "jax", "ddp", "mirrored")],
        results.start,
        rounds=3,
        fresh_starts=2,
        failed=lambda job, reason: failures.append((job.contender, reason)),
        together=lambda job: together,
    )
    assert failures == [("jax", "no jax"), ("ddp", "it ended")]
    assert [job.contender for job in times] == ["towers", "mirrored"]
    towers, mirrored = times.values()
    assert towers.rounds == _rounds(2.0, 2.0, 2.0)
    assert mirrored.rounds == _rounds(4.0, 6.0, 8.0)
    assert len(towers.starts) == len(mirrored.starts) == 2
    assert not alive


@pytest.mark.parametrize(
    ("contender", "work", "said"),
    [
        ("loop_by_hand", "embedding", f"it trains only {_BY_HAND}"),
        ("mirrored_loop", "dcgan", "it trains no model with a step of its own"),
        (
            "one_device@10",
            "wgan_gp",
            "the model compiles itself; leave +xla and @N out",
        ),
    ],
)
def test_who_cannot_train_a_work_is_left_out(contender, work, said):
    with pytest.raises(race.Failed, match=f"^{re.escape(said)}$"):
        results.start(_job(contender, work))


def test_the_head_of_a_table_has_its_columns():
    assert report.head(("work", "ms")) == "| work | ms |\n|---|---|"


def test_scaling_is_against_the_fewest_towers():
    results = [
        {
            "work": "mlp",
            "contender": "towers",
            "towers": towers,
            "examples_per_sec": examples_per_sec,
        }
        for towers, examples_per_sec in ((4, 3000.0), (1, 1000.0), (2, 1500.0))
    ]
    rows = report.scaling(results)
    assert [row["towers"] for row in rows] == [1, 2, 4]
    assert [row["speedup"] for row in rows] == [1.0, 1.5, 3.0]
    assert [row["efficiency"] for row in rows] == [1.0, 0.75, 0.75]
    assert list(report.scaling_table(rows))[-1] == (
        "| mlp | Towers | 4 | 3,000 | 3.00 | 75% |"
    )


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    results = [
        {"work": work, "contender": "towers", "towers": k, "examples_per_sec": 10.0 * k}
        for work in ("mlp", "resnet20")
        for k in (1, 2)
    ]
    path = tmp_path / "scaling.png"
    report.plot(report.scaling(results), str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--contenders=towers,fastest", "There is no contender 'fastest'"),
        ("--contenders=towers,towers", "none twice"),
        ("--work=vgg", "--work has 'vgg'"),
        ("--scaling=1,two", "numbers of towers"),
        ("--plot=scaling.png", "--plot is drawn of --scaling"),
    ],
)
def test_a_wrong_flag_is_said_in_a_line(flag, said):
    done = _run(flag)
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not done.stdout


@pytest.mark.slow
def test_a_short_race(tmp_path):
    path = tmp_path / "results.jsonl"
    done = _run(
        "--work=mlp",
        "--contenders=towers:parameter_server,tf_cnn:replicated,one_device@2",
        "--rounds=2",
        "--warmup=0",
        "--steps=2",
        f"--json={path}",
    )
    assert done.returncode == 0, done.stderr
    # Who cannot start is left out, in a line.
    assert done.stderr.startswith("tf_cnn:replicated is left out of mlp, 2 towers: ")
    assert "--tf_cnn_dir" in done.stderr
    assert done.stderr.count("\n") == 1
    towers, one_device = map(json.loads, path.read_text().splitlines())
    names = towers["contender"], one_device["contender"]
    assert names == ("towers:parameter_server", "one_device@2")
    assert towers["ratio"] == 1
    for result in (towers, one_device):
        assert len(result["rounds_ms"]) == 2
        assert result["step_ms"] > 0
        assert result["first_step_s"] > 0
        assert result["host_mb"] > 100
        assert report.row(report.cells(result)) in done.stdout.splitlines()

"""Which towers are tried, what is said of them, and whether it holds."""

import json
import re
from unittest import mock

import numpy as np
import pytest

from tests import warm
from towers.find_batch_size import child
from towers.machine import limits
from towers.monitoring.bottleneck import uneven
from towers.scaling import __main__ as program
from towers.scaling import law, measure, scaling_flags
from towers.scaling import trial as of_process
from towers.scaling.measure import Trial
from towers.scaling.network import Network, sum_s
from towers.scaling.report import ScalingReport

MODULE = "towers.scaling"


def trial(count, speed, ratios=None, towers_ms=None, **parts_ms):
    """What might have been measured with so many towers, at so many examples/s."""
    ratios = ratios or (1,) * count
    parts = dict.fromkeys(("input", "copy", "compute", "reduce", "python"), 0.5)
    return Trial(
        [f"/device:CPU:{k}" for k in range(count)],
        ratios,
        [64 * each // sum(ratios) for each in ratios],
        fits=True,
        examples_per_sec=speed,
        parts_ms=parts | parts_ms,
        towers_ms=towers_ms or [10.0] * count,
        peak_memory_mb=500.0 + count,
        gradient_bytes=4_000_000,
    )


def unfit(count):
    return Trial([""] * count, (1,) * count, (1,) * count, fits=False, why="OOM")


# Amdahl's law.


def test_the_law_is_found_in_times_that_follow_it():
    found = law.fit([(n, 0.2 + 0.8 / n) for n in (1, 2, 3, 4)])
    assert found.serial_fraction == pytest.approx(0.2)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.step_s(8) == pytest.approx(0.3)


def test_the_error_is_that_of_repeated_fits():
    draw = np.random.default_rng(0)
    counts = (1, 2, 3, 4) * 2
    fits = [
        law.fit([(n, (0.3 + 0.7 / n) * draw.normal(1, 0.03)) for n in counts])
        for _ in range(400)
    ]
    spread = np.std([each.serial_fraction for each in fits])
    assert np.median([each.error for each in fits]) == pytest.approx(spread, rel=0.2)


def test_two_measurements_tell_no_error():
    found = law.fit([(1, 1.0), (2, 0.75)])
    assert found.serial_fraction == pytest.approx(0.5)
    assert found.error is None
    assert law.fit([(2, 1.0), (2, 0.9)]) is None


def test_a_fraction_is_none_below_0_or_above_1():
    assert law.fit([(1, 1.0), (2, 0.4)]).serial_fraction == 0.0
    assert law.fit([(1, 1.0), (2, 1.5)]).serial_fraction == 1.0


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        # Within two standard errors, what is found may be nothing.
        ([(1, 64), (1, 90), (2, 64), (2, 45)], "cannot be told"),
        ([(1, 64), (1, 90), (2, 200), (2, 130)], "cannot be told"),
        # What is found is small, and sure.
        ([(1, 64), (1, 64), (2, 128), (2, 128)], "0% (+/- 0%) of a step"),
        ([(1, 64), (1, 65), (2, 80), (2, 81)], "so the speed-up is at most 1."),
        # Of two measurements, no error is known.
        ([(1, 64), (2, 80)], "60% of a step with one tower does not become shorter"),
    ],
)
def test_a_bound_is_named_only_if_it_can_be_told(speeds, said):
    text = str(ScalingReport([trial(*each) for each in speeds], 64))
    assert said in text
    unsure = said == "cannot be told"
    assert ("measure longer (--seconds, --rounds)" in text) == unsure
    assert not (unsure and "at most 1" in text)


# What is tried.


def test_numbers_are_tried_up_and_down():
    ran = []

    def run(count, ratios):
        ran.append((count, ratios))
        return trial(count, 100.0)

    assert len([*measure.trials([1, 2, 3], 3, run)]) == 9
    assert [count for count, _ in ran] == [1, 2, 3, 3, 2, 1, 1, 2, 3]


def test_what_does_not_fit_is_not_tried_again():
    found = measure.trials(
        [1, 2], 2, lambda n, _: unfit(n) if n == 1 else trial(n, 9.0)
    )
    assert [each.count for each in found] == [1, 2, 2]


def test_uneven_ratios_are_tried_where_towers_take_unequally_long():
    slow = {1: [60.0], 2: [40.0, 20.0]}
    ran = []

    def run(count, ratios):
        ran.append((count, ratios))
        return trial(count, 100.0, ratios, slow[count])

    assert len([*measure.trials([1, 2], 2, run)]) == 6
    assert ran[:4] == [(1, None), (2, None), (2, None), (1, None)]
    assert ran[4:] == [(2, (1, 2))] * 2


def test_towers_that_share_cores_are_not_compared(monkeypatch):
    monkeypatch.setattr(limits, "cpu_count", lambda: 1)
    slow = {1: [60.0], 2: [40.0, 20.0]}

    def run(count, ratios):
        return trial(count, 100.0, ratios, slow[count])

    assert len([*measure.trials([1, 2], 1, run)]) == 2


def test_rounds_are_put_together():
    speeds = {100.0: 1.0, 30.0: 2.0, 90.0: 3.0}
    rounds = [trial(2, speed, input=ms) for speed, ms in speeds.items()]
    found = measure.medians([*rounds, trial(1, 50.0)])
    assert [each.count for each in found] == [1, 2]
    assert found[1].examples_per_sec == 90.0
    assert found[1].parts_ms["input"] == 3.0
    assert found[1].error == pytest.approx(1.25 * 37.86 / 3**0.5, rel=1e-3)
    assert found[0].error == 0.0


def test_more_towers_have_to_be_faster_by_more_than_the_error():
    rounds = [trial(1, 100.0), trial(1, 100.0), trial(2, 108.0)]
    assert ScalingReport([*rounds, trial(2, 109.0)], 64).best.count == 2
    assert ScalingReport([*rounds, trial(2, 130.0), trial(2, 90.0)], 64).best.count == 1


# What is recommended.


@pytest.mark.parametrize(
    ("speeds", "count", "said"),
    [
        ([100, 190, 280], 3, "3 towers (--num_gpus=3); compared with 2, another tower"),
        ([100, 190, 195], 2, "2 towers (--num_gpus=2); another tower adds 3%"),
        ([100, 60, 50], 1, "1 tower (--num_gpus=1); another tower makes training 40%"),
        ([100, 101, 102], 1, "1 tower (--num_gpus=1); another tower adds 1%"),
        ([100], 1, "1 tower (--num_gpus=1)."),
    ],
)
def test_the_fewest_that_are_about_as_fast_are_recommended(speeds, count, said):
    report = ScalingReport([trial(n + 1, each) for n, each in enumerate(speeds)], 64)
    assert report.best.count == count
    assert said in report.recommendation


def test_the_reason_is_what_becomes_longer():
    one = trial(1, 100.0, compute=10.0)
    two = trial(2, 80.0, compute=5.1, reduce=9.0)
    assert (
        "because adding gradients and updating the variables takes 9.0 ms of a step "
        "instead of 0.5." in ScalingReport([one, two], 64).recommendation
    )
    # Where none does, nothing is guessed.
    said = ScalingReport([one, trial(2, 80.0, compute=5.0)], 64).recommendation
    assert "slower" in said and "because" not in said


def test_uneven_ratios_are_recommended_where_they_are_faster():
    tried = [trial(1, 90.0), trial(2, 100.0), trial(2, 150.0, (1, 2))]
    report = ScalingReport(tried, 64)
    assert "--num_gpus=2 --split_ratios=1,2" in report.recommendation
    assert "2 (1:2)" in str(report)
    # The law is that of equal parts.
    assert report.law.serial_fraction == pytest.approx(0.8)


def test_what_does_not_fit_is_said():
    report = ScalingReport([unfit(1), trial(2, 100.0)], 64)
    assert report.best.count == 2
    assert "1 tower did not fit: OOM." in report.recommendation
    assert "does not fit" in str(report)


def test_hosts_are_predicted_by_the_model_of_the_docs():
    one = trial(2, 64 / 0.3, compute=300.0, input=0, copy=0, reduce=0, python=0)
    report = ScalingReport([one], 64, more_hosts=8, network=Network(0.1, 10.0))
    found = {hosts: (slow, fast) for hosts, slow, fast in report.predicted()}
    assert [*found] == [2, 4, 8]
    # docs/scale/scaling.md has 36 ms for 4 MB on 8 hosts at 10 Gbit/s.
    slow, fast = found[8]
    assert 64 / slow - 0.3 / 8 == pytest.approx(0.036, abs=0.001)
    assert 64 / fast == pytest.approx(0.3 / 8)
    assert "Predicted, not measured: hosts with 2 towers each" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["hosts"]["8"]


@pytest.mark.parametrize(
    ("hosts", "size", "messages"),
    [(2, 99, 2), (3, 99, 4), (4, 2**16, 6), (5, 2**16, 8)],
)
def test_messages_that_hosts_send_to_add(hosts, size, messages):
    assert sum_s(hosts, size, message_s=1.0, byte_s=0.0) == messages


def test_a_chart_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    report = ScalingReport([trial(1, 100.0), trial(2, 180.0)], 64)
    report.plot(str(tmp_path / "scaling.svg"))
    text = (tmp_path / "scaling.svg").read_text()
    assert text.startswith("<?xml")


# Flags.


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--split_ratios=1,2", "--split_ratios=1,2; expected none"),
        (
            "--gpu_split=2 --gpu_memory=1000",
            "--gpu_split=2; expected none",
        ),
        ("--eval_only", "--eval_only; expected none"),
        ("--share_gpus=0.5", "--share_gpus=0.5; expected none"),
        ("--rounds=0", "--rounds=0; expected at least 1"),
        ("--plot=x.gif", "--plot=x.gif; expected a SVG or PNG file"),
    ],
)
def test_flags_are_checked(flag, said):
    done = warm.run(MODULE, *flag.split())
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--model=mlp --model_dir=x --clean --train_epochs=5 --save_every=9",
            "--model_dir=x --clean --train_epochs=5 --save_every=9",
        ),
        ("--model=mlp --nohistograms --max_train_steps=7", "--max_train_steps=7"),
        # It decides what is kept in memory.
        ("--train_epochs=1", ""),
        ("--model=mlp --num_gpus=2 --seconds=3 --save_every=10min", ""),
    ],
)
def test_flags_without_effect_are_told(flags, said, capsys):
    scaling_flags.read([MODULE, *flags.split()], "What it is for.")
    line = f"{MODULE}: These flags have no effect here: {said}.\n"
    assert capsys.readouterr().err == (line if said else "")


# Uneven towers.


def test_ratios_follow_speeds():
    assert uneven.better_ratios([61.0, 45.0, 45.0], (1, 1, 1)) == (3, 4, 4)
    assert uneven.better_ratios([20.0, 10.0], (1, 1)) == (1, 2)
    # The times are those with the ratios in use.
    assert uneven.better_ratios([10.0, 10.0], (1, 2)) == (1, 2)
    assert uneven.better_ratios([10.0, 10.1, 9.9, 10.0], (1, 1, 1, 1)) == (1, 1, 1, 1)
    # No others have room.
    assert uneven.better_ratios([20.0, 10.0], (1, 1), [0.3, 0.3]) == (1, 1)


def test_the_step_with_other_ratios():
    assert uneven.step_with([20.0, 10.0], (1, 1), (1, 2)) == pytest.approx(2 / 3)


def test_a_slow_tower_is_named():
    text, advice = uneven.finding([61.0, 45.0, 45.0], (1, 1, 1))
    assert text == "tower 0 is slowest: 61.0 ms, others 45.0 ms"
    assert advice == ("split_ratios", "try --split_ratios=3,4,4")
    # Of so many, none may have less.
    found = uneven.finding([12.0, *[10.0] * 23], (1,) * 24)
    assert found == ("tower 0 is slowest: 12.0 ms, others 10.0 ms", None)
    assert uneven.finding([10.0, 10.5], (1, 1)) is None
    assert uneven.finding([10.0], (1,)) is None


# The whole program.


def settings_of(*flags):
    data = "--model=mlp", "--dataset=synthetic:4x4x1:3:320", "--batch_size=32"
    return scaling_flags.read([MODULE, *data, *flags], "What it is for.")


def test_it_measures_one_tower(monkeypatch, tmp_path, capsys):
    """The process that it asks is played by this one."""

    def ask(module, flags, too_long):
        settings = scaling_flags.read_checked([module, *flags])
        told = {}
        of_process.train(settings, told.update)
        return told

    monkeypatch.setattr(child, "ask", ask)
    plot = tmp_path / "scaling.svg"
    flags = "--num_gpus=1", "--seconds=0.3", "--rounds=1", "--json", f"--plot={plot}"
    flags = *flags, "--variable_update=parameter_server"
    assert program.scale(settings_of(*flags)) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^towers\.scaling: 1 tower: [\d,.]+ examples/sec$", err, re.M)
    (told,) = json.loads(out.splitlines()[-1])["trials"]
    assert told["towers"] == ["/device:CPU:0"] and told["sizes"] == [32]
    assert told["examples_per_sec"] > 0 and told["parts_ms"]["compute"] > 0
    # Weights in float32.
    assert told["gradient_bytes"] == 4 * (17 * 512 + 513 * 512 + 513 * 3)
    assert plot.read_text().startswith("<?xml")


def test_no_step_was_measured():
    settings = settings_of("--num_gpus=1", "--variable_update=parameter_server")
    with pytest.raises(ValueError, match="in which no step was measured; expected mor"):
        of_process.train(settings.but(seconds=1e-9), lambda **facts: None)


@pytest.mark.parametrize(
    ("tried", "code", "said"),
    [
        (
            [trial(1, 60.0), trial(2, 90.0, (1, 2))],
            0,
            "2 towers (1:2): 90.0 examples/s",
        ),
        ([trial(1, 60.0), KeyboardInterrupt], 130, "Stopped by Ctrl-C."),
        ([KeyboardInterrupt], 130, "Stopped by Ctrl-C."),
        ([unfit(1), unfit(2)], "No number of towers fits (OOM); allow", "t fit (OOM)"),
    ],
)
def test_what_may_come_of_it(monkeypatch, capsys, tried, code, said):
    answers = [vars(each) if isinstance(each, Trial) else each for each in tried]
    monkeypatch.setattr(child, "ask", mock.Mock(side_effect=answers))
    settings = settings_of("--num_gpus=2", "--rounds=1")
    if isinstance(code, str):
        with pytest.raises(ValueError, match=re.escape(code)):
            program.scale(settings)
    else:
        assert program.scale(settings) == code
    out, err = capsys.readouterr()
    assert said in err
    # What was measured before it was stopped is shown.
    assert ("Recommended" in out) == (tried[0] == trial(1, 60.0))


@pytest.mark.slow
def test_it_measures_one_and_two_towers(tmp_path):
    flags = "--num_gpus=2", "--seconds=0.5", "--rounds=1", "--model=mlp"
    folder = f"--model_dir={tmp_path / 'run'}"
    done = warm.run(MODULE, "--json", *flags, folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    even = [each for each in found["trials"] if len({*each["split_ratios"]}) == 1]
    assert [len(each["towers"]) for each in even] == [1, 2]
    assert all(each["fits"] and each["examples_per_sec"] > 0 for each in even)
    assert sum(even[1]["sizes"]) == 64
    assert 0 <= found["serial_fraction"] <= 1
    assert found["recommended"] in (1, 2)
    assert not (tmp_path / "run").exists()  # nothing is saved


def test_too_few_devices_for_the_stages():
    flags = "--stages=2", "--num_gpus=1", "--model=mlp"
    done = warm.run(MODULE, *flags)
    assert done.returncode == 1
    assert "--stages=2 for 1 device; expected a device for each stage" in done.stderr


def test_an_error_of_the_model_is_a_sentence():
    flags = "--num_gpus=1", "--dataset=folder:/nowhere"
    done = warm.run(MODULE, *flags)
    assert done.returncode == 1
    assert "/nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_flags_of_a_trial_are_those_of_the_run():
    settings = scaling_flags.Scaling(model="mlp", gpu_indices=("3", "1", "0"), stages=1)
    said = settings.for_a_trial(2, (1, 2), "/tmp/x")
    assert {"--gpu_indices=3,1", "--split_ratios=1,2", "--seconds=5.0"} <= {*said}
    assert not any(each.startswith("--num_gpus") for each in said)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({}, "--num_gpus=3"),
        ({"stages": 2}, "--num_gpus=6"),
        ({"gpu_indices": ("5", "3", "1", "0")}, "--gpu_indices=5,3,1"),
    ],
)
def test_the_recommended_flag_gives_the_recommended_towers(settings, flag):
    flag_of = scaling_flags.Scaling(model="mlp", **settings).devices_flag
    tried = [trial(1, 100.0), trial(3, 290.0)]
    found = ScalingReport(tried, 64, devices_flag=flag_of).recommendation
    assert found.startswith(f"Recommended: 3 towers ({flag})")

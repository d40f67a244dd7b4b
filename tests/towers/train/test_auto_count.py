"""How many GPUs --num_gpus=auto finds, and remembers."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.towers.train.runs import TWO_STEPS, finish, start
from towers.hosts import group
from towers.hosts.group import Membership
from towers.train.parts import auto_count, devices
from towers.train.settings import Settings


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What towers.scaling is asked; it recommends as many as `answer` has."""

    class Scaling:
        settings = Settings(num_gpus="auto", model_dir=str(tmp_path / "new"))

        def __init__(self):
            self.answer, self.ratios, self.asked = 3, None, []

        def measure(self, settings):
            self.asked.append(settings)
            said = f"Recommended: {self.answer} towers."
            ratios = self.ratios or [1] * self.answer
            return {
                "recommended": self.answer,
                "recommendation": said,
                "split_ratios": ratios,
            }

    scaling = Scaling()
    monkeypatch.setattr(auto_count, "_measure", scaling.measure)
    return scaling


def test_it_is_measured_once(asked, capsys):
    assert auto_count.find(asked.settings) == 3
    assert "towers: --num_gpus=auto: Recommended: 3" in capsys.readouterr().err
    asked.answer = 2
    assert auto_count.find(asked.settings) == 3
    assert "Recommended: 3" in capsys.readouterr().err
    assert len(asked.asked) == 1


@pytest.mark.parametrize(
    "changed", [{"batch_size": 32}, {"max_gpus": 4}, {"clean": True}, {"stages": 2}]
)
def test_another_run_is_measured_anew(asked, changed):
    auto_count.find(asked.settings)
    asked.answer = 2
    other = asked.settings.but(**changed)
    assert auto_count.find(other) == 2 * other.stages
    assert auto_count.find(other.but(clean=False)) == 2 * other.stages
    assert len(asked.asked) == 2


@pytest.mark.parametrize("found_too", [False, True])
def test_uneven_ratios_that_are_not_used_are_said(asked, capsys, found_too):
    asked.ratios = [1, 2, 2]
    ratios = ("auto",) if found_too else None
    auto_count.find(asked.settings.but(split_ratios=ratios))
    said = "This run has equal parts" in capsys.readouterr().err
    assert said is not found_too


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"num_gpus": "2", "for": 1}'])
def test_a_file_that_nobody_of_ours_has_written(asked, text):
    auto_count.find(asked.settings)
    path = Path(asked.settings.absolute_model_dir, auto_count.FILE)
    path.write_text(text)
    assert auto_count.find(asked.settings) == 3
    assert json.loads(path.read_text())["num_gpus"] == 3
    assert len(asked.asked) == 2


def test_a_file_that_cannot_be_written(asked, tmp_path, capsys):
    (tmp_path / "new").write_text("")
    assert auto_count.find(asked.settings) == 3
    said = capsys.readouterr().err
    assert "Warning: What --num_gpus=auto has found cannot be kept" in said


def test_an_evaluation_measures_nothing(asked):
    assert auto_count.find(asked.settings.but(eval_only=True)) is None
    auto_count.find(asked.settings)
    assert auto_count.find(asked.settings.but(eval_only=True)) == 3
    assert len(asked.asked) == 1


def test_several_hosts(asked, monkeypatch):
    several = Membership(0, ("a:1", "b:1"), ("host 0", "host 1"))
    monkeypatch.setattr(group, "joined", lambda: several)
    with pytest.raises(ValueError, match="--num_gpus=auto on several hosts; expected"):
        auto_count.find(asked.settings)


def test_a_measurement_that_fails(tmp_path, monkeypatch):
    real, commands = subprocess.Popen, []

    def popen(command, **options):
        commands.append(command)
        return real(["false"], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    settings = Settings(
        num_gpus="auto", max_gpus=4, split_ratios=("auto",), model_dir=str(tmp_path)
    )
    with pytest.raises(ValueError, match=r"could not be measured .* --num_gpus=2"):
        auto_count.find(settings)
    ((_, _, program, _, *flags),) = commands
    assert program == "towers.scaling"
    assert "--num_gpus=4" in flags
    assert not [each for each in flags if "max_gpus" in each or "ratios" in each]


def test_the_devices_are_as_many(asked, monkeypatch):
    found = {}

    def configure(count, **more):
        found.update(count=count)

    monkeypatch.setattr(devices, "configure", configure)
    devices.configure_devices(asked.settings)
    assert found == {"count": 3}


@pytest.mark.slow
def test_a_run(tmp_path):
    flags = (*TWO_STEPS, "--num_gpus=auto", f"--model_dir={tmp_path}")
    done = finish(start(*flags))
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    found = json.loads((tmp_path / auto_count.FILE).read_text())
    assert f"towers: --num_gpus=auto: {found['recommendation']}" in err
    assert "towers.scaling: 2 towers: " in err
    assert f"on {found['num_gpus']} tower" in out
    assert "--num_gpus=auto" in (tmp_path / "flags.txt").read_text()
    # Nothing is measured again.
    assert "towers.scaling" not in finish(start(*flags)).stderr

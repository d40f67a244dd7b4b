"""Flags of towers.train: their help, checks, and how they repeat a run."""

import dataclasses
import inspect
import math
import os
import re

import keras
import pytest

import towers
from tests.towers.train.runs import (
    ROOT,
    finish,
    start,
)
from towers import devices
from towers.builders.strategies import STRATEGIES
from towers.collectives import reduce
from towers.monitoring.profile import callback as profile
from towers.program.flags import command_line, old_flags, table
from towers.train import checks, job, settings
from towers.train.parts import devices as parts_devices
from towers.train.parts import task
from towers.train.settings import Settings


def test_help_is_short_and_helpfull_complete():
    short, full = (finish(start(flag)).stdout for flag in ("--help", "--helpfull"))
    needed = "model dataset num_gpus batch_size image_size num_classes recipe "
    needed += "lr_schedule eval_dataset"
    for flag in needed.split():
        assert re.search(rf"^  --{flag} ", short, re.M)
    for line in ("Default: cnn.", "Exit codes", "\nData:\n", "\nDevices:\n"):
        assert line in short
    assert len(short.splitlines()) <= 100
    assert "--steps_per_loop" not in short
    for flag in ("model", "steps_per_loop", "gpu_memory", "[no]soft_placement"):
        assert f"  --{flag}" in full
    assert full.count("\n  --") == len(settings.NAMES) + 1  # and --verbosity
    for text in (short, full):
        assert max(map(len, text.splitlines())) <= 88
    # TensorFlow's and absl's own.
    assert not re.search("test_srcdir|xml_output|log_dir|pdb", full)


def test_each_setting_is_a_flag_with_all_that_is_known_of_it():
    assert {*settings.NAMES} == {f.name for f in dataclasses.fields(Settings)}
    assert len(settings.NAMES) <= 91
    assert command_line.read(Settings, ["test"]) == Settings()
    for name, info in table.rows(Settings).items():
        assert info.heading and info.text.endswith("."), name
        assert {*info.defined_by} <= {*settings.OWN_NAMES}, name


def test_nothing_but_the_command_line_reads_flags_of_absl():
    for folder in ("towers", "input_pipeline"):
        for path in (ROOT / folder).rglob("*.py"):
            used = re.search(r"\bFLAGS\.|from absl import flags", path.read_text())
            names = "command_line.py table.py old_flags.py commands.py"
            assert not used or path.name in names.split(), path


def test_names_that_flags_know_are_those_of_the_tables():
    """They are checked before what they name is imported."""
    assert sorted(settings.BUILDERS) == sorted(STRATEGIES)
    assert sorted(settings.ALL_REDUCE_ALGS) == sorted(reduce.ALGORITHMS)
    assert checks.MOST_PROFILED_STEPS == profile.MOST_STEPS
    optimizers = {
        name
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        # Not those that wrap other optimizers.
        and "learning_rate" in inspect.signature(value).parameters
        and name != "Optimizer"
    }
    assert set(settings.OPTIMIZERS) == optimizers
    assert settings.TASKS == tuple(task.TASKS)


def test_what_own_data_leave_no_room_for():
    rows = table.rows(Settings)
    headings = "Data", "Images", "Input pipeline"
    of_data = {name for name, info in rows.items() if info.heading in headings}
    # How many classes there are nothing else may tell; and towers still prefetch, and
    # evaluate on as much as is wished.
    others = {"num_classes", "prefetch", "eval_steps"}
    replaced = {n for n, info in rows.items() if "train_data" in info.defined_by}
    assert replaced == of_data - others


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rate": float("nan")}, "--learning_rate=nan; expected at least"),
        ({"profile_steps": ("5",)}, "--profile_steps=5; expected the first and"),
        ({"profile_steps": ("5", "5")}, "--profile_steps=5,5; expected the first"),
        ({"profile_steps": ("0", "5")}, "--profile_steps=0,5; expected the first"),
        ({"profile_steps": ("a", "5")}, "--profile_steps=a,5; expected the first"),
        ({"randaugment": ("2",)}, "--randaugment=2; expected layers"),
        ({"randaugment": ("2", "11")}, "--randaugment=2,11; expected layers"),
        ({"randaugment": ("999", "9")}, "--randaugment=999,9; expected layers"),
        ({"data_service": ""}, "--data_service=; expected the address"),
        ({"data_service": "grpc://localhost:1"}, "where no dispatcher answers"),
        ({"mix": ("mixup:-1",)}, "--mix=mixup:-1; expected mixup:0.2, cutmix:1, or"),
        ({"mix": ("cutout:1",)}, "--mix=cutout:1; expected mixup:0.2, cutmix:1"),
        ({"splits": ("a", "b", "c")}, "--splits=a,b,c; expected one or two"),
        ({"bad_records": "skip:x"}, "--bad_records=skip:x; expected fail, skip, or"),
        ({"save_every": ("5s",)}, "--save_every=5s; expected 500 steps, 10min"),
        ({"save_every": ("5", "6")}, "--save_every=5,6; expected 500 steps"),
        ({"on_stall": "stop:a"}, "--on_stall=stop:a; expected wait:300, stop:300"),
        ({"model_options": ("depth=2",)}, "=depth=2; expected each of layers, width"),
        ({"model_options": ("layers=0",)}, "=layers=0; expected layers to be a whole"),
        ({"model_options": ("dropout=1",)}, "dropout to be at least 0 and less than"),
        ({"model_options": ("dropout=20e-1",)}, "dropout to be at least 0 and less"),
        ({"shuffle_mb": -1}, "--shuffle_mb=-1; expected at least 0"),
        ({"prefetch": -1}, "--prefetch=-1; expected at least 0"),
        ({"cache": "disk"}, "--cache=disk; expected one of auto, memory, disk"),
        ({"mix": ("mixup:1e999",)}, "--mix=mixup:1e999; expected mixup:0.2, cutmix"),
        ({"splits": ("a", "")}, "--splits=a,; expected one or two, such as"),
        ({"save_every": ()}, "--save_every=; expected 500 steps, 10min"),
        ({"save_every": (f"{10**400}min",)}, "0min; expected 500 steps, 10min"),
        ({"monitor": "mx:a"}, "--monitor=mx:a; expected a log, such as val_accuracy"),
        ({"on_stall": "stop:0"}, "--on_stall=stop:0; expected wait:300, stop:300"),
        ({"on_stall": f"stop:{10**400}"}, "0; expected wait:300, stop:300 or never"),
        ({"share_gpus": "0.2:1:0"}, "--share_gpus=0.2:1:0; expected parts of the"),
        ({"share_gpus": f"0.2:1:{10**400}"}, "0; expected parts of the GPUs' memory"),
        ({"local_store": "1.2.3:a"}, "--local_store=1.2.3:a; expected a folder, or"),
        ({"local_store": "nan:a"}, "--local_store=nan:a; expected a folder, or how"),
        ({"local_store": ":a"}, "--local_store=:a; expected a folder, or how many"),
        ({"cache": "memory:a"}, "--cache=memory:a; expected one of auto, memory"),
        ({"data_service": "localhost"}, "--data_service=localhost; expected the"),
        (
            {"data_service": "grpc://a:1", "cache": "memory"},
            "--cache=memory with --data_service",
        ),
        ({"decode_on": "gpu"}, "--decode_on=gpu for digits; expected it only for arra"),
        (
            {"decode_on": "gpu", "randaugment": ("2", "9")},
            "--decode_on=gpu with --randaugment, which changes images one by one",
        ),
        (
            {"decode_on": "gpu", "task": "segmentation"},
            "--decode_on=gpu with --task=segmentation, whose masks",
        ),
        (
            {"decode_on": "gpu", "deterministic": True},
            "--decode_on=gpu with --deterministic, and it is not known",
        ),
        (
            {"decode_on": "gpu", "gpu_memory": "all"},
            "--decode_on=gpu with --gpu_memory=all, which leaves no memory",
        ),
        ({"image_column": "a"}, "--image_column=a for digits; expected it only for tf"),
        ({"local_store": "0:a"}, "--local_store=0:a; expected a folder, or how many"),
        ({"local_store": "3:"}, "--local_store=3:; expected a folder, or how many GB"),
        ({"local_store": "a"}, "--local_store=a for digits; expected it only for tf"),
        (
            {"dataset": "csv:gs://a", "local_store": "gs://b"},
            "--local_store=gs://b; expected a folder of this machine, or",
        ),
        (
            {"dataset": "csv:gs://a", "local_store": "/proc/a"},
            "Cannot write to the local_store /proc/a: no file can be made",
        ),
        (
            {"dataset": "csv:gs://a", "local_store": "a", "text_column": "b"},
            "--local_store=a with --text_column, whose texts are read once",
        ),
        (
            {"dataset": "csv:gs://a", "local_store": "a", "data_service": "grpc://b:1"},
            "--local_store=a with --data_service, whose workers read the files",
        ),
        (
            {"dataset": "csv:a", "splits": ("b",)},
            "--splits=b for csv:a; expected it only for digits, tfds:, so",
        ),
        (
            {"eval_dataset": "folder:a", "splits": ("", "b")},
            "--splits=,b for folder:a; expected it only for digits, tfds:, so",
        ),
        (
            {"feature_columns": ("b", "c")},
            "--feature_columns=b,c for digits; expected it only for tfds:, parquet:",
        ),
        (
            {"dataset": "csv:a", "eval_fraction": 0.2, "eval_dataset": "digits"},
            "--eval_fraction=0.2 and --eval_dataset=digits, which is evaluated",
        ),
        (
            {"dataset": "text:python", "group_by_length": True},
            "--group_by_length for text:python, whose rows have no padding",
        ),
        (
            {
                **{"dataset": "folder:.", "model": "transformer_encoder"},
                **{"group_by_length": True, "model_options": ("positions=learned",)},
            },
            "positions=learned, which is for texts of one length",
        ),
        ({"steps_per_loop": 0}, "--steps_per_loop=0; expected at least 1"),
        ({"image_size": "8x"}, "--image_size=8x; expected pixels"),
        ({"seed": 2**32}, "--seed=4294967296; expected 0 to 4294967295"),
        ({"momentum": 2.0}, "--momentum=2.0; expected 0 to 1"),
        ({"optimizer": "multioptimizer"}, "expected an optimizer of"),
        ({"gpu_indices": ("a",)}, "--gpu_indices=a; expected numbers"),
        ({"learning_rate": math.inf}, "--learning_rate=inf; expected a number that is"),
        ({"eval_only": True, "clean": True}, "--clean and --eval_only; expected"),
        ({"clean": True, "checkpoint": "best"}, "--clean and --checkpoint=best; expe"),
        ({"eval_fraction": 1.0}, "--eval_fraction=1.0; expected at least 0 and less t"),
        (
            {"variable_update": "parameter_server:ring"},
            "--variable_update=parameter_server:ring; expected one of auto, asynchr",
        ),
        ({"variable_update": "replcated"}, r"\(did you mean replicated\?\)"),
        (
            {"shard_optimizer_state": True, "variable_update": "parameter_server"},
            "_state and --variable_update=parameter_server; expected --variable_update="
            "replicated with it",
        ),
        ({"variable_update": "replicated:2"}, "=replicated:2; expected one of auto"),
        (
            {"deterministic": True, "variable_update": "asynchronous"},
            "--deterministic and --variable_update=asynchronous, where the order",
        ),
        (
            {"shard_embeddings": "rows", "variable_update": "asynchronous"},
            "--shard_embeddings=rows and --variable_update=asynchronous, whose towers",
        ),
        (
            {"max_gpus": 1, "gpu_indices": ("0", "1")},
            "--max_gpus=1 and --gpu_indices=0,1, with which the run begins; exp",
        ),
        (
            {"stages": 2, "variable_update": "asynchronous"},
            "--variable_update=asynchronous and --stages=2",
        ),
        ({"recompute": "layer", "enable_xla": "true"}, "--enable_xla=true and --rec"),
        ({"placement": ("a=0",)}, "--placement=a=0 without --stages"),
        ({"stages": 2, "placement": ("a=2",)}, "a stage from 0 to 1"),
        ({"stages": 2, "placement": ("a",)}, "expected PATTERN=STAGE"),
        ({"stages": 2, "placement": ("a=0", "a=1")}, "which has a twice"),
        (
            {"stages": 2, "placement": ("b[=0", ".*=1")},
            r"b\[ is no regular expression \(unterminated",
        ),
        ({"micro_batches": "1:gpipe"}, "--micro_batches=1:gpipe; expected a number"),
        ({"micro_batches": "gpipe"}, "--micro_batches=gpipe; expected a number, such"),
        ({"stages": 10**6}, "--stages=1000000, which needs 1,000,000 devices"),
        ({"num_gpus": 10**6}, "--num_gpus=1000000, which needs 1,000,000 devices"),
        (
            {"stages": 100, "split_ratios": ("1",) * 3},
            "--stages=100 --split_ratios=1,1,1, which needs 300 devices; expected at",
        ),
        (
            {"num_gpus": 200, "gpu_split": 2, "gpu_memory": "9"},
            "--num_gpus=200 --gpu_split=2, which needs 400 devices",
        ),
        ({"micro_batches": "9", "batch_size": 8}, "one example for each micro-batch"),
        ({"stages": 0}, "--stages=0"),
        (
            {"gpu_indices": ("free",), "share_gpus": "0.5"},
            "--gpu_indices=free and --share_gpus, which takes what other runs leave",
        ),
        (
            {"gpu_indices": ("free",), "num_gpus": "auto"},
            "--num_gpus=auto and --gpu_indices=free; expected one of them",
        ),
        ({"gpu_indices": ("free", "1")}, "such as --gpu_indices=0,2, or free."),
        (
            {"gpu_indices": ("MIG-1", "MIG-2")},
            "expected numbers of GPUs, as a process has one slice of a GPU at most: "
            "name it by CUDA_VISIBLE_DEVICES=MIG-1",
        ),
        ({"gpu_memory": "0"}, "--gpu_memory=0; expected growth, all, a number of MB"),
        ({"gpu_memory": "1.5"}, "--gpu_memory=1.5; expected growth, all, a number"),
        ({"gpu_memory": "nan"}, "--gpu_memory=nan; expected growth, all, a number"),
        (
            {"elastic_batch": "at_start", "share_gpus": "0.5"},
            "--share_gpus=0.5, by which towers come and go; expected "
            "--elastic_batch=per_tower",
        ),
        (
            {"elastic_batch": "at_start", "split_ratios": ("1", "2")},
            "--split_ratios=1,2, which gives towers unequal parts",
        ),
        (
            {"elastic_batch": "at_start", "num_gpus": "auto"},
            "--num_gpus=auto, which compares numbers of towers by the same batch",
        ),
        (
            {"num_gpus": "auto", "gpu_indices": ("0",)},
            "--num_gpus=auto and --gpu_indices=0; expected one of them",
        ),
        (
            {"num_gpus": "auto", "gpu_split": 2},
            "--num_gpus=auto and --gpu_split=2; expected one of them",
        ),
        (
            {"num_gpus": "auto", "split_ratios": ("1", "2")},
            "--num_gpus=auto and --split_ratios=1,2, which is for a fixed number",
        ),
        (
            {"num_gpus": "auto", "share_gpus": "0.5"},
            "--num_gpus=auto and --share_gpus=0.5, by which towers come and go",
        ),
        ({"micro_batches": "0"}, "--micro_batches=0"),
        (
            {"split_ratios": ("2", "x")},
            "--split_ratios=2,x; expected auto, or a",
        ),
        (
            {"split_ratios": ("2", "0")},
            "--split_ratios=2,0; expected auto, or a",
        ),
        ({"split_ratios": ("-1",)}, "--split_ratios=-1; expected auto, or a"),
        (
            {"split_ratios": ("auto",), "variable_update": "asynchronous"},
            "--split_ratios=auto and --variable_update=asynchronous, whose towers do",
        ),
        (
            {"split_ratios": ("auto",), "share_gpus": "0.5"},
            "--split_ratios=auto and --share_gpus=0.5, by which towers come and go",
        ),
        (
            {"split_ratios": ("1", "2"), "num_gpus": 3},
            "--split_ratios=1,2 for 3 towers; expected one ratio for each",
        ),
        (
            {"split_ratios": ("1",), "num_gpus": 4, "stages": 2},
            "--split_ratios=1 for 2 towers; expected one ratio for each, so give 2 of "
            "them, or --num_gpus=2",
        ),
        (
            {"split_ratios": ("1.5",)},
            "--split_ratios=1.5; expected auto, or a",
        ),
    ],
)
def test_bad_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        checks.check(Settings(**flags))


def test_flags_repeat_a_run_from_any_folder(tmp_path, monkeypatch):
    here = tmp_path / "a project"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("HOME", "/home/me")
    (here / "my model.py").write_text("def build(s, n): ...")
    given = {
        "model": "my model.py:build",
        "dataset": "folder:my pictures",
        "eval_dataset": "digits",
        "data_dir": "~/data",
        "cache": "disk:gs://bucket/cache",
        "local_store": "~/my store",
        "split_ratios": ("2", "3"),
        "feature_columns": ("a,b", "c"),
        "strict": False,
    }
    before = Settings(model_dir="/runs/mine", **given)
    text = before.as_text()
    lines = text.splitlines()
    for line in (
        f"--model={here}/my model.py:build",
        f"--dataset=folder:{here}/my pictures",
        "--eval_dataset=digits",
        "--data_dir=/home/me/data",
        "--cache=disk:gs://bucket/cache",
        "--local_store=/home/me/my store",
        "--split_ratios=2,3",
        "--model_dir=/runs/mine",
        '--feature_columns="a,b",c',
        "--nostrict",
    ):
        assert line in lines
    (tmp_path / "flags.txt").write_text(text)
    monkeypatch.chdir("/")
    after = command_line.read(Settings, ["test", f"--flagfile={tmp_path}/flags.txt"])
    assert after.as_text() == text
    assert after.but(model=before.model, dataset=before.dataset) == before.but(
        data_dir="/home/me/data", local_store="/home/me/my store"
    )


@pytest.mark.parametrize("model_dir", ["{made}/file/run", "/proc/run"])
def test_unwritable_model_dir(made, model_dir):
    # Tests may run as root, whom no permission stops.
    model_dir = model_dir.format(made=made)
    with pytest.raises(ValueError, match="--model_dir") as caught:
        checks.check_model_dir(Settings(model_dir=model_dir))
    assert model_dir in str(caught.value)
    assert os.path.dirname(model_dir) in str(caught.value)
    assert not os.path.exists(model_dir)


@pytest.mark.parametrize("line_break", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\u2028"])
@pytest.mark.parametrize(
    "name", ("data_dir", "model_dir", "monitor", "feature_columns", "label_column")
)
def test_a_value_cannot_become_a_flag_of_its_own(name, line_break):
    value = f"da ta{line_break}--clean"
    value = (value, "b") if name == "feature_columns" else value
    asked = Settings(**{name: value}, dataset="digits")
    with pytest.raises(ValueError, match=rf"Received --{name}=.*has a line break"):
        checks._check_line_breaks(asked)


def test_a_model_dir_that_is_not_utf_8_is_a_sentence(tmp_path, monkeypatch):
    asked = Settings(model_dir=f"{tmp_path}/b\udcff")
    with pytest.raises(ValueError, match=r"no UTF-8 where .* utf-8; .* so rename it"):
        checks.check_model_dir(asked)
    # As ü is read under an ASCII locale.
    monkeypatch.setattr(checks.sys, "getfilesystemencoding", lambda: "ascii")
    with pytest.raises(ValueError, match=r"are ascii; .* so set PYTHONUTF8=1"):
        checks.check_model_dir(Settings(model_dir=f"{tmp_path}/r\udcc3\udcbc"))
    assert checks.check_model_dir(Settings(model_dir=f"{tmp_path}/rü"))
    assert not [*tmp_path.iterdir()]


def test_flags_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Received --data_dir='.*has a line break"):
        checks.check(Settings(dataset="digits", data_dir="a\n--clean"))
    folder = tmp_path / "cwd\n--clean"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=r"Received --data_dir='.*cwd.*a line break"):
        checks.check(Settings(dataset="digits", model_dir="run"))
    assert not [*folder.iterdir()] and [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"variable_update": "parameter_server"}, towers.ParameterServer("cpu")),
        (
            {"variable_update": "replicated:ring"},
            towers.Replicated("ring"),
        ),
        (
            {"variable_update": "replicated", "shard_optimizer_state": True},
            towers.Replicated(shard_optimizer_state=True),
        ),
        (
            {"variable_update": "asynchronous:2"},
            towers.Asynchronous(2, device="cpu"),
        ),
        ({}, towers.Auto("choice.json", device="cpu")),
    ],
)
def test_flags_of_updates_become_a_value(flags, expected):
    update = parts_devices.variable_update(Settings(**flags), "cpu", "choice.json")
    assert update == expected


def test_flags_of_stages_become_a_value():
    given = {"placement": ("b=c=0", ".*=1"), "micro_batches": "2:gpipe"}
    stages = parts_devices.stages(Settings(stages=2, **given))
    assert stages == towers.Stages(2, {"b=c": 0, ".*": 1}, "gpipe")
    assert parts_devices.stages(Settings()) == towers.Stages(1)


def test_copies_are_on_the_towers_and_nowhere_else():
    flags = Settings(variable_update="replicated", local_parameter_device="cpu")
    on_gpus = devices.Devices(("/device:GPU:0", "/device:GPU:1"), devices.HOST)
    with pytest.raises(ValueError, match="so leave out --local_parameter_device"):
        job.check_reduction(flags, on_gpus)
    job.check_reduction(flags, devices.Devices((devices.HOST,), devices.HOST))
    job.check_reduction(flags.but(variable_update="auto"), on_gpus)


OLD = {
    "--bad_records=skip --max_bad_records=5": {"bad_records": "skip:5"},
    "--max_bad_records=5 --bad_records=fail": {"bad_records": "fail"},
    "--train_split=a": {"splits": ("a",)},
    "--eval_split=b": {"splits": ("", "b")},
    "--mixup_alpha=0.2": {"mix": ("mixup:0.2",)},
    "--cutmix_alpha=1.0 --mixup_alpha=0.0": {"mix": ("cutmix:1",)},
    "--cache=disk --cache_dir=c": {"cache": "disk:c"},
    "--local_store_gb=9 --local_store=s": {"local_store": "9:s"},
    "--image_key=i": {"image_column": "i"},
    "--label_key=l": {"label_column": "l"},
    "--layers=1 --width=2 --heads=3 --positions=rotary --dropout=.1 --sparsity=.5": {
        "model_options": (
            *("layers=1", "width=2", "heads=3", "positions=rotary"),
            *("dropout=0.1", "sparsity=0.5"),
        )
    },
    "--batch_size_per_tower=4": {"batch_size": 4, "elastic_batch": "at_start"},
    "--allow_growth": {"gpu_memory": "growth"},
    "--noallow_growth": {"gpu_memory": "all"},
    "--gpu_memory_limit_mb=100": {"gpu_memory": "100"},
    "--gpu_memory_fraction=0.5": {"gpu_memory": "0.5"},
    "--share_gpus=.5 --join_seconds=6": {"share_gpus": ".5:1:6"},
    "--micro_batches=4 --pipeline_schedule=gpipe": {"micro_batches": "4:gpipe"},
    "--variable_update=replicated --all_reduce_alg=ring": {
        "variable_update": "replicated:ring"
    },
    "--max_staleness=2 --variable_update=asynchronous": {
        "variable_update": "asynchronous:2"
    },
    "--save_steps=5": {"save_every": ("10min", "5")},
    "--save_minutes=0": {"save_every": ("0min",)},
    "--save_minutes=10.0 --stall_seconds=300.0": {},
    "--monitor=val_auc --monitor_mode=max": {"monitor": "max:val_auc"},
    "--stall_seconds=60 --on_stall=stop": {"on_stall": "stop:60"},
    "--stall_seconds=0": {"on_stall": "never"},
    "--parity_steps=3": {},
}


@pytest.mark.parametrize("given", OLD)
def test_old_flags_work_in_any_order_and_are_said(given, capsys):
    args = given.split()
    for argv in (args, args[::-1]):
        asked = command_line.read(Settings, ["test", *argv])
        expected = OLD[given]
        if "model_options" in expected:
            asked = asked.but(model_options=tuple(sorted(asked.model_options)))
            expected = {"model_options": tuple(sorted(expected["model_options"]))}
        assert asked == Settings(**expected)
    assert "Old flags, which work until Towers 0.4: --" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--stall_seconds=300.0 --on_stall=stop:60", {"on_stall": "stop:60"}),
        ("--stall_seconds=120.0 --on_stall=never", {"on_stall": "never"}),
        ("--on_stall=stop:60 --stall_seconds=1e3", {"on_stall": "stop:1000"}),
        ("--max_bad_records=9 --bad_records=skip:2", {"bad_records": "skip:2"}),
        ("--bad_records=skip:2 --max_bad_records=9", {"bad_records": "skip:9"}),
        ("--local_store_gb=50.0 --local_store=3:s", {"local_store": "3:s"}),
        ("--local_store=3:s --local_store_gb=50.0", {"local_store": "50:s"}),
        ("--save_steps=5 --save_minutes=10.0 --save_every=7", {"save_every": ("7",)}),
        ("--allow_growth --gpu_memory=0.5", {"gpu_memory": "0.5"}),
        (
            "--pipeline_schedule=gpipe --micro_batches=4:1f1b",
            {"micro_batches": "4:1f1b"},
        ),
        (
            "--all_reduce_alg=ring --variable_update=replicated:nccl",
            {"variable_update": "replicated:nccl"},
        ),
        ("--monitor_mode=max --monitor=min:a", {"monitor": "min:a"}),
        ("--mixup_alpha=0.2 --mix=cutmix:1", {"mix": ("cutmix:1",)}),
        (
            "--layers=4 --width=8 --model_options=layers=2",
            {"model_options": ("layers=2", "width=8")},
        ),
        ("--dropout=0.0", {"model_options": ("dropout=0",)}),
        ("--dropout=1e-05", {"model_options": ("dropout=0.00001",)}),
        ("--dropout=2e-05", {"model_options": ("dropout=0.00002",)}),
        ("--model_options=dropout=1e-3", {"model_options": ("dropout=1e-3",)}),
    ],
)
def test_the_later_of_an_old_flag_and_its_new_one_counts(given, expected):
    asked = command_line.read(Settings, ["test", *given.split()])
    assert asked == Settings(**expected)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--max_bad_records=x", "--max_bad_records=x; expected a whole number"),
        ("--local_store_gb=x", "--local_store_gb=x; expected a number"),
        ("--gpu_memory_fraction=8000", "_fraction=8000; expected more than 0 and at"),
        ("--gpu_memory_limit_mb=1", "--gpu_memory_limit_mb=1; expected a number of MB"),
        ("--layers=0", "layers=0; expected layers to be a whole number of at least 1"),
        ("--monitor_mode=maxx", "--monitor=maxx:; expected a log"),
        (
            "--batch_size_per_tower=4 --batch_size=8",
            "--batch_size_per_tower=4 and --batch_size=8; expected one of them",
        ),
        (
            "--batch_size_per_tower=4 --elastic_batch=per_tower",
            "--batch_size_per_tower=4 and --elastic_batch=per_tower; expected one",
        ),
        ('--mix="mixup:1', "; expected values with commas between them, and quotes"),
    ],
)
def test_bad_values_of_old_flags_and_lists_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.check(command_line.read(Settings, ["test", *given.split()]))


def test_all_old_flags_are_tried_and_have_no_help():
    tried = {name for given in OLD for name in re.findall(r"--(?:no)?(\w+)", given)}
    assert {*old_flags._MOVED} <= tried
    assert not {*old_flags._MOVED} & {*settings.NAMES}


def test_what_follows_two_dashes_asks_for_no_help():
    with pytest.raises(ValueError, match="Received the argument '--help'"):
        command_line.read(Settings, ["test", "--", "--help"])
    with pytest.raises(SystemExit):
        command_line.read(Settings, ["test", "--help_full"])


@pytest.mark.parametrize(
    ("given", "meant"), [("mixup", "mix"), ("save_freq", "save_every")]
)
def test_a_flag_of_today_is_suggested(given, meant):
    with pytest.raises(ValueError, match=f"no such flag .did you mean --{meant}"):
        command_line.read(Settings, ["test", f"--{given}=1"])


@pytest.mark.parametrize(
    ("given", "steps", "minutes"),
    [
        (("10min",), None, 10),
        (("500",), 500, None),
        (("500", "2.5min"), 500, 2.5),
        (("0min",), None, 0),
        (("none",), None, None),
    ],
)
def test_when_to_save(given, steps, minutes):
    asked = Settings(save_every=given)
    assert (asked.save_steps, asked.save_minutes) == (steps, minutes)

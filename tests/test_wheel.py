"""The package as it is installed, used in a project with folders of any name."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 300
FOLDERS = "models", "input_pipeline", "tests", "scripts"
PROGRAMS = (
    *("towers.train", "towers.parity", "towers.doctor", "towers.find_batch_size"),
    *("towers.report", "towers.input_pipeline.convert"),
    *("towers.input_pipeline.benchmark", "towers.input_pipeline.service"),
)
MODEL = f"""
import keras
{"".join(f"from {folder} import blocks as of_{folder}{chr(10)}" for folder in FOLDERS)}

def build(input_shape, num_classes):
    import towers, towers.models.cnn  # ours

    print("towers is", towers.__file__)
    return keras.Sequential([keras.Input(input_shape), *of_models.layers(num_classes)])
"""
BLOCKS = """
def layers(classes):
    import keras

    return keras.layers.Flatten(), keras.layers.Dense(classes)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Where the wheel of this checkout is installed, and nothing else."""
    source = tmp_path_factory.mktemp("source")
    for name in ("towers", "input_pipeline", "models"):
        shutil.copytree(
            *(ROOT / name, source / name),
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    build = "import sys; from setuptools import build_meta as by; by.build_wheel('.')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=source, check=True, capture_output=True
    )
    (wheel,) = source.glob("*.whl")
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A user's project, with such folders and Keras's settings for other work."""
    folder = tmp_path_factory.mktemp("a project")
    (folder / "my_model.py").write_text(MODEL)
    for name in FOLDERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "blocks.py").write_text(BLOCKS)
    (folder / "keras.json").write_text(
        json.dumps({"floatx": "float64", "image_data_format": "channels_first"})
    )
    return folder


def start(installed, project, *command, cwd=None):
    """Starts Python with the installed package in its path, in the project."""
    changed = {"PYTHONPATH": str(installed), "KERAS_HOME": str(project)}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or project,
        env={
            **{k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
            **{"CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "jax", **changed},
        },
    )


def test_all_is_in_one_package(installed):
    (info,) = installed.glob("towers-*.dist-info")
    assert {path.name for path in installed.iterdir()} == {"towers", info.name}
    files = [path for path in (installed / "towers").rglob("*") if path.is_file()]
    assert not any(path.is_symlink() for path in installed.rglob("*"))
    expected = [
        path
        for folder in ("towers", "input_pipeline", "models")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".typed")
    ]
    # The last two are links in `towers`.
    expected = {
        str(path.relative_to(ROOT)).removeprefix("towers/") for path in expected
    }
    found = {str(path.relative_to(installed / "towers")) for path in files}
    assert found == expected
    assert {"py.typed", "__init__.pyi", "models/__init__.pyi"} <= found


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_start(installed, project, program):
    process = start(installed, project, program, "--help")
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (0, "")
    assert f"python -m {program}" in out


@pytest.mark.slow
def test_a_run_in_a_project(installed, project):
    """Also what users have set for other work, and a reader that goes."""
    run = project / "a run"
    process = start(
        installed,
        project,
        "towers.train",
        *("--model=my_model.py:build", "--dataset=synthetic:8x8x3:3:64"),
        *("--train_epochs=1", "--variable_update=parameter_server", "--batch_size=32"),
        *("--enable_xla=false", "--num_gpus=2", f"--model_dir={run}"),
    )
    assert process.stdout.readline() == f"towers is {installed}/towers/__init__.py\n"
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(TIMEOUT_S) == 0, err
    file = project / "keras.json"
    assert err.splitlines() == [
        f"towers.train: Note: {text}"
        for text in (
            "KERAS_BACKEND=jax is ignored: Towers trains with Keras on TensorFlow.",
            f'"floatx": "float64" in {file} is ignored for "float32".',
            f'"image_data_format": "channels_first" in {file} is ignored for '
            '"channels_last".',
        )
    ]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["epochs"] == 1
    with zipfile.ZipFile(run / "model.keras") as saved:
        config = json.loads(saved.read("config.json"))
    assert "float64" not in json.dumps(config)
    flags = (run / "flags.txt").read_text()
    assert f"--model={project}/my_model.py:build\n" in flags


@pytest.mark.slow
def test_a_probe_from_elsewhere(installed, project, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    process = start(
        installed,
        project,
        "towers.find_batch_size.probe",
        *(f"--model={project}/my_model.py:build", "--dataset=synthetic:8x8x3:3:64"),
        *("--variable_update=parameter_server", "--enable_xla=false", "--num_gpus=2"),
        *("--batch_size=4", "--probe_steps=1"),
        cwd=tmp_path,
    )
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert '"fits": true' in out, err

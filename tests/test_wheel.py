"""The package as it is built, and installed beside folders of any name."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.limits import HANG_S
from towers.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
VERSION = re.search('version="(.*)"', (ROOT / "setup.py").read_text())[1]
FOLDERS = "models", "input_pipeline", "tests", "scripts"
# Python, or Towers, imports modules of these names: not these.
FILES = "absl", "keras", "logging", "random", "typing"
# The dependencies are hundreds of megabytes, which are downloaded and unpacked.
INSTALL_TIMEOUT_S = 1200
MODEL = f"""
import keras
{"".join(f"from {folder} import blocks as of_{folder}{chr(10)}" for folder in FOLDERS)}

def build(input_shape, num_classes):
    import towers, towers.models.mlp  # ours

    print("towers is", towers.__file__)
    return keras.Sequential([keras.Input(input_shape), *of_models.layers(num_classes)])
"""
BLOCKS = """
def layers(classes):
    import keras

    return keras.layers.Flatten(), keras.layers.Dense(classes)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files of this checkout that git has, without most tests and documents."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked(".", ":!docs", ":!tests/*/*", ":!scripts/*/*"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def sdist(source):
    return build("sdist", source, "*.tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel of this checkout's source distribution."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    # Not by Python, whose 3.11.0 to 3.11.3 know no filter, without which 3.12 warns.
    execute("tar", "-xf", sdist, "-C", unpacked)
    (folder,) = unpacked.iterdir()
    return build("wheel", folder, "*.whl")


def tracked(*paths):
    """The files that git has."""
    names = execute("git", "ls-files", "-z", *paths, cwd=ROOT).split("\0")
    return [name for name in names if name and os.path.lexists(ROOT / name)]


def packaged():
    """The files that the package must have: of its three folders, without links."""
    return {
        f"towers/{name.removeprefix('towers/')}"
        for name in tracked("towers", "input_pipeline", "models")
        if not (ROOT / name).is_symlink()
    }


def build(kind, folder, pattern):
    """Makes a distribution by setuptools, as `pip` and `build` do."""
    code = f"from setuptools import build_meta as by; by.build_{kind}('.')"
    execute(sys.executable, "-c", code, cwd=folder)
    (made,) = folder.glob(pattern)
    return made


def execute(*command, timeout=HANG_S, **kwargs):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, **kwargs
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder, *packages, timeout=HANG_S):
    """Makes an environment in which nothing but these packages is installed."""
    execute(sys.executable, "-m", "venv", "--without-pip", folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    execute(*pip, "install", "--quiet", *packages, timeout=timeout)
    return folder


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel, where the dependencies are those of this one."""
    folder = environment(
        tmp_path_factory.mktemp("installed"), "--no-deps", "--no-index", wheel
    )
    # Not what is installed editable here: that has a .pth file of its own.
    borrowed = sysconfig.get_path("purelib")
    (packages_of(folder) / "borrowed.pth").write_text(borrowed)
    return folder


def packages_of(environment):
    (folder,) = environment.glob("lib/python*/site-packages")
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
    for name in FILES:
        (folder / f"{name}.py").write_text("raise ImportError('of the project')")
    (folder / "keras.json").write_text(
        json.dumps({"floatx": "float64", "image_data_format": "channels_first"})
    )
    return folder


def start(installed, project, *command, cwd=None):
    """Starts what is installed, in a project."""
    program, *flags = command
    kept = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    changed = {"KERAS_HOME": str(project), "KERAS_BACKEND": "jax"}
    return subprocess.Popen(
        [installed / "bin" / program, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd or project,
        env={**kept, **changed, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""},
    )


def finish(process):
    """What a process prints, and its exit code."""
    out, err = process.communicate(timeout=HANG_S)
    return out, err, process.returncode


def test_the_wheel_has_the_files_of_git_once(wheel):
    """One package, with its types, data and license; no tests, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    (info,) = {name.split("/")[0] for name in names} - {"towers"}
    assert info == f"keras_towers-{VERSION}.dist-info"
    files = [name for name in names if name.startswith("towers/")]
    assert sorted(files) == sorted(packaged())
    assert {name.rpartition("/")[2] for name in {*names} - {*files}} == {
        *("LICENSE", "METADATA", "RECORD", "WHEEL"),
        *("entry_points.txt", "top_level.txt"),
    }
    data = "input_pipeline/sources/tfds/digits.npz", "report/page.html", "py.typed"
    types = "__init__.pyi", "models/__init__.pyi"
    assert {f"towers/{name}" for name in (*data, *types)} <= {*files}


def test_the_sdist_has_what_the_wheel_is_made_of(sdist):
    """The links to `input_pipeline` and `models` are folders, so no file is twice."""
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = [m.name.partition("/")[2] for m in members if m.isfile()]
    generated = {"PKG-INFO", "setup.cfg"}
    others = {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"}
    kept = [name for name in names if not name.startswith("keras_towers.egg-info/")]
    assert sorted(kept) == sorted(packaged() | generated | others)


def test_a_checkout_and_its_sdist_make_the_same_wheel(source, wheel):
    same = build("wheel", source, "*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(same) as theirs:
        assert {name: theirs.read(name) for name in theirs.namelist()} == {
            name: ours.read(name) for name in ours.namelist()
        }


def test_documents_name_this_version():
    """Wherever a wheel file is installed, and at the top of the changelog."""
    named = [
        re.findall(r"keras_towers-([0-9.]*)-py3-none-any\.whl", path.read_text())
        for path in (ROOT / name for name in tracked("*.md"))
    ]
    assert {version for versions in named for version in versions} == {VERSION}
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[:2] == ["Unreleased", VERSION]


def test_the_license(installed):
    """Its text comes with the package, and its name stands where indexes look."""
    (info,) = packages_of(installed).glob("keras_towers-*.dist-info")
    metadata = (info / "METADATA").read_text().splitlines()
    assert {"License: Apache-2.0 AND CC-BY-4.0", "License-File: LICENSE"} <= {*metadata}
    # Newer versions of setuptools have a folder for it.
    (text,) = info.rglob("LICENSE")
    assert text.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.quick_one_in(7)
@pytest.mark.parametrize("command", COMMANDS)
def test_programs_start(installed, project, command):
    """By the command, and by the module."""
    module, _ = COMMANDS[command]
    by_command = start(installed, project, "towers", command, "--help")
    by_module = start(installed, project, "python", "-m", module, "--help")
    out, err, code = finish(by_command)
    assert (err, code) == ("", 0)
    assert f"python -m {module}" in out
    assert finish(by_module) == (out, err, code)


def test_the_version(installed, project):
    (info,) = packages_of(installed).glob("keras_towers-*.dist-info")
    version = info.name.removesuffix(".dist-info").partition("-")[2]
    process = start(installed, project, "towers", "--version")
    assert finish(process) == (f"towers {version}\n", "", 0)


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_TIMEOUT_S + HANG_S)
def test_an_empty_environment(wheel, tmp_path):
    """The dependencies that the wheel names are all that training needs."""
    folder = environment(tmp_path / "empty", wheel, timeout=INSTALL_TIMEOUT_S)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    assert execute(*pip, "check") == "No broken requirements found.\n"
    flags = "--train_epochs=1", "--max_train_steps=2", "--enable_xla=false"
    process = start(folder, tmp_path, "towers", "train", *flags)
    out, err, code = finish(process)
    assert code == 0, err
    assert (tmp_path / "runs" / "digits_cnn" / "model.keras").exists(), out


@pytest.mark.slow
def test_a_run_in_a_project(installed, project):
    """Also what users have set for other work, and a reader that goes."""
    run = project / "a run"
    process = start(
        installed,
        project,
        *("towers", "train"),
        *("--model=my_model.py:build", "--dataset=synthetic:8x8x3:3:64"),
        *("--train_epochs=1", "--variable_update=parameter_server", "--batch_size=32"),
        *("--enable_xla=false", "--num_gpus=2", f"--model_dir={run}"),
    )
    expected = f"towers is {packages_of(installed)}/towers/__init__.py\n"
    assert process.stdout.readline() == expected
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(HANG_S) == 0, err
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
        *("python", "-m", "towers.find_batch_size.probe"),
        *(f"--model={project}/my_model.py:build", "--dataset=synthetic:8x8x3:3:64"),
        *("--variable_update=parameter_server", "--enable_xla=false", "--num_gpus=2"),
        *("--batch_size=4", "--probe_steps=1"),
        cwd=tmp_path,
    )
    out, err = process.communicate(timeout=HANG_S)
    assert '"fits": true' in out, err

"""Data and a run in an object store: an S3 server on this machine, by moto."""

import csv
import io
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.limits import HANG_S

pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
FLAGS = (
    *("--image_size=8", "--model=mlp", "--num_gpus=2", "--batch_size=16"),
    *("--train_epochs=3", "--save_steps=2", "--deterministic", "--eval_fraction=0.2"),
    *("--variable_update=parameter_server", "--log_csv"),
)


@pytest.fixture
def environ(tmp_path, monkeypatch):
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    more = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    yield {**os.environ, **more}
    server.stop()


@pytest.fixture
def s3(environ):
    import s3fs

    system = s3fs.S3FileSystem(endpoint_url=environ["AWS_ENDPOINT_URL"])
    # Servers of one process have the same buckets.
    reset = urllib.request.Request(
        f"{system.endpoint_url}/moto-api/reset", method="POST"
    )
    urllib.request.urlopen(reset).close()
    system.mkdir("bucket")
    return system


@pytest.fixture
def pictures(s3, tmp_path):
    random = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    for number in range(80):
        label = number % 2
        pixels = random.integers(0, 128, [8, 8, 3], np.uint8) + np.uint8(100 * label)
        path = folder / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    s3.put(f"{folder}/", "bucket/pictures/", recursive=True)
    return folder


def run(environ, *command):
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def losses(text):
    return [(row["loss"], row["val_loss"]) for row in csv.DictReader(io.StringIO(text))]


def test_a_run_is_killed_while_it_stores_and_goes_on(environ, s3, pictures, tmp_path):
    here = tmp_path / "run"
    done = run(
        *(environ, "towers.train", *FLAGS),
        *(f"--dataset=folder:{pictures}", f"--model_dir={here}"),
    )
    assert done.returncode == 0, done.stderr
    far = "--dataset=folder:s3://bucket/pictures", "--model_dir=s3://bucket/run"
    killed = run(environ, "tests.towers.train.dies_storing", "ckpt-1-2", *FLAGS, *far)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = s3.find("bucket/run/checkpoints")
    assert "bucket/run/checkpoints/ckpt-1-2.1/variables.index" in left
    assert "bucket/run/checkpoints/ckpt-1-2.1/whole" not in left
    # Another machine, which has only the store.
    environ["XDG_CACHE_HOME"] = str(tmp_path / "other")
    done = run(environ, "towers.train", *FLAGS, *far)
    assert done.returncode == 0, done.stderr
    assert "ckpt-1-0" in done.stdout + done.stderr
    assert "The run is stored in s3://bucket/run." in done.stdout + done.stderr
    # The numbers are those of a run on a disk that nobody has killed.
    stored = s3.cat_file("bucket/run/log.csv").decode()
    assert losses(stored) == losses((here / "log.csv").read_text())
    names = {path.removeprefix("bucket/run/") for path in s3.find("bucket/run")}
    local = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    assert {name.replace(".1/", "/") for name in names if "ckpt" not in name} >= {
        name for name in local if "ckpt" not in name and "tfevents" not in name
    }
    assert any(name.startswith("train/events.out.tfevents") for name in names)
    whole = {name.rpartition("/")[0] for name in names if name.endswith("/whole")}
    folders = {name.rpartition("/")[0] for name in names if "ckpt-" in name}
    assert whole == folders
    assert (
        "--model_dir=s3://bucket/run\n" in s3.cat_file("bucket/run/flags.txt").decode()
    )

    file = next((pictures / "class1").iterdir())
    done = run(
        *(environ, "towers.predict", "s3://bucket/run", str(file)),
        "--output=s3://bucket/out/predictions.csv",
    )
    assert done.returncode == 0, done.stderr
    rows = s3.cat_file("bucket/out/predictions.csv").decode().splitlines()
    assert rows[0].startswith("file,class") and rows[1].startswith(f"{file},")
    expected = run(environ, "towers.predict", str(here), str(file))
    assert rows == expected.stdout.splitlines()

    done = run(environ, "towers.export", "s3://bucket/run")
    assert done.returncode == 0, done.stderr
    assert s3.exists("bucket/run/exported/saved_model.pb")


def test_a_store_that_is_not_there_is_said(environ, s3):
    done = run(
        *(environ, "towers.train", "--model=mlp", "--train_epochs=1"),
        "--model_dir=s3://nobody/run",
    )
    assert done.returncode == 1
    assert "towers.train: Cannot" in done.stderr
    assert "s3://nobody/run" in done.stderr
    assert "Traceback" not in done.stderr

"""A run of towers.train that something happens to, and the same run left alone."""

import argparse
import contextlib
import io
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator

import h5py
import numpy as np
import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[2]
EPOCHS, STEPS = 20, 23
FLAGS = (
    *("--model=mlp", "--deterministic", "--seed=3", "--log_steps=5"),
    *(f"--train_epochs={EPOCHS}", "--save_every=3"),
)


@contextlib.contextmanager
def at_random(
    doc: str, name: str, default: int, more: argparse.ArgumentParser | None = None
) -> Iterator[tuple[argparse.Namespace, random.Random, pathlib.Path]]:
    """Reads the flags of a program that makes faults at random instants.

    Args:
        doc: What the program is for.
        name: The flag that says how many faults it makes.
        default: How many by default.
        more: Other flags of the program.

    Yields:
        The flags, random numbers as --seed says, and a folder for the while.
    """
    parents = [] if more is None else [more]
    parser = argparse.ArgumentParser(description=doc, parents=parents)
    parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        yield args, random.Random(args.seed), pathlib.Path(folder)


def start(model_dir: pathlib.Path, *flags: str) -> subprocess.Popen:
    """Starts the run; returns once it trains, or has ended."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "towers.train", *FLAGS),
            *(
                f"--model_dir={model_dir}",
                f"--data_dir={ROOT / 'build/faults'}",
                *flags,
            ),
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith(("epoch ", "step ")):
            break
    return process


def end(process: subprocess.Popen) -> tuple[int, str]:
    """Waits for the end; returns exit code and what was said on standard error."""
    _, errors = process.communicate()
    said = [line for line in errors.splitlines() if line.startswith("towers")]
    return process.returncode, "\n".join(said)


def finish(model_dir: pathlib.Path, *flags: str) -> tuple[int, str]:
    """Lets the run come to its end."""
    return end(start(model_dir, *flags))


def result(model_dir: pathlib.Path) -> dict:
    """What the last checkpoint of a run holds: values, history and step."""
    (path,) = model_dir.glob(f"checkpoints/ckpt-{EPOCHS}-0")
    reader = tf.train.load_checkpoint(str(path / "variables"))
    names = reader.get_variable_to_shape_map()
    values = {name: reader.get_tensor(name) for name in names}
    about = json.loads(values.pop("about"))
    # How fast it was is another matter.
    about["history"]["history"].pop("examples_per_sec", None)
    return {"values": values, "history": about["history"], "step": about["step"]}


def saved_arrays(model_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns what `model.keras` of a run that has ended holds, by name."""
    with zipfile.ZipFile(model_dir / "model.keras") as archive:
        weights = archive.read("model.weights.h5")
    found = {}

    def take(name, item):
        if isinstance(item, h5py.Dataset):
            found[name] = item[()]

    with h5py.File(io.BytesIO(weights)) as file:
        file.visititems(take)
    return found


def equal(result: dict, other: dict) -> bool:
    """Tells whether two runs ended with the same bits and history."""
    return (
        result["history"] == other["history"]
        and result["values"].keys() == other["values"].keys()
        and all(
            np.array_equal(value, other["values"][name])
            for name, value in result["values"].items()
        )
    )

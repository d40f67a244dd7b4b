"""Runs programs on the GPUs of this machine, for tests."""

import pathlib
import subprocess
import sys

import tensorflow as tf

ROOT = pathlib.Path(__file__).resolve().parents[1]
TWO_TOWERS = "--num_gpus=1", "--gpu_split=2", "--gpu_memory=2048"


def has_gpu() -> bool:
    """Tells whether TensorFlow finds a GPU; logical CPUs stand in where it does not."""
    return bool(tf.config.list_physical_devices("GPU"))


def run(*command: str, code: int = 0) -> str:
    """Runs a Python program, and returns all that it has printed.

    Args:
        command: What follows "python".
        code: The exit code that it has to have.
    """
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True
    )
    said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == code, said
    return done.stdout + done.stderr


def start(*command: str) -> subprocess.Popen:
    """Starts a Python program, whose lines are read as it prints them."""
    return subprocess.Popen(
        [sys.executable, "-u", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

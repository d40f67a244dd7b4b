"""Facts about a run: how large its model is, and what it runs on."""

import math
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import keras
import tensorflow as tf

from towers.program import words

_DRIVER = Path("/proc/driver/nvidia/version")
# What Keras lays its summary out for, where there is no terminal.
_WIDTH = 80


def size_text(model: keras.Model) -> str:
    """Returns the number of a model's parameters, and the memory that they take."""
    size = sum(
        math.prod(weight.shape) * tf.as_dtype(weight.dtype).size
        for weight in model.weights
    )
    return f"{words.count(model.count_params(), 'parameter')} ({words.size(size)})"


def summary_text(model: keras.Model) -> str:
    """Returns a model's size and Keras's summary, as lines for a font of one width."""
    # Keras counts the optimizer's variables among the parameters.
    lines = [size_text(model)]
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    model.summary(line_length=width, print_fn=lines.append)
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns versions of Python, packages and driver, the host, and the commit.

    What is not there is left out.
    """
    built = tf.sysconfig.get_build_info()
    found = {
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": metadata.version("keras"),
        "NumPy": metadata.version("numpy"),
        # What TensorFlow was built for.
        "CUDA": built.get("cuda_version", ""),
        "cuDNN": built.get("cudnn_version", ""),
        "NVIDIA driver": _first_line(_DRIVER),
        "System": platform.platform(),
        "Host": platform.node(),
        "Commit": _commit(),
    }
    return {name: version for name, version in found.items() if version}


def _first_line(path):
    return path.read_text().partition("\n")[0] if path.exists() else ""


def _commit():
    """The commit of the working directory, where that is under version control."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""

"""Says what a run runs on: versions of Python and packages, driver, host, commit."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import tensorflow as tf

_DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> dict[str, str]:
    """Returns versions by what they are of; what is not there is left out."""
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

"""Versions of CUDA and cuDNN, and generations of GPUs, that TensorFlow is built for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HEADER = "third_party/gpus/cuda/cuda_config.h"


def of_tensorflow() -> dict[str, Any]:
    """Returns `complete` of the TensorFlow that is installed."""
    import tensorflow as tf  # the doctor reads this file before it tries that

    return complete(tf.sysconfig.get_build_info(), tf.sysconfig.get_include())


def complete(build: Mapping[str, Any], include: str) -> dict[str, Any]:
    """Returns what TensorFlow says of its build, completed from a header of its wheel.

    TensorFlow 2.22 says no more than that it was built for CUDA.

    Args:
        build: `tf.sysconfig.get_build_info()`.
        include: `tf.sysconfig.get_include()`, a folder.

    Returns:
        `build`, with `cuda_version`, `cudnn_version` and `cuda_compute_capabilities`
        (such as `["sm_80", "compute_90"]`) as far as they are known.
    """
    header = Path(include, _HEADER)
    if not build.get("is_cuda_build") or "cuda_version" in build:
        return dict(build)
    text = header.read_text() if header.is_file() else ""
    defined = dict(re.findall(r'^#define TF_(\w+) "?([\d., ]+)', text, re.MULTILINE))
    capabilities = re.findall(r"\d+", defined.get("CUDA_COMPUTE_CAPABILITIES", ""))
    # The header does not tell machine code from PTX, which the driver compiles. In
    # TensorFlow's wheels, the last one is PTX.
    named = [f"sm_{capability}" for capability in capabilities[:-1]]
    named += [f"compute_{capability}" for capability in capabilities[-1:]]
    known = {
        "cuda_version": defined.get("CUDA_VERSION"),
        "cudnn_version": defined.get("CUDNN_VERSION"),
        "cuda_compute_capabilities": named,
    }
    return dict(build) | {name: value for name, value in known.items() if value}

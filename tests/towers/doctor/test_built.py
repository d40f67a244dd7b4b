"""Tests what is known of TensorFlow's build where it does not say it itself."""

import tensorflow as tf

from towers.doctor.gpus import built

ONLY = {"is_cuda_build": True, "is_rocm_build": False}


def write(folder, *lines):
    path = folder / "third_party/gpus/cuda/cuda_config.h"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(folder)


def test_the_header_of_the_wheel_says_the_same_as_tensorflow():
    completed = built.complete(ONLY, tf.sysconfig.get_include())
    assert completed == ONLY | {
        "cuda_version": "12.5.1",
        "cudnn_version": "9",
        "cuda_compute_capabilities": [
            *("sm_60", "sm_70", "sm_80", "sm_89"),
            "compute_90",
        ],
    }
    said = tf.sysconfig.get_build_info()  # by TensorFlow before 2.22
    assert {name: said.get(name, completed[name]) for name in completed} == completed


def test_what_tensorflow_says_counts(tmp_path):
    include = write(tmp_path, '#define TF_CUDA_VERSION "11.8"')
    said = ONLY | {"cuda_version": "12.8", "cuda_compute_capabilities": ["sm_120"]}
    assert built.complete(said, include) == said


def test_a_build_without_cuda(tmp_path):
    include = write(tmp_path, '#define TF_CUDA_VERSION "12.5.1"')
    assert built.complete({"is_cuda_build": False}, include) == {"is_cuda_build": False}


def test_one_generation(tmp_path):
    include = write(tmp_path, "#define TF_CUDA_COMPUTE_CAPABILITIES 120")
    completed = built.complete(ONLY, include)
    assert completed == ONLY | {"cuda_compute_capabilities": ["compute_120"]}


def test_headers_that_say_nothing(tmp_path):
    assert built.complete(ONLY, str(tmp_path)) == ONLY
    include = write(tmp_path, '#define TF_CUDA_VERSION ""', "#define TF_OTHER 1")
    assert built.complete(ONLY, include) == ONLY

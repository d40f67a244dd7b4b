"""TensorFlow: Keras `Dense`, `BlockSparseDense`, and TensorFlow's sparse product."""

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.models.block_sparse import BlockSparseDense

from . import case as cases
from .contenders import CONTENDERS
from .worker import Job, host_peak

_POLICIES = {
    "float32": "float32",
    "bfloat16": "mixed_bfloat16",
    "float16": "mixed_float16",
}


def start(job: Job) -> None:
    """Sets up the device.

    Raises:
        ValueError: TensorFlow does not have it.
    """
    tf.config.threading.set_intra_op_parallelism_threads(job.threads)
    tf.config.threading.set_inter_op_parallelism_threads(job.threads)
    tf.config.experimental.enable_tensor_float_32_execution(job.tf32)
    gpus = tf.config.list_physical_devices("GPU")
    if not job.on_gpu:
        tf.config.set_visible_devices([], "GPU")
    elif job.gpu >= len(gpus):
        raise ValueError(
            f"Received --device={job.device}; expected CPU or one of the {len(gpus)} "
            "GPUs that TensorFlow finds, such as GPU:0."
        )
    else:
        tf.config.set_visible_devices(gpus[job.gpu], "GPU")
        # Other frameworks need a part of its memory.
        tf.config.experimental.set_memory_growth(gpus[job.gpu], True)


def wait() -> None:
    """Waits for the GPU."""
    if _device() != "CPU:0":
        tf.test.experimental.sync_devices()


def peak(call: Callable[[], Any]) -> float | None:
    """Returns the MB that a call takes beyond those in use before it."""
    device, memory = _device(), tf.config.experimental.get_memory_info
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError:
        # On the CPU, only oneDNN's allocator counts.
        return host_peak(call)
    before = memory(device)["current"]
    call()
    wait()
    return (memory(device)["peak"] - before) / 2**20


@functools.cache
def _device():
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def notes(job: Job) -> list[str]:
    """Says what TensorFlow cannot do."""
    if "tf_csr" not in job.contenders:
        return []
    return [
        "tf_csr: TensorFlow's own gradient of the values gathers numbers of the whole "
        "batch for each value, gigabytes here; so they are taken from a dense product."
    ]


def build(name: str, case: cases.Case, job: Job) -> cases.Built:
    """Builds a contender."""
    policy = keras.dtype_policies.DTypePolicy(_POLICIES[job.dtype])
    if name == "tf_csr":
        _check_csr(job)
        layer = _Csr(case, policy)
    elif CONTENDERS[name].dense == name:
        layer = keras.layers.Dense(case.outputs, use_bias=False, dtype=policy)
    else:
        layer = BlockSparseDense(
            case.outputs,
            case.block_size,
            name,
            case.sparsity,
            use_bias=False,
            dtype=policy,
        )
    layer.build((case.batch, case.inputs))
    variables = layer.trainable_variables
    step = tf.function(
        functools.partial(_step, layer), jit_compile=job.jit_compile or None
    )
    x, upstream = (tf.cast(each, job.dtype) for each in (case.x, case.upstream))
    call = functools.partial(step, x, upstream)

    def results():
        y, (of_x, *of_kernels) = call()
        return cases.compared(
            case,
            _factors(layer, case, variables),
            _array(y),
            _array(of_x),
            _matrices(layer, case, of_kernels),
        )

    size = sum(math.prod(each.shape) for each in variables)
    return cases.Built(call, results, size, _bytes(variables), _slot_bytes(variables))


def _step(layer, x, upstream):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x)
    return y, tape.gradient(y, [x, *layer.trainable_variables], upstream)


def _factors(layer, case, variables):
    kernels = _matrices(layer, case, variables)
    ones = _matrices(layer, case, [tf.ones(each.shape) for each in variables])
    orders = [None] * len(kernels)
    if len(kernels) > 1:
        orders = [_dealt(layout) for layout in layer.layouts]
    return [
        cases.Factor(kernel, mask != 0, order)
        for kernel, mask, order in zip(kernels, ones, orders, strict=True)
    ]


def _dealt(layout):
    """The order of a Monarch product's features: one of each group in turn."""
    groups, size = layout.mask.shape[1], layout.block_shape[1]
    return np.arange(groups * size).reshape(groups, size).T.ravel()


def _matrices(layer, case, values):
    """Returns the dense matrix of each of a layer's kernels, or of gradients."""
    arrays = [_array(each) for each in values]
    if isinstance(layer, _Csr):
        return [layer.matrix_of(arrays[0])]
    if isinstance(layer, BlockSparseDense):
        arrays = [
            _array(layout.dense(each))
            for layout, each in zip(layer.layouts, arrays, strict=True)
        ]
        # Without the parts that only make whole blocks.
        arrays[0] = arrays[0][: case.inputs]
        arrays[-1] = arrays[-1][:, : case.outputs]
    return arrays


class _Csr(keras.layers.Layer):
    """A product with single numbers: TensorFlow has no sparse product of blocks."""

    def __init__(self, case, policy):
        super().__init__(dtype=policy, name="csr")
        self.transposed_mask = case.full_mask.T
        self.places = tf.constant(np.argwhere(self.transposed_mask))
        self.initial = case.kernel.T[self.transposed_mask]

    def build(self, input_shape):
        del input_shape
        self.numbers = self.add_weight(
            shape=self.initial.shape, initializer=lambda *_, **__: self.initial
        )

    def call(self, inputs):
        return _csr_product(
            inputs,
            tf.convert_to_tensor(self.numbers),
            self.places,
            self.transposed_mask.shape,
        )

    def matrix_of(self, numbers):
        matrix = np.zeros(self.transposed_mask.shape, np.float32)
        matrix[self.transposed_mask] = numbers
        return matrix.T


def _csr_product(x, numbers, places, shape):
    """Multiplies by the transposed matrix [outputs, inputs] that has these numbers."""

    @tf.custom_gradient
    def product(x, numbers):
        matrix = tf.raw_ops.SparseTensorToCSRSparseMatrix(
            indices=places, values=numbers, dense_shape=shape
        )

        def times(rows, transpose=False):
            return tf.transpose(
                tf.raw_ops.SparseMatrixMatMul(
                    a=matrix, b=rows, transpose_a=transpose, transpose_b=True
                )
            )

        def gradient(upstream):
            of_matrix = tf.matmul(upstream, x, transpose_a=True)
            of_x = times(upstream, transpose=True)
            return of_x, tf.gather_nd(of_matrix, places)

        return times(x), gradient

    return product(x, numbers)


def _check_csr(job):
    if job.dtype != "float32" or job.jit_compile:
        raise ValueError(
            f"Received --dtype={job.dtype} and --jit_compile={job.jit_compile}; "
            "expected float32 without XLA: TensorFlow has no other sparse products."
        )


def _array(tensor):
    return tf.cast(tensor, tf.float32).numpy()


def _bytes(variables):
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def _slot_bytes(variables):
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    # Its other variables are single numbers.
    return _bytes(each for each in optimizer.variables if len(each.shape))

"""SciPy: a dense product by NumPy, and one with `scipy.sparse.bsr_array`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from . import case as cases
from .worker import Job, host_peak

peak: Callable[[Callable[[], Any]], float | None] = host_peak


def start(job: Job) -> None:
    """Checks what is asked for; `race` sets the threads.

    Raises:
        ValueError: SciPy does not have it.
    """
    if job.on_gpu or job.dtype != "float32":
        raise ValueError(
            f"Received --device={job.device} and --dtype={job.dtype}; expected CPU and "
            "float32, which are all that SciPy multiplies fast."
        )


def wait() -> None:
    """Does nothing: calls return when they are done."""


def notes(job: Job) -> list[str]:
    """Says what SciPy cannot do."""
    if "scipy_bsr" not in job.contenders:
        return []
    return [
        "scipy_bsr: its products use one thread and no BLAS, and it has no gradients; "
        "that of the blocks is made by NumPy's batched product of gathered blocks."
    ]


def build(name: str, case: cases.Case, job: Job) -> cases.Built:
    """Builds a contender."""
    del job
    compute, kernel = (_dense if name == "numpy_dense" else _sparse)(case)

    def results():
        y, (of_x, of_kernel) = compute()
        if name == "numpy_dense":
            factor = cases.Factor(case.kernel, np.array(True))
            return cases.compared(case, [factor], y, of_x, [of_kernel])
        return case.compared(y, of_x, case.matrix_of(of_kernel.transpose(0, 2, 1)))

    return cases.Built(compute, results, kernel.size, kernel.nbytes, 2 * kernel.nbytes)


def _dense(case):
    x, upstream, kernel = case.x, case.upstream, case.kernel
    return lambda: (x @ kernel, (upstream @ kernel.T, x.T @ upstream)), kernel


def _sparse(case):
    x, upstream = case.x, case.upstream
    outputs, inputs = case.places.T
    # In SciPy's order: rows are outputs.
    blocks = np.ascontiguousarray(case.blocks.transpose(0, 2, 1))
    matrix = scipy.sparse.bsr_array(
        (blocks, inputs, np.cumsum([0, *case.mask.sum(0)])),
        shape=(case.outputs, case.inputs),
    )

    def cut(rows):
        features = np.ascontiguousarray(rows.T)
        return features.reshape(-1, case.block_size, case.batch)

    def compute():
        of_x = (matrix.T @ upstream.T).T
        of_blocks = cut(upstream)[outputs] @ cut(x)[inputs].transpose(0, 2, 1)
        return (matrix @ x.T).T, (of_x, of_blocks)

    return compute, blocks

"""PyTorch: a dense product, and one with `torch.sparse_bsr`.

Its gradients are made by hand, as PyTorch does not have all of them (`notes` tries what
it has). That of the input is a product with the transposed matrix, which is a BSR
matrix of its own; that of the blocks has the two forms that `build` describes.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..race import said
from . import case as cases
from .worker import Job, host_peak

_DEVICE = torch.device("cpu")


def start(job: Job) -> None:
    """Sets up the device.

    Raises:
        ValueError: PyTorch does not have it.
    """
    global _DEVICE
    torch.set_num_threads(job.threads)
    torch.backends.cuda.matmul.allow_tf32 = job.tf32
    if not job.on_gpu:
        return
    if job.gpu >= torch.cuda.device_count():
        raise ValueError(
            f"Received --device={job.device}; expected CPU or one of the "
            f"{torch.cuda.device_count()} GPUs that PyTorch finds, such as GPU:0."
        )
    _DEVICE = torch.device("cuda", job.gpu)


def wait() -> None:
    """Waits for the GPU."""
    if _DEVICE.type == "cuda":
        torch.cuda.synchronize(_DEVICE)


def peak(call: Callable[[], Any]) -> float | None:
    """Returns the MB that a call takes beyond those in use before it."""
    if _DEVICE.type != "cuda":
        return host_peak(call)
    torch.cuda.reset_peak_memory_stats(_DEVICE)
    before = torch.cuda.memory_allocated(_DEVICE)
    call()
    wait()
    return (torch.cuda.max_memory_allocated(_DEVICE) - before) / 2**20


def build(name: str, case: cases.Case, job: Job) -> cases.Built:
    """Builds a contender.

    "torch_bsr" makes the gradient of the blocks of gathered inputs and outputs by a
    batched product, "torch_bsr_dense" of a dense product, of which it takes the blocks.
    """
    dtype = getattr(torch, job.dtype)
    x, upstream = (
        torch.from_numpy(each).to(_DEVICE, dtype) for each in (case.x, case.upstream)
    )
    x.requires_grad_()
    if name == "torch_dense":
        kernel = torch.from_numpy(case.kernel).to(_DEVICE).requires_grad_()
        multiply = torch.matmul
    else:
        # In PyTorch's order: rows are outputs.
        blocks = np.ascontiguousarray(case.blocks.transpose(0, 2, 1))
        kernel = torch.from_numpy(blocks).to(_DEVICE).requires_grad_()
        places = _Places(case, gathers=name == "torch_bsr")
        multiply = functools.partial(_Product.apply, places)

    def call():
        y = multiply(x, kernel.to(dtype))
        return y, torch.autograd.grad(y, (x, kernel), upstream)

    def results():
        y, (of_x, of_kernel) = call()
        y, of_x, of_kernel = map(_array, (y, of_x, of_kernel))
        if name == "torch_dense":
            factor = cases.Factor(case.kernel, np.array(True))
            return cases.compared(case, [factor], y, of_x, [of_kernel])
        return case.compared(y, of_x, case.matrix_of(of_kernel.transpose(0, 2, 1)))

    taken = kernel.numel() * kernel.element_size()
    return cases.Built(call, results, kernel.numel(), taken, 2 * taken)


def _array(tensor):
    return tensor.detach().float().cpu().numpy()


class _Product(torch.autograd.Function):
    """Multiplies by the blocks that are there."""

    @staticmethod
    def forward(ctx, places, x, blocks):
        ctx.places = places
        ctx.save_for_backward(x, blocks)
        return (places.matrix(blocks) @ x.T).T

    @staticmethod
    def backward(ctx, upstream):
        x, blocks = ctx.saved_tensors
        of_x = (ctx.places.transposed(blocks) @ upstream.T).T
        return None, of_x, ctx.places.of_blocks(x, upstream)


class _Places:
    """Where blocks [blocks, outputs, inputs of a block] are."""

    def __init__(self, case, gathers):
        self.case, self.gathers = case, gathers
        outputs, inputs = case.places.T
        self.order = _index(np.argsort(inputs, kind="stable"))
        self.outputs, self.inputs = _index(outputs), _index(inputs)
        # The lists of BSR; MKL reads 32 bits.
        self.rows = (
            _index(np.cumsum([0, *case.mask.sum(0)])).int(),
            self.inputs.int(),
        )
        self.transposed_rows = (
            _index(np.cumsum([0, *case.mask.sum(1)])).int(),
            self.outputs[self.order].int(),
        )

    def matrix(self, blocks):
        """The matrix [outputs, inputs]."""
        return torch.sparse_bsr_tensor(
            *self.rows,
            blocks,
            (self.case.outputs, self.case.inputs),
            check_invariants=False,
        )

    def transposed(self, blocks):
        """The matrix [inputs, outputs]: PyTorch multiplies by no transposed BSR."""
        return torch.sparse_bsr_tensor(
            *self.transposed_rows,
            blocks[self.order].transpose(1, 2).contiguous(),
            (self.case.inputs, self.case.outputs),
            check_invariants=False,
        )

    def of_blocks(self, x, upstream):
        """The gradient of the blocks."""
        size = self.case.block_size
        if self.gathers:
            x = x.T.contiguous().view(-1, size, self.case.batch)
            upstream = upstream.T.contiguous().view(-1, size, self.case.batch)
            return torch.bmm(upstream[self.outputs], x[self.inputs].transpose(1, 2))
        grid = (upstream.T @ x).view(
            self.case.outputs // size, size, self.case.inputs // size, size
        )
        return grid.transpose(1, 2)[self.outputs, self.inputs]


def _index(array):
    return torch.from_numpy(np.asarray(array, np.int64)).to(_DEVICE)


def notes(job: Job) -> list[str]:
    """Says what PyTorch cannot do with BSR, each tried on a small matrix."""
    if "torch_bsr" not in job.contenders and "torch_bsr_dense" not in job.contenders:
        return []
    case, dtype = cases.small(job.block_size), getattr(torch, job.dtype)
    places = _Places(case, gathers=True)
    blocks = torch.from_numpy(case.blocks.transpose(0, 2, 1)).to(_DEVICE, dtype)
    x, upstream = (
        torch.from_numpy(each).to(_DEVICE, dtype) for each in (case.x, case.upstream)
    )

    def gradient(of):
        leaf = of.detach().clone().requires_grad_()
        read = leaf if of is x else x
        matrix = places.matrix(leaf if of is blocks else blocks)
        return torch.autograd.grad((matrix @ read.T).T, leaf, upstream)[0]

    matrix = places.matrix(blocks)
    tried = {
        "the product W @ x": lambda: matrix @ x.T,
        "the product x @ W, with W on the right": lambda: upstream @ matrix,
        "the transposed product W.T @ y": lambda: matrix.transpose(0, 1) @ upstream.T,
        "its own gradient of x": lambda: gradient(x),
        "its own gradient of the blocks, by a dense matrix": lambda: gradient(blocks),
        "torch.sparse.sampled_addmm, the gradient of the blocks": (
            lambda: torch.sparse.sampled_addmm(matrix, upstream.T, x, beta=0.0)
        ),
    }
    lines = [
        f"torch.sparse_bsr, {job.dtype}, {_DEVICE.type}: {what}: {_outcome(compute)}"
        for what, compute in tried.items()
    ]
    return [*lines, "torch_bsr, torch_bsr_dense: the gradients are made by hand."]


def _outcome(compute):
    try:
        compute()
        wait()
    except Exception as error:
        return f"no ({said(error)})"
    return "yes"

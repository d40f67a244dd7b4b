"""A contender: PyTorch's pipeline of two processes, a stage each, by gloo.

The last stage has the table that makes logits, which takes about as long as all blocks
do. It is another table than the embedding's: PyTorch's stages share no weights.
"""

import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

from .. import works
from ..worker import Clock, Job
from . import torch_ddp


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    if job.towers != 2:
        raise ValueError(f"Received {job.towers} towers; expected 2 stages.")
    torch_ddp.train(job, clock, _build)


def _build(rank, job):
    """Builds a stage, and returns the function that trains a step."""
    torch.manual_seed(0)
    network = torch_ddp.LanguageModel()
    part = (_First, _Last)[rank](network)
    device = torch.device("cpu")
    stage = pipelining.PipelineStage(part, rank, 2, device)
    schedule = pipelining.Schedule1F1B(
        stage, int(job.parsed.way), loss_fn=_loss, scale_grads=True
    )
    optimizer = torch.optim.SGD(
        part.parameters(), works.LEARNING_RATE, momentum=works.MOMENTUM
    )
    x, y = (torch.from_numpy(array) for array in works.batch(job.work, job.towers))
    y = y.long()

    def step():
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
        optimizer.step()
        if rank == 1:
            torch.stack(losses).mean().item()

    return step


def _loss(logits, y):
    return functional.cross_entropy(logits.flatten(0, -2), y.flatten())


class _First(nn.Module):
    """The embedding, and all blocks."""

    def __init__(self, network):
        super().__init__()
        self.embedding, self.blocks = network.embedding, network.blocks

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class _Last(nn.Module):
    """The last normalisation, and logits."""

    def __init__(self, network):
        super().__init__()
        self.norm, self.table = network.norm, network.embedding.weight

    def forward(self, x):
        return functional.linear(self.norm(x), self.table)

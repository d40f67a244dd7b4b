"""A contender: PyTorch's DistributedDataParallel, in a loop by hand, without metrics.

Each device has a process. This one is the first of them; it tells the others how many
steps a turn has, so that they, too, rest between turns. Host memory is the sum of all.
"""

import itertools
import os
import tempfile
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .. import works
from ..worker import Clock, Job, host_mb


def run(job: Job, clock: Clock) -> None:
    """Trains until the clock stops it."""
    train(job, clock, _build)


def train(
    job: Job, clock: Clock, build: Callable[[int, Job], Callable[[], None]]
) -> None:
    """Trains by a process a device.

    `build` makes the function that trains a step, of the number of a process.
    """
    processes = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes = []
        for rank in range(1, job.towers):
            pipe, other = processes.Pipe()
            pipes.append(pipe)
            process = processes.Process(
                target=_follow, args=(rank, job, store, other, build), daemon=True
            )
            process.start()
            other.close()
        _join_group(0, job, store)
        clock.on_turn = lambda calls: [pipe.send(calls) for pipe in pipes]
        clock.memory_mb = lambda: _most([_memory_mb(0), *(p.recv() for p in pipes)])
        clock.start()
        step = build(0, job)
        while True:
            step()
            clock.call_ended()


def _follow(rank, job, store, pipe, build):
    """Is one of the other processes."""
    _join_group(rank, job, store)
    step = None
    for calls in iter(pipe.recv, 0):
        step = step or build(rank, job)
        for _ in range(calls):
            step()
        pipe.send(_memory_mb(rank))


def _join_group(rank, job, store):
    if torch.cuda.is_available():
        if torch.cuda.device_count() < job.towers:
            raise ValueError(
                f"PyTorch has {torch.cuda.device_count()} GPUs, fewer than "
                f"{job.towers}."
            )
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(1, os.cpu_count() // job.towers))
    # All are on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=job.towers,
    )


def _build(rank, job):
    """Builds a replica, and returns the function that trains a step."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    build = {"mlp": _mlp, "resnet20": _resnet20, "transformer_lm": LanguageModel}
    network = build[job.work]().to(device)
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(
        model.parameters(), works.LEARNING_RATE, momentum=works.MOMENTUM
    )
    x, y = (torch.from_numpy(array) for array in works.batch(job.work, 1))
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    x, y = x.to(device), y.long().to(device)

    def step():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        # As `fit` does, it waits for the loss.
        loss.item()

    return step


def _memory_mb(rank):
    if not torch.cuda.is_available():
        return host_mb(), None
    return host_mb(), torch.cuda.max_memory_allocated(rank) / 2**20


def _most(memories):
    """Returns the sum of the host's, and the largest of the devices'."""
    host, device = zip(*memories, strict=True)
    return sum(host), None if None in device else max(device)


def _mlp():
    sizes = [*works.WORKS["mlp"].shape, 512, 512, 512]
    hidden = [
        layer
        for before, after in itertools.pairwise(sizes)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], works.WORKS["mlp"].classes))


class LanguageModel(nn.Module):
    """A decoder as `models.text.transformer_lm`, with its positions."""

    def __init__(self):
        super().__init__()
        work = works.WORKS["transformer_lm"]
        self.embedding = nn.Embedding(work.classes, work.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(_Decoder() for _ in range(work.layers))
        self.norm = nn.LayerNorm(work.width)

    def forward(self, tokens):
        """Returns logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


class _Decoder(nn.Module):
    """Attention with rotary positions, and a perceptron."""

    def __init__(self):
        super().__init__()
        width = works.WORKS["transformer_lm"].width
        self.attention_norm, self.expand_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.reduce = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        batch, length, width = x.shape
        shape = batch, length, 3, works.HEADS, width // works.HEADS
        q, k, v = self.project(self.attention_norm(x)).view(shape).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (_turned(q), _turned(k), v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(x.shape))
        return x + self.reduce(functional.gelu(self.expand(self.expand_norm(x))))


def _turned(x):
    """Turns pairs of features [batch, tokens, heads, size] by their positions."""
    half = x.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * rate
    first, second = x[..., :half], x[..., half:]
    sin, cos = angle.sin(), angle.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, as in `models.resnet_cifar`."""

    def __init__(self, before, after):
        super().__init__()
        self.stride = 1 if before == after else 2
        self.missing = (after - before) // 2
        self.first = _conv_bn(before, after, self.stride)
        self.second = _conv_bn(after, after)

    def forward(self, x):
        y = self.second(functional.relu(self.first(x)))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
            x = functional.pad(x, (0, 0, 0, 0, self.missing, self.missing))
        return functional.relu(x + y)


def _conv_bn(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(after, eps=1e-3),
    )


def _resnet20():
    filters = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [_Block(before, after) for before, after in itertools.pairwise(filters)]
    return nn.Sequential(
        _conv_bn(3, 16),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, works.WORKS["resnet20"].classes),
    )

"""A contender: PyTorch's `DataLoader` with torchvision's transforms, two processes."""

import torch
from torch.utils import data
from torchvision import datasets, io
from torchvision.transforms import v2

from ..works import AREA, RATIO, WORKS


def batches(contender, work, folder):
    """Yields batches for ever; images are [B, C, H, W], as torchvision has them."""
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(WORKS[work].shape[:2], AREA, RATIO),
            v2.RandomHorizontalFlip(),
        ]
    )
    dataset = datasets.ImageFolder(folder / "folder", transform, loader=_decode)
    loader = data.DataLoader(
        dataset,
        WORKS[work].batch,
        sampler=_Endless(dataset),
        num_workers=2,
        # Processes are what is parallel.
        worker_init_fn=_one_thread,
    )
    yield from loader


class _Endless(data.Sampler):
    """One epoch after the other, so that the processes live on."""

    def __init__(self, dataset):
        self._count = len(dataset)

    def __iter__(self):
        while True:
            yield from torch.randperm(self._count).tolist()


def _one_thread(worker):
    torch.set_num_threads(1)


def _decode(path):
    return io.decode_jpeg(io.read_file(path))

"""What all contenders share: they read in turn, and say what it took.

A contender is a process of a race. Each round starts reading anew, so that nothing is
read ahead while others have their turn.
"""

import contextlib
import dataclasses
import importlib
import json
import pathlib
import sys
import time

import psutil

from ..race import answering, write
from .contenders import CONTENDERS
from .works import WORKS


@dataclasses.dataclass(frozen=True)
class Job:
    """What a contender is to do.

    Attributes:
        contender: Who it is, a name in `contenders.CONTENDERS`.
        work: What it reads, a name in `works.WORKS`.
        folder: Where the data are.
        warmup: Examples that are read before those of each round.
        examples: Timed examples of a round.
    """

    contender: str
    work: str
    folder: str
    warmup: int
    examples: int


def main() -> None:
    """Is a contender: reads until nothing more is wanted."""
    job = Job(**json.loads(sys.argv[1]))
    with answering() as answers:
        name = f".peers.{CONTENDERS[job.contender].module}"
        module = importlib.import_module(name, __package__)
        write(answers, measure(module, dataclasses.replace(job, examples=0)))
        for _ in sys.stdin:
            write(answers, measure(module, job))


def measure(module, job: Job) -> dict:
    """Reads for a round.

    Args:
        module: The contender's.
        job: Its job.

    Returns:
        The time to the first batch; the timed examples, which are some whole batches,
        and their time and processor time; the most memory so far, in MB.

    Raises:
        ValueError: If a batch is not what was asked for.
    """
    started = time.perf_counter()
    batches = module.batches(job.contender, job.work, pathlib.Path(job.folder))
    with contextlib.closing(batches):
        images, labels = next(batches)
        first_batch_s = time.perf_counter() - started
        _check(images, labels, job)
        _read(batches, job.warmup - len(labels))
        cpu_s, started = _cpu_s(), time.perf_counter()
        examples = _read(batches, job.examples)
        return {
            "first_batch_s": first_batch_s,
            "examples": examples,
            "seconds": time.perf_counter() - started,
            "cpu_s": _cpu_s() - cpu_s,
            "peak_mb": _peak_mb(),
        }


def _read(batches, examples):
    read = 0
    while read < examples:
        _, labels = next(batches)
        read += len(labels)
    return read


def _check(images, labels, job):
    height, width, channels = WORKS[job.work].shape
    shapes = (height, width, channels), (channels, height, width)
    if (
        tuple(images.shape[1:]) not in shapes
        or len(images) != len(labels)
        or CONTENDERS[job.contender].dtype not in str(images.dtype)
    ):
        raise ValueError(
            f"It made images {images.dtype} {tuple(images.shape)} with {len(labels)} "
            f"labels, but {CONTENDERS[job.contender].dtype} {shapes[0]} are expected."
        )


def _family():
    """Returns this process and those that it has started."""
    process = psutil.Process()
    return [process, *process.children(recursive=True)]


def _cpu_s():
    return sum(sum(process.cpu_times()[:4]) for process in _family())


def _peak_mb():
    """Returns the sum of the processes' peaks; what they share counts in each."""
    peaks = []
    for process in _family():
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        peaks.append(int(status.partition("VmHWM:")[2].split()[0]))
    return sum(peaks) / 1024

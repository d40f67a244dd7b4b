"""What the processes of all frameworks share: they take turns, and say what it took.

A process of a race checks each contender at a small size, and builds those that are
right, for every sparsity. In a turn, it times all contenders at one sparsity, the next
one in each turn.

A framework's module has

    start(job)              sets up the device
    build(name, case, job)  returns a `case.Built`
    wait()                  waits until the device has computed all calls
    peak(call)              returns the MB that a call takes beyond those in use before
                            it, or None if that is not known
    notes(job)              says what the framework cannot do
"""

import contextlib
import ctypes
import dataclasses
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..race import answering, said, write
from . import case as cases
from .contenders import CONTENDERS

# A wait for a GPU takes a part of a short call.
_CALLS_A_WAIT = {"CPU": 1, "GPU": 10}


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is to do.

    Attributes:
        module: The framework's module of this package.
        contenders: Their names.
        inputs: Inputs of the matrix.
        outputs: Its outputs.
        batch: Examples.
        block_size: Rows and columns of a block.
        sparsities: Shares of the matrix that are asked to be zero.
        masks: A file with the mask of each sparsity.
        dtype: What is multiplied: "float32", "bfloat16" or "float16".
        device: "CPU", or a GPU such as "GPU:0".
        threads: How many the CPU computes with.
        seconds: The least time that the timed calls of a turn take together.
        jit_compile: Whether TensorFlow compiles with XLA.
        tf32: Whether GPUs multiply float32 as TF32.
    """

    module: str
    contenders: tuple[str, ...]
    inputs: int
    outputs: int
    batch: int
    block_size: int
    sparsities: tuple[float, ...]
    masks: str
    dtype: str
    device: str
    threads: int
    seconds: float
    jit_compile: bool
    tf32: bool

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self.device != "CPU"

    @property
    def gpu(self) -> int:
        """The number of the GPU."""
        return int(self.device.partition(":")[2] or 0)

    @property
    def precision(self) -> str:
        """How exact products are; see `case.check`."""
        rounded = self.on_gpu and self.tf32 and self.dtype == "float32"
        return "tf32" if rounded else self.dtype

    def cases(self) -> list[cases.Case]:
        """Returns the case of each sparsity."""
        with np.load(self.masks) as masks:
            return [
                cases.Case(
                    sparsity,
                    self.inputs,
                    self.outputs,
                    self.batch,
                    self.block_size,
                    masks[str(sparsity)],
                )
                for sparsity in self.sparsities
            ]


def main() -> None:
    """Computes until nothing more is wanted."""
    job = Job(**json.loads(sys.argv[1]))
    with answering() as answers:
        framework = importlib.import_module(f".{job.module}", __package__)
        framework.start(job)
        built, answer = prepare(framework, job)
        write(answers, answer | {"notes": framework.notes(job)})
        for turn, _ in enumerate(sys.stdin):
            sparsity = job.sparsities[turn % len(job.sparsities)]
            calls = {
                name: each.call for (at, name), each in built.items() if at == sparsity
            }
            write(
                answers, {"sparsity": sparsity, "ms": _measure(calls, framework, job)}
            )


def prepare(framework: Any, job: Job) -> tuple[dict, dict]:
    """Checks and builds contenders.

    Args:
        framework: The module.
        job: What is to do.

    Returns:
        A `Built` for each sparsity and name; and an answer: `facts` of each, the reason
        of each that is `left_out`, and the names of those that are `wrong`.
    """
    built, facts, left_out, wrong = {}, [], {}, []
    small = cases.small(job.block_size)
    for name in job.contenders:
        try:
            cases.check(framework.build(name, small, job).results(), job.precision)
            for case in job.cases():
                found = _reused(name, built) or framework.build(name, case, job)
                built[case.sparsity, name] = found
                facts.append(_facts(name, case, found, framework))
        except Exception as error:
            for sparsity in job.sparsities:
                built.pop((sparsity, name), None)
            facts = [each for each in facts if each["contender"] != name]
            if isinstance(error, cases.WrongResult):
                wrong.append(name)
            left_out[name] = said(error)
    return built, {"facts": facts, "left_out": left_out, "wrong": wrong}


def _reused(name, built):
    """Dense matrices are the same at every sparsity."""
    if CONTENDERS[name].dense == name:
        return next((each for (_, other), each in built.items() if other == name), None)
    return None


def _facts(name, case, built, framework):
    for _ in range(2):
        built.call()
    framework.wait()
    return {
        "contender": name,
        "sparsity": case.sparsity,
        "has_sparsity": 1 - built.size / case.inputs / case.outputs,
        "parameter_bytes": built.parameter_bytes,
        "slot_bytes": built.slot_bytes,
        "extra_mb": framework.peak(built.call),
    }


def _measure(calls: dict[str, Callable], framework: Any, job: Job) -> dict[str, float]:
    """Returns the median milliseconds of a call of each contender."""
    found = {}
    number = _CALLS_A_WAIT["GPU" if job.on_gpu else "CPU"]
    for name, call in calls.items():
        # The first call fills the caches again.
        call()
        framework.wait()
        seconds = []
        while not seconds or number * sum(seconds) < job.seconds:
            began_s = time.perf_counter()
            for _ in range(number):
                call()
            framework.wait()
            seconds.append((time.perf_counter() - began_s) / number)
        found[name] = 1000 * statistics.median(seconds)
    return found


def host_peak(call: Callable[[], Any]) -> float | None:
    """Returns the MB of host memory that a call takes beyond those in use before it.

    It needs Linux: elsewhere it returns None.
    """
    with contextlib.suppress(AttributeError, OSError):
        # Memory that was freed, but is kept for later, would be used without a trace.
        ctypes.CDLL(None).malloc_trim(0)
    try:
        # So the kernel forgets the highest mark so far.
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before_mb = _status_mb("VmRSS")
        call()
        return max(0.0, _status_mb("VmHWM") - before_mb)
    except OSError:
        return None


def _status_mb(name):
    with open("/proc/self/status") as file:
        return int(file.read().partition(f"{name}:")[2].split()[0]) / 1024

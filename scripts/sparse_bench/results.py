"""Starts a process for each framework, and compares what they measured."""

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence

from ..race import Runner, ratio
from .contenders import CONTENDERS, YARDSTICK
from .worker import Job


def start(job: Job, verbose: bool = False) -> Runner:
    """Starts a framework, and waits until its contenders are ready.

    Raises:
        Failed: If it does not get there.
    """
    threads = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(job.threads)
    )
    hidden = {} if job.on_gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    environ = os.environ | threads | hidden
    return Runner("scripts.sparse_bench", job, verbose, environ)


def summaries(facts: Sequence[dict], turns: Sequence[dict]) -> Iterator[dict]:
    """Sums up what contenders measured.

    Args:
        facts: What each contender said of itself at each sparsity.
        turns: The times of each framework's turns.

    Yields:
        The facts of each contender by sparsity, with `ms`, the median of its rounds,
        and `rounds_ms`; with `times_dense` and `times_keras`, by how many times it is
        faster than the dense one of its framework, and than Keras, each a median over
        rounds, None if that has no times; with `of_ideal`, the part of
        1 / (1 - sparsity) that `times_dense` is; and with `parameters_of_dense`.
    """
    rounds = {}
    for turn in turns:
        for name, ms in turn["ms"].items():
            rounds.setdefault((turn["sparsity"], name), []).append(ms)
    by_place = {(each["sparsity"], each["contender"]): each for each in facts}
    for fact in sorted(facts, key=lambda each: each["sparsity"]):
        sparsity, name = fact["sparsity"], fact["contender"]
        own = rounds[sparsity, name]
        dense = sparsity, CONTENDERS[name].dense
        times_dense = ratio(rounds.get(dense, ()), own)
        yield fact | {
            "ms": statistics.median(own),
            "rounds_ms": own,
            "times_dense": times_dense,
            "times_keras": ratio(rounds.get((sparsity, YARDSTICK), ()), own),
            "of_ideal": times_dense and times_dense * (1 - fact["has_sparsity"]),
            "parameters_of_dense": dense in by_place
            and fact["parameter_bytes"] / by_place[dense]["parameter_bytes"],
        }


COLUMNS = (
    "asked",
    "contender",
    "sparsity",
    "ms",
    "min..max of rounds",
    "times Keras Dense",
    "times its dense",
    "of the ideal",
    "parameters MB",
    "Adam's slots MB",
    "of dense",
    "extra MB of a call",
)


def cells(result: Mapping) -> list[str | None]:
    """Returns the cells of a result, for `COLUMNS`."""
    return [
        f"{result['sparsity']:g}",
        CONTENDERS[result["contender"]].label,
        f"{result['has_sparsity']:.3f}",
        f"{result['ms']:.2f}",
        f"{min(result['rounds_ms']):.2f}..{max(result['rounds_ms']):.2f}",
        _number(result["times_keras"], ".2f"),
        _number(result["times_dense"], ".2f"),
        _number(result["of_ideal"], ".2f"),
        f"{result['parameter_bytes'] / 2**20:.1f}",
        f"{result['slot_bytes'] / 2**20:.1f}",
        _number(result["parameters_of_dense"], ".1%"),
        _number(result["extra_mb"], ",.0f"),
    ]


def _number(value, form):
    return None if value is None else format(value, form)

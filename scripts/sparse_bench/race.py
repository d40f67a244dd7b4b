"""Runs a process for each framework, in turn, and compares what they measured."""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..bench.race import Runner, take_turns
from .contenders import FORMS, PRODUCTS, YARDSTICK, find
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


def race(
    jobs: Sequence[Job],
    rounds: int,
    failed: Callable[[str, str], None],
    verbose: bool = False,
) -> tuple[list[dict], list[dict]]:
    """Times the contenders of all jobs.

    Args:
        jobs: A job for each framework, all with the same sparsities.
        rounds: How many turns each has at each sparsity.
        failed: Is told of each framework that cannot go on, and why.
        verbose: Whether their standard error is shown.

    Returns:
        What `summaries` makes of their times, and the first answer of each framework;
        see `worker.prepare`.
    """
    times = take_turns(
        jobs,
        lambda job: start(job, verbose),
        rounds * len(jobs[0].sparsities),
        lambda job, reason: failed(job.module, reason),
    )
    facts = [fact for each in times.values() for fact in each.starts[0]["facts"]]
    turns = [turn for each in times.values() for turn in each.rounds]
    answers = [each.starts[0] for each in times.values()]
    return [*summaries(facts, turns)], answers


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
        dense = sparsity, find(name).dense
        times_dense = _faster(own, rounds.get(dense))
        yield fact | {
            "ms": statistics.median(own),
            "rounds_ms": own,
            "times_dense": times_dense,
            "times_keras": _faster(own, rounds.get((sparsity, YARDSTICK))),
            "of_ideal": times_dense and times_dense * (1 - fact["has_sparsity"]),
            "parameters_of_dense": dense in by_place
            and fact["parameter_bytes"] / by_place[dense]["parameter_bytes"],
        }


def _faster(own, others):
    if not others or len(others) != len(own):
        return None
    pairs = zip(others, own, strict=True)
    return statistics.median(other / ms for other, ms in pairs)


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
        find(result["contender"]).label,
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


PRODUCT_COLUMNS = (
    "sparsity",
    "form",
    *(f"{label}, ms" for label in PRODUCTS.values()),
    *(f"{label}, times dense" for label in PRODUCTS.values()),
    "all three, ms",
    "most extra MB",
)


def by_form(results: Sequence[Mapping]) -> Iterator[dict]:
    """Yields the results of --products, those of a form and a sparsity together."""
    places = {(each["sparsity"], each["contender"]): each for each in results}
    for sparsity in dict.fromkeys(each["sparsity"] for each in results):
        for form in FORMS:
            found = {
                product: places[sparsity, f"{form}:{product}"]
                for product in PRODUCTS
                if (sparsity, f"{form}:{product}") in places
            }
            if found:
                yield {"sparsity": sparsity, "form": form, "products": found}


def product_cells(result: Mapping) -> list[str | None]:
    """Returns the cells of what `by_form` yields, for `PRODUCT_COLUMNS`."""
    found = [result["products"].get(product) for product in PRODUCTS]
    extra = [each["extra_mb"] for each in found if each]
    return [
        f"{result['sparsity']:g}",
        FORMS[result["form"]],
        *(each and f"{each['ms']:.2f}" for each in found),
        *(each and _number(each["times_dense"], ".2f") for each in found),
        f"{sum(each['ms'] for each in found):.2f}" if all(found) else None,
        None if None in extra else f"{max(extra):,.0f}",
    ]


def _number(value, form):
    return None if value is None else format(value, form)

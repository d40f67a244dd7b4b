"""Finds the largest global batch that fits the devices, and the fastest one.

    python -m towers.find_batch_size --model=resnet20 --dataset=tfds:cifar10

The flags are those of towers.train, and the search begins at --batch_size. Each size
trains for a few steps in a process of its own. It uses random images of the data set's
shape, so the speed of the input does not count.
Exit codes: 0 done; 1 error, or nothing fits; 130 stopped by Ctrl-C; 143 by SIGTERM.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.find_batch_size import search_flags
    from towers.program import startup

    _settings = startup.begin(
        "towers.find_batch_size", lambda argv: search_flags.read(argv, __doc__)
    )

import dataclasses
import json
import sys
from typing import Any

from towers.find_batch_size import child, probe, search
from towers.find_batch_size.report import SearchReport
from towers.find_batch_size.search import Probe
from towers.find_batch_size.search_flags import Search
from towers.program import ending, startup, words
from towers.program.commands import fail
from towers.train.parts.devices import with_free_gpus

_PROGRAM = "towers.find_batch_size"


def find(settings: Search) -> int:
    """Searches, says on stderr how far it is, and shows what was found.

    Returns:
        The exit code.

    Raises:
        ValueError: If any input is bad, or nothing fits.
    """
    if (settings.hosts or 1) == 1:
        settings = with_free_gpus(settings)
    most, start = settings.max_batch_size, settings.batch_size
    start = start if most is None else min(start, most)
    # Only probes use the devices: this process would keep a part of their memory.
    told = run(settings, start)
    unit = search.unit(told["split_ratios"], settings.micro_batch_count)
    if most is not None and most < unit:
        among = words.count(len(told["towers"]), "tower")
        if settings.micro_batch_count > 1:
            among += f" of {settings.micro_batch_count} micro-batches"
        raise ValueError(
            f"Received --max_batch_size={most}; expected at least {unit}, the "
            f"fewest that can be divided exactly among {among}."
        )
    tried, code = [], 0
    report = SearchReport(
        tried,
        towers=told["towers"],
        split_ratios=told["split_ratios"],
        memory=told["memory"],
        most=most,
        learning_rate=settings.learning_rate,
        note=told["note"],
        micro_batches=settings.micro_batch_count,
    )
    try:
        for result in search.search(
            lambda size: child.as_value(Probe, run(settings, size)),
            child.as_value(Probe, told),
            unit,
            most,
        ):
            tried.append(result)
            say(result)
    except KeyboardInterrupt as stop:
        cause, code = ending.cause_of(stop)
        fail(f"Stopped by {cause}.", _PROGRAM)
        report = dataclasses.replace(report, stopped=True)
    if search.largest(tried):
        print(json.dumps(report.as_dict()) if settings.json else report)
        if settings.plot:
            report.plot(settings.plot)
    elif not code:
        raise ValueError(
            f"No batch fits, not even {tried[-1].batch_size} ({tried[-1].why}); allow "
            "more memory, or take a smaller model, smaller images, --dtype=bf16, or "
            "more --stages or --micro_batches."
        )
    return code


def run(settings: Search, batch_size: int) -> dict[str, Any]:
    """Has a process try a batch size, rounded down to what towers divide exactly.

    Returns:
        What the process told: see `probe.probe`.

    Raises:
        ValueError: If it failed, and not for want of memory.
    """
    return child.ask(
        probe.__name__,
        settings.for_a_probe(batch_size),
        f"A batch of {batch_size} took longer than {child.PROBE_S} s; expected less, "
        "so give fewer --probe_steps or a smaller --max_batch_size.",
        settings.hosts or 1,
        settings.num_gpus,
    )


def say(result: Probe) -> None:
    """Says on stderr what became of a batch size, since a search takes minutes."""
    found = f"does not fit ({result.why})"
    if result.fits:
        found = f"{result.examples_per_sec:,.1f} examples/sec"
        found += f", {result.peak_memory_mb:,.0f} MB"
    print(f"{_PROGRAM}: batch {result.batch_size:,}: {found}", file=sys.stderr)


if __name__ == "__main__":
    ending.stop_at_sigterm()  # which ends the probe that runs, too
    startup.leave(ending.run(_PROGRAM, lambda: find(_settings)))

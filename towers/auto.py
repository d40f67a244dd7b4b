"""Chooses how variables are updated by trying: builder, reduction and XLA, in seconds.

The candidates train on the first batches of the run, in turn; then every variable gets
back the value that it had. What a candidate is made of is the builders' business, and
where the choice is remembered the caller's.
"""

import collections
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from towers.devices import is_gpu
from towers.input_pipeline import words
from towers.reduce import ALGORITHMS

# Seconds that trying may take. The first candidate is what the run falls back on, and
# its start is not lost if it wins.
BUDGET_S = 10.0
# Compiling takes longer than starting without: by this factor, at a guess.
_XLA_START = 5
_ROUNDS, _ROUND_S = 5, 0.1
# Another than the first, the simplest, has to be better by more than noise.
_BETTER = 0.9


class Choice(NamedTuple):
    """One way to update the variables.

    Attributes:
        builder: Name of the builder.
        all_reduce_alg: How `replicated` adds gradients.
        xla: Whether XLA compiles towers and update.
    """

    builder: str = "parameter_server"
    all_reduce_alg: str = "auto"
    xla: bool = False

    def __str__(self) -> str:
        name = self.builder
        if self.builder == "replicated":
            name += f" ({self.all_reduce_alg})"
        return f"{name} with XLA" if self.xla else name


def candidates(
    towers: Sequence[str], nccl: bool, xla: bool | None, synchronized: bool
) -> list[Choice]:
    """Lists what may be chosen, the simplest first.

    Args:
        towers: The towers' devices.
        nccl: Whether NCCL can be used.
        xla: Whether XLA is to be used; `None` for what is faster.
        synchronized: Whether towers run together, which XLA cannot compile.
    """
    ways = [Choice()]
    if synchronized:
        xla = False
    if len(towers) > 1:
        gpus = is_gpu(towers[0])
        algorithms = [
            name
            for name in ALGORITHMS
            # Between logical CPUs, the first device is the CPU.
            if (name != "nccl" or nccl) and (name != "device" or gpus)
        ]
        ways += [Choice("replicated", name) for name in algorithms]
    return [
        way._replace(xla=compiled)
        for compiled in ([False, True] if xla is None else [xla])
        for way in ways
    ]


class Trial(NamedTuple):
    """What became of a candidate.

    Attributes:
        choice: The candidate.
        step_s: Seconds of a step, `None` if it was not measured.
        why: Why not.
    """

    choice: Choice
    step_s: float | None
    why: str = ""


def choose(
    choices: Sequence[Choice],
    train: Callable[[Choice], Callable[[], Any]],
    steps: int,
    start_s: float,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Trial]:
    """Measures candidates as long as there is time.

    Args:
        choices: The candidates. The first is started already.
        train: Makes a candidate's function, which trains for one call.
        steps: Steps in a call.
        start_s: Seconds that the first candidate's first call took.
        budget_s: Seconds that may be used.
        clock: Returns seconds.

    Returns:
        What became of each, the fastest first; the first of `choices` where others
        are not clearly faster.
    """
    begun_s = clock()
    simplest, *others = choices
    if start_s > budget_s:
        return [Trial(choice, None, "it would take too long") for choice in choices]
    calls = {simplest: train(simplest)}
    calls[simplest]()
    call_s = clock() - begun_s
    skipped = []
    for choice in others:
        expected_s = start_s * (_XLA_START if choice.xla else 1)
        expected_s += _ROUNDS * max(call_s, _ROUND_S) * (len(calls) + 1)
        if clock() - begun_s + expected_s > budget_s:
            skipped.append(Trial(choice, None, "it would take too long"))
            continue
        try:
            call = train(choice)
            call()
            calls[choice] = call
        except Exception as error:  # whatever it is: the run can go on without
            said = str(error).strip() or type(error).__name__
            reason = said.splitlines()[0][:60]
            skipped.append(Trial(choice, None, f"it fails: {reason}"))
    if len(calls) == 1:
        return [Trial(simplest, None, "nothing to compare it with"), *skipped]
    first, *trials = (
        Trial(choice, each_s / steps) for choice, each_s in _race(calls, clock).items()
    )
    better = [trial for trial in trials if trial.step_s < first.step_s * _BETTER]
    order = [*sorted(better, key=lambda trial: trial.step_s), first]
    return order + [trial for trial in trials if trial not in order] + skipped


def _race(calls, clock):
    """Seconds of a call of each, measured in turn: what drifts meets all."""
    rounds = {choice: [] for choice in calls}
    for _ in range(_ROUNDS):
        for choice, call in calls.items():
            count, before_s = 0, clock()
            while count < 1 or clock() - before_s < _ROUND_S:
                call()
                count += 1
            rounds[choice].append((clock() - before_s) / count)
    return {choice: statistics.median(times_s) for choice, times_s in rounds.items()}


def table(trials: Sequence[Trial]) -> str:
    """Says what was measured, in a few lines."""
    chosen, *others = trials
    # What is left out for one reason is left out in one line.
    left = collections.defaultdict(list)
    for choice, step_s, why in others:
        if step_s is None:
            left[why].append(str(choice))
    left = [
        (names[0] if len(names) == 1 else words.count(len(names), "other way"), why)
        for why, names in left.items()
    ]
    if chosen.step_s is None:
        untried = "".join(f"; {name} not tried: {why}" for name, why in left)
        return f"The variables are updated by {chosen.choice}{untried}."
    rows = [
        (str(choice), f"{1000 * step_s:10.2f} ms a step")
        for choice, step_s, _ in trials
        if step_s
    ]
    rows += [(name, f"not measured: {why}") for name, why in left]
    width = max(len(name) for name, _ in rows)
    lines = ["How to update the variables was tried; the first line is chosen."]
    return "\n".join([*lines, *(f"  {name:{width}}  {said}" for name, said in rows)])


def remember(file: str | None, key: Any, trials: Sequence[Trial]) -> None:
    """Writes a choice down.

    Args:
        file: Where to, if anywhere.
        key: What it was made for: JSON.
        trials: What `choose` returned.

    Raises:
        OSError: If the file cannot be written.
    """
    if file is None:
        return
    chosen = trials[0].choice
    measured = {str(t.choice): t.step_s and 1000 * t.step_s for t in trials}
    text = json.dumps(
        {"for": key, "chosen": chosen._asdict(), "step_ms": measured}, indent=2
    )
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    with open(f"{file}.unfinished", "w") as written:
        written.write(text + "\n")
    os.replace(f"{file}.unfinished", file)


def recall(file: str | None, key: Any, ways: Sequence[Choice]) -> Choice | None:
    """Reads a choice that was made before.

    Args:
        file: What `remember` wrote, if anything.
        key: What a choice is wanted for.
        ways: What may be chosen.

    Returns:
        The choice, `None` if there is none for this.
    """
    if file is None:
        return None
    try:
        with open(file) as read:
            found = json.load(read)
        choice = Choice(**found["chosen"])
        return choice if found["for"] == key and choice in ways else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is measured again

"""Chooses how variables are updated by measuring: builder, all-reduce and XLA.

The candidates train on the first batches of the run, in turn; then every variable is
restored. Builders define the candidates, and the caller stores the choice.

Candidates race against the best so far, call by call, as a machine's speed drifts. A
candidate that is not 10% faster is not taken. A deterministic run measures nothing.
"""

import math
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from towers._deprecated import rename_keys
from towers.collectives.world import World
from towers.devices.names import is_gpu
from towers.model.options import UpdateOptions
from towers.program import words
from towers.program.features import feature

# Budget for measuring: seconds, or a fraction of the run if that is longer. On CPUs,
# where steps are slow, users do not wait that long for the first batch.
BUDGET_S, BUDGET, ON_CPUS_S = 10.0, 0.02, 120.0
# Assumed number of batches in an epoch, if the data have no known length.
ASSUMED_BATCHES = 1000
# A start with XLA takes longer: by this factor, until it is measured.
_XLA_START = 5
_ROUNDS, _ROUND_S = 5, 0.05
# A candidate has to beat the first one, the fall-back, by more than noise.
_BETTER = 0.9
_TOO_LONG = "it would take too long"


class Choice(NamedTuple):
    """One way to update the variables.

    Attributes:
        variable_update: Name of the builder.
        all_reduce_alg: Algorithm by which `replicated` adds gradients.
        xla: Whether XLA compiles towers and update.
    """

    variable_update: str = "parameter_server"
    all_reduce_alg: str = "auto"
    xla: bool = False

    @classmethod
    def of(cls, update: UpdateOptions) -> "Choice":
        """Returns the choice that corresponds to a value with options."""
        return cls(update.name, getattr(update, "all_reduce", "auto"))

    def adds_like(self, other: "Choice") -> bool:
        """Returns whether another choice differs in nothing but XLA."""
        return self._replace(xla=other.xla) == other

    def __str__(self) -> str:
        name = self.variable_update
        if self.variable_update == "replicated":
            name += f" ({self.all_reduce_alg})"
        return f"{name} with XLA" if self.xla else name


def candidates(
    towers: Sequence[str],
    nccl: bool,
    xla: bool | None,
    synchronized: bool,
    stays: bool = False,
    in_stages: bool = False,
    told: Choice | None = None,
    across_hosts: bool = False,
) -> list[Choice]:
    """Lists the candidates, the fall-back first.

    Args:
        towers: The devices of this host's towers.
        nccl: Whether NCCL can be used.
        xla: Whether to use XLA; `None` for the faster.
        synchronized: Whether layers synchronize the towers, which XLA cannot compile.
        stays: Whether the variables have to stay on another device than the first
            tower's.
        in_stages: Whether towers compute in stages, which XLA does not compile.
        told: The way that the user has set, so that only XLA is left to choose.
        across_hosts: Whether NCCL adds the gradients of several hosts, too.
    """
    server = [Choice()]
    gpus = is_gpu(towers[0])
    if synchronized or in_stages:
        xla = False
    algorithms = []
    if len(towers) > 1 and not stays:
        # On GPUs, adding on the CPU is slowest. On CPUs, "device" is the same.
        algorithms = ["nccl", "device", "ring"] if gpus else ["cpu", "ring"]
    elif across_hosts and not stays:
        algorithms = ["nccl"]
    copies = [
        Choice("replicated", name) for name in algorithms if name != "nccl" or nccl
    ]
    # On CPUs, the simplest comes first, and compiled ones last. On GPUs there may be
    # time for a few only, so the most promising come first. With copies, nothing is
    # sent before a step, and only gradients after it; NCCL sends them over all links at
    # once. XLA saves launches and memory traffic on the towers, whichever algorithm
    # adds the gradients, so it is tried early with the most promising. With variables
    # at home, only the rows of a large table that are used are sent. The other
    # algorithms are for a few small gradients (on one device) and for machines whose
    # links NCCL does not know.
    plain = [*copies[:1], *server, *copies[1:]] if gpus else [*server, *copies]
    if told is not None:
        plain = [told]
    if xla is not None:
        return [way._replace(xla=xla) for way in plain]
    compiled = [way._replace(xla=True) for way in plain]
    if gpus:
        return [plain[0], compiled[0], *plain[1:], *compiled[1:]]
    return [*plain, *compiled]


def of_all_hosts(ways: Sequence[Choice], hosts: World) -> list[Choice]:
    """Returns the ways that all hosts have; towers and libraries may differ."""
    ways_of_hosts = hosts.exchange([[*way] for way in ways])
    return [way for way in ways if all([*way] in of_host for of_host in ways_of_hosts)]


class CandidateTrial(NamedTuple):
    """The result of measuring a candidate.

    Attributes:
        choice: The candidate.
        step_s: Seconds of a step, `None` if it was not measured.
        why: Why it was not measured.
    """

    choice: Choice
    step_s: float | None
    why: str = ""


def choose(
    choices: Sequence[Choice],
    train: Callable[[Choice], Callable[[], Any]],
    steps: int,
    start_s: float,
    calls: int = 0,
    drop: Callable[[Choice], Any] = lambda choice: None,
    clock: Callable[[], float] = time.perf_counter,
    most_s: float = math.inf,
) -> list[CandidateTrial]:
    """Measures candidates within a time budget, each against the best so far.

    Args:
        choices: The candidates. The first has started already.
        train: Makes a candidate's function, which trains for one call.
        steps: Number of steps in a call.
        start_s: Seconds that the first candidate's first call took.
        calls: Number of calls left in the run.
        drop: Called with each losing candidate, before the next one starts.
        clock: Returns seconds.
        most_s: Maximum seconds for measuring, however long the run is.

    Returns:
        The result of each candidate, the best first. The first of `choices` counts as
        best unless another is clearly faster; all others were passed to `drop`.
    """
    begun_s = clock()
    first, *left = choices
    # Measuring a call takes a call.
    if start_s > BUDGET_S and BUDGET * calls < 1:
        return [CandidateTrial(choice, None, _TOO_LONG) for choice in choices]
    contest = _Contest(first, train, drop, clock, start_s)
    call_s = clock() - begun_s
    budget_s = min(max(BUDGET_S, BUDGET * calls * call_s), most_s)
    race_s = 2 * _ROUNDS * max(call_s, _ROUND_S)
    while left:
        # A candidate may fit once the time of a start has been measured.
        left_s = budget_s - (clock() - begun_s)
        fits = (
            candidate
            for candidate in left
            if contest.start_s(candidate) + race_s <= left_s
        )
        if (choice := next(fits, None)) is None:
            break
        left.remove(choice)
        contest.enter(choice)
    skipped = [CandidateTrial(choice, None, _TOO_LONG) for choice in left]
    return contest.trials(steps) + skipped


class _Contest:
    """Measures candidates, each against the best so far."""

    def __init__(self, first, train, drop, clock, start_s):
        """Calls the first candidate, whose first call took `start_s`."""
        self._train, self._drop, self._clock = train, drop, clock
        self._first = self._best = first
        # Maps whether XLA compiles to the time of a start. The first start of a process
        # also loads libraries and tunes kernels, so later ones are better estimates.
        self._first_start_s, self._starts = start_s, {first.xla: start_s}
        # Seconds of a call of the first candidate, and the ratio of the others to it.
        self._first_s, self._slower = None, {first: 1.0}
        self._failed: list[CandidateTrial] = []
        self._best_call = train(first)
        self._best_call()

    def start_s(self, choice):
        """Estimates the seconds of a candidate's start."""
        plain_s = self._starts.get(False, self._first_start_s)
        compiled_s = self._starts.get(True, _XLA_START * plain_s)
        return compiled_s if choice.xla else plain_s

    def enter(self, choice):
        """Measures a candidate, and drops the slower of it and the best so far."""
        begun_s, loser = self._clock(), choice
        try:
            call = self._train(choice)
            call()
        except Exception as error:  # Any error: the run can continue without it.
            message = str(error).strip() or type(error).__name__
            reason = message.splitlines()[0][:60]
            self._failed.append(CandidateTrial(choice, None, f"it fails: {reason}"))
        else:
            self._starts[choice.xla] = self._clock() - begun_s
            before_s, times = _race(self._best_call, call, self._clock)
            self._first_s = self._first_s or before_s
            best, slower = self._best, self._slower
            slower[choice] = times * slower[best]
            if slower[choice] < slower[best] * (_BETTER if best == self._first else 1):
                loser, self._best, self._best_call = best, choice, call
        call = None  # Frees the candidate's function and its variables.
        self._drop(loser)

    def trials(self, steps):
        """Returns the results of all candidates, the best first, failures last."""
        if self._first_s is None:
            nothing = CandidateTrial(self._first, None, "nothing to compare it with")
            return [nothing, *self._failed]
        trials = [
            CandidateTrial(choice, times * self._first_s / steps)
            for choice, times in self._slower.items()
        ]
        trials.sort(key=lambda trial: (trial.choice != self._best, trial.step_s))
        return trials + self._failed


def _race(one, other, clock):
    """Returns the seconds of a call of `one`, and the ratio of `other` to it.

    Calls alternate, and each is compared with its neighbour, as the machine's speed may
    drift.
    """
    times_s, ratios = [], []
    for _ in range(_ROUNDS):
        each_s = []
        for call in (one, other):
            count, before_s = 0, clock()
            while count < 1 or clock() - before_s < _ROUND_S:
                call()
                count += 1
            each_s.append((clock() - before_s) / count)
        times_s.append(each_s[0])
        ratios.append(each_s[1] / each_s[0])
    return statistics.median(times_s), statistics.median(ratios)


def lines(trials: Sequence[CandidateTrial]) -> list[str]:
    """Says which way was chosen and why, in a short line, and which ones failed."""
    chosen, *others = trials
    text = f"Updating variables by {chosen.choice}"
    measured = [step_s for _, step_s, _ in others if step_s is not None]
    slow = sum(why == _TOO_LONG for _, _, why in others)
    if chosen.step_s is not None:
        text += f": {words.figure(1000 * chosen.step_s)} ms a step"
        # Only the fall-back is preferred to a faster candidate.
        if measured and min(measured) < chosen.step_s:
            text += f", as none is {1 - _BETTER:.0%} faster"
        elif measured:
            text += f", the fastest of {len(measured) + 1} ways"
    elif slow:
        text += f": measuring {words.count(slow, 'other way')} would take too long"
    notes = [
        f"{way} is left out, as {why}"
        for way, step_s, why in others
        if step_s is None and why != _TOO_LONG
    ]
    return [f"{text}.", *(textwrap.shorten(note, 92) for note in notes)]


def remember(file: str | None, key: Any, trials: Sequence[CandidateTrial]) -> None:
    """Writes the choice to a file, with its conditions and the measurements.

    Raises:
        OSError: The file cannot be written.
    """
    if file is None:
        return
    chosen = trials[0].choice
    measured = {str(t.choice): t.step_s and 1000 * t.step_s for t in trials}
    feature("model.remembered").write(
        file, {"for": key, "chosen": chosen._asdict(), "step_ms": measured}
    )


def recall(file: str | None, key: Any, ways: Sequence[Choice]) -> Choice | None:
    """Reads a choice that `remember` wrote.

    Returns:
        The choice; `None` if there is none for these conditions, or it is no candidate.
    """
    if file is None:
        return None
    content = feature("model.remembered").read(file)
    try:
        choice = Choice(**rename_keys(content["chosen"]))
        return choice if rename_keys(content["for"]) == key and choice in ways else None
    except (ValueError, KeyError, TypeError):
        return None  # It is measured again.

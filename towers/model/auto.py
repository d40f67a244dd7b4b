"""Chooses how variables are updated by measuring: builder, all-reduce and XLA.

The candidates train on the run's own batches, in turn, and all compute the same up to
rounding. Builders define the candidates, and `first_calls.py` makes the calls and
stores the choice.

Candidates race against the best so far, block by block, as a machine's speed drifts. A
candidate that is not 10% faster is not taken. A deterministic run measures nothing.
"""

import math
import textwrap
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from towers.collectives.world import World
from towers.devices.names import is_gpu
from towers.model.options import UpdateOptions
from towers.program import words
from towers.program.features import feature

# Budget for measuring: seconds, or a fraction of the run if that is longer. A run that
# is known to be short spends less. On CPUs, where steps are slow, there is a limit.
BUDGET_S, BUDGET, OF_SHORT_RUN, ON_CPUS_S = 10.0, 0.02, 0.1, 120.0
# Assumed number of batches in an epoch, if the data have no known length.
ASSUMED_BATCHES = 1000
# A start with XLA takes longer: by this factor, until it is measured.
_XLA_START = 5
# A candidate that is slower in each of the first rounds loses before the last one.
_ROUNDS, _FIRST_ROUNDS, _ROUND_S = 5, 3, 0.05
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


class Contest:
    """Decides which way makes each call of training, from the seconds of earlier calls.

    The best way so far and a candidate make calls in turn. A block is a few calls of
    one way, and each block is compared with the one before, as the machine's speed may
    drift. The caller makes the calls and measures them.

    Attributes:
        best: The best way so far.
        candidate: The way that races against it; `None` between two races.
        turn: The way that makes the next call; `None` once the contest is over.
        rounds: Number of rounds in which a candidate races. The caller sets it to 1
            where each switch between two ways takes as long as a start.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        start_s: float,
        calls: int = 0,
        most_s: float = math.inf,
    ):
        """Begins with the first way, which has made one call.

        Args:
            choices: The ways to choose from. The first counts as best unless another
                is clearly faster.
            start_s: Seconds that the first way's first call took.
            calls: Number of calls in the run; 0 if not known.
            most_s: Maximum seconds for measuring, however long the run is.
        """
        self.best, *self._left = choices
        self.candidate: Choice | None = None
        self.rounds = _ROUNDS
        self._first, self._calls, self._most_s = self.best, calls, most_s
        # Maps whether XLA compiles to the time of a start. The first start of a process
        # also loads libraries and tunes kernels, so later ones are better estimates.
        self._first_start_s, self._starts = start_s, {self.best.xla: start_s}
        # Seconds of a call of the first way, and the ratio of the others to it.
        self._first_s, self._slower = None, {self.best: 1.0}
        self._failed: list[CandidateTrial] = []
        # The seconds of the latest call, and the error if it failed.
        self._seconds: float | None = None
        self._error = ""
        # Even one call would be more than the budget.
        too_long = start_s > BUDGET_S and BUDGET * calls < 1
        self._turns = iter(()) if too_long or not self._left else self._take_turns()
        self.turn: Choice | None = next(self._turns, None)

    def took(self, seconds: float | None) -> None:
        """Notes the seconds of the call that `turn` has made, and moves on.

        Args:
            seconds: The seconds of the call, or of the start of a way; `None` if they
                say nothing of the way, as for the first call after a switch.
        """
        self._seconds, self._error = seconds, ""
        self.turn = next(self._turns, None)

    def failed(self, error: str) -> None:
        """Notes that `turn` could not make its first call, and moves on."""
        self._seconds, self._error = None, error
        self.turn = next(self._turns, None)

    def trials(self, steps: int) -> list[CandidateTrial]:
        """Returns the results of all ways: the best first, those not measured last.

        Args:
            steps: Number of steps in a call.
        """
        skipped = [CandidateTrial(choice, None, _TOO_LONG) for choice in self._left]
        if self._first_s is None:
            why = _TOO_LONG if skipped else "nothing to compare it with"
            return [CandidateTrial(self._first, None, why), *self._failed, *skipped]
        trials = [
            CandidateTrial(choice, times * self._first_s / steps)
            for choice, times in self._slower.items()
        ]
        trials.sort(key=lambda trial: (trial.choice != self.best, trial.step_s))
        return trials + self._failed + skipped

    def _take_turns(self) -> Iterator[Choice]:
        """Yields the way of each call."""
        best_s = fmean((yield from self._block(self.best)))
        left_s = self._budget_s(best_s)
        while (candidate := self._next_that_fits(left_s, best_s)) is not None:
            self._left.remove(candidate)
            self.candidate = candidate
            yield candidate
            if self._seconds is None:
                why = f"it fails: {self._error}"
                self._failed.append(CandidateTrial(candidate, None, why))
            else:
                self._starts[candidate.xla] = self._seconds
                left_s -= self._seconds
                left_s -= yield from self._race(candidate, best_s)
            self.candidate = None
            if self._left:
                best_s = fmean((yield from self._block(self.best)))

    def _race(self, candidate, best_s):
        """Compares a candidate with the best; returns the seconds that were lost."""
        self._first_s = self._first_s or best_s
        ratios, lost_s = [], 0.0
        while True:
            times_s = yield from self._block(candidate)
            ratios.append(fmean(times_s) / best_s)
            lost_s += max(sum(times_s) - len(times_s) * best_s, 0.0)
            is_slower = len(ratios) >= _FIRST_ROUNDS and min(ratios) > 1
            if len(ratios) >= self.rounds or is_slower:
                break
            best_s = fmean((yield from self._block(self.best)))
        slower = self._slower
        slower[candidate] = median(ratios) * slower[self.best]
        factor = _BETTER if self.best == self._first else 1
        if slower[candidate] < slower[self.best] * factor:
            self.best = candidate
        return lost_s

    def _block(self, choice):
        """Yields one way for some calls; returns the seconds of each."""
        times_s = []
        while len(times_s) < _ROUNDS // self.rounds or sum(times_s) < _ROUND_S:
            yield choice
            if self._seconds is not None:
                times_s.append(self._seconds)
        return times_s

    def _budget_s(self, call_s):
        """Returns the seconds that starts and slower candidates may take."""
        run_s = self._calls * call_s
        at_once_s = min(BUDGET_S, OF_SHORT_RUN * run_s) if run_s else BUDGET_S
        return min(max(at_once_s, BUDGET * run_s), self._most_s)

    def _next_that_fits(self, left_s, call_s):
        """Returns the first candidate for whose start and race there is time, if any.

        A candidate may fit once the time of a start has been measured.
        """
        race_s = _ROUNDS * max(call_s, _ROUND_S)
        fits = (way for way in self._left if self._start_s(way) + race_s <= left_s)
        return next(fits, None)

    def _start_s(self, choice):
        """Estimates the seconds of a candidate's start."""
        plain_s = self._starts.get(False, self._first_start_s)
        compiled_s = self._starts.get(True, _XLA_START * plain_s)
        return compiled_s if choice.xla else plain_s


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

    Without any measurement, nothing is written: a longer run may measure.

    Raises:
        OSError: The file cannot be written.
    """
    if file is None or trials[0].step_s is None:
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
        choice = Choice(**content["chosen"])
        return choice if content["for"] == key and choice in ways else None
    except (ValueError, KeyError, TypeError):
        return None  # It is measured again.

"""Contenders take turns on one machine, so that a drift of its speed meets all of them.

`alternate` measures them by a function. With `take_turns`, each is a process that
stays: it gets its job as JSON in its only argument, answers a line of JSON when it is
warm, and then one for each line of its standard input, which asks for a round. At the
end of its input, it ends. It answers by `answering` and `write`.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = "pip install -e '.[bench]'"


def alternate(
    measure: Callable[[str], T], names: Iterable[str], rounds: int
) -> dict[str, list[T]]:
    """Measures contenders in turn, every second round from the last to the first.

    Args:
        measure: Measures one, by its name.
        names: Who they are.
        rounds: How many turns each has.

    Returns:
        What was measured of each, in the order of the rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        for name in [*results][:: -1 if number % 2 else 1]:
            results[name].append(measure(name))
    return results


def ratio(times: Sequence[float], others: Sequence[float]) -> float | None:
    """Returns the median over rounds of times over others', of the same rounds.

    It is None if the others have not run as many.
    """
    if len(times) != len(others):
        return None
    pairs = zip(times, others, strict=True)
    return statistics.median(own / other for own, other in pairs)


class Failed(Exception):
    """Says in a line why a contender cannot go on."""


class Runner:
    """A contender's process, from its start to its end."""

    def __init__(
        self,
        package: str,
        job: Any,
        verbose: bool,
        environ: Mapping[str, str] = os.environ,
        limit_s: float | None = None,
        launcher: Sequence[str] = (),
        root: pathlib.Path = ROOT,
    ):
        """Starts it, and waits until it is warm.

        Args:
            package: Is run as a program.
            job: What it is to do, a dataclass.
            verbose: Whether its standard error is shown.
            environ: Its environment.
            limit_s: Most seconds until it is warm. None: any.
            launcher: The command that starts its processes, if it has several.
            root: The checkout whose program and packages it runs.

        Raises:
            Failed: If it does not get there.
        """
        self._patience_s = 20
        self._process = subprocess.Popen(
            [
                *launcher,
                *(sys.executable, "-m", package, json.dumps(dataclasses.asdict(job))),
            ],
            cwd=root,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
        )
        try:
            self.start = self._answer(limit_s)
        except BaseException:
            self.close()
            raise

    def go(self) -> dict:
        """Lets it train for a round, and returns what it measured.

        Raises:
            Failed: If it does not get to the end.
        """
        with contextlib.suppress(BrokenPipeError):  # It has ended, as its answer says.
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=self._patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self, limit_s=None):
        # It writes one line at a time, so none waits in the buffer of the file.
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            self._patience_s = 0
            raise Failed(f"it was not warm after {limit_s} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise Failed(f"it ended with exit code {code}; --verbosity=1 shows why")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer


@dataclasses.dataclass
class Times:
    """What a contender measured.

    Attributes:
        starts: Its answer at each start.
        rounds: Its answer of each round.
    """

    starts: list[dict] = dataclasses.field(default_factory=list)
    rounds: list[dict] = dataclasses.field(default_factory=list)


def take_turns(
    jobs: Sequence[T],
    start: Callable[[T], Runner],
    rounds: int,
    failed: Callable[[T, str], None],
    fresh_starts: int = 1,
    together: Callable[[T], bool] = lambda job: False,
    end_s: float = math.inf,
) -> dict[T, Times]:
    """Times contenders on the same work.

    All wait while one has its turn. Who fails is left out, and the others go on.

    Args:
        jobs: A job for each contender.
        start: Starts one.
        rounds: How many turns each has.
        failed: Is told of each contender that cannot go on, and why.
        fresh_starts: How many times each is started; the last process races.
        together: Tells of a job whether it may start beside others, after those that
            start one after the other.
        end_s: When no further round begins, on the clock of `time.monotonic`.

    Returns:
        What each contender measured that got to the end.
    """
    times = {job: Times() for job in jobs}
    runners: dict[T, Runner] = {}

    def end(job):
        if job in runners:
            runners.pop(job).close()

    def start_anew(job):
        end(job)
        runners[job] = start(job)
        times[job].starts.append(runners[job].start)

    def take_turn(job):
        times[job].rounds.append(runners[job].go())

    def attempt(job, turn):
        try:
            turn()
        except Failed as error:
            del times[job]
            end(job)
            failed(job, str(error))

    try:
        for _ in range(fresh_starts):
            several = [job for job in times if together(job)]
            for job in [job for job in times if job not in several]:
                attempt(job, functools.partial(start_anew, job))
            with futures.ThreadPoolExecutor(len(several) or 1) as pool:
                started = [(job, pool.submit(start_anew, job)) for job in several]
            for job, future in started:
                attempt(job, future.result)
        for number in range(rounds):
            if number and time.monotonic() > end_s:
                break
            for job in [*times]:
                attempt(job, functools.partial(take_turn, job))
    finally:
        for job in [*runners]:
            end(job)
    return times


@contextlib.contextmanager
def answering(jax: bool = False) -> Iterator[TextIO]:
    """Gives the file of a contender's answers, which hears of its errors, too.

    Args:
        jax: Whether the contender needs JAX.
    """
    # What libraries print, in Python or not, must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not jax:
        # Where it is installed, TensorFlow imports it, which takes host memory.
        sys.modules["jax"] = None
    try:
        yield answers
    except Exception as error:
        write(answers, {"error": said(error)})
        raise


def write(answers: TextIO, content: dict) -> None:
    """Writes a line."""
    print(json.dumps(content), file=answers, flush=True)


def said(error: Exception) -> str:
    """Returns an error in one line."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error}; {PACKAGES} brings it"
    line = (str(error).strip().splitlines() or [""])[0][:300]
    return line if isinstance(error, ValueError) else f"{type(error).__name__}: {line}"

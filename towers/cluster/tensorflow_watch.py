"""Tells all hosts, within seconds, that one of them has failed, and why.

TensorFlow's coordination service runs on the first host. It takes a host that is silent
for dead, and ends the collectives of all others. It also keeps the *news* of hosts, in
one numbered list: an error that has taken a host out of what the others are in, the end
of a program, and what hosts in a collective wait for.
"""

import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from towers.hosts import group
from towers.hosts.group import HostFailedError, HostsDifferError
from towers.keras_adapter import cluster
from towers.program.ending import ANOTHER_FAILED

# A host is silent for this time before TensorFlow takes it for dead. Python code of
# a host that keeps the interpreter's lock does not silence it. TensorFlow sends a sign
# of life after half of this time: a machine that pauses for less fails no run.
SILENT_S = 16.0
# A host waits this long for a host that has left their call. After as long in a
# collective, the first host asks all what they wait for, and then ever less often, as
# news are kept for ever. Calls of a usual length are no reason to ask.
_LEFT_S = 5.0
_USUAL = 3.0
# A host ends itself if it has not ended this long after the failure of another.
_END_S = 8.0
_LOOK_S = 1.0
# TensorFlow keeps each read that waits in vain, of about 20 KB on both hosts, until
# there is a value. So news come after this time, if only to say nothing.
_NOTHING_NEW_S = 30.0
# The first host is lost if it answers nothing for as many looks: TensorFlow bounds no
# call of its coordination service in time. A thread counts these, as a host that is
# stopped, or whose Python code keeps the interpreter's lock, must not accuse another.
_SILENT_LOOKS = round(SILENT_S) + 1
_DONE = "its program has ended"
# What a host reports to all others, whose collectives then end with this message.
_REPORT = "|host {rank}| {why}|"
_ENDED = "has ended, or is cut off from the others"
_SILENT = (
    f"has not been heard for {SILENT_S:.0f} s: it has ended, is stopped, or is cut off "
    "from the others"
)


class HostWatch:
    """Follows the news of hosts, in a thread.

    Attributes:
        failure: The failure of a host, as a sentence; `None` as long as all run.
        broken: The error that has ended the collectives, if any.
        doing: The call with collectives in which this host is, its start by
            `time.monotonic`, and its number; `None` between calls.
        describe: Describes this host, in a value of JSON, if another host asks.
        collectives: The kinds of collectives that this host has made, in the order of
            their first: all hosts make the same, but one may trace a function again.
    """

    def __init__(self, rank: int, names: Sequence[str]):
        """Takes this host's rank, and the names of all hosts for messages."""
        self.failure: str | None = None
        self.broken: Exception | None = None
        self.doing: tuple[str, float, int] | None = None
        self.describe: Callable[[], Any] = lambda: None
        self.collectives: dict[str, None] = {}
        self._rank, self._names = rank, names
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Calls of `fit` and others, counted from 1, in which hosts meet.
        self._calls, self._inside, self._entered_s = 0, False, 0.0
        # Calls of functions with collectives, the longest so far, and after how many
        # seconds of the present one to ask.
        self._count, self._longest_s, self._ask_s = 0, 0.0, _LEFT_S
        # The number of the next item of the news, and when the last one came.
        self._number, self._heard_s = 0, time.monotonic()
        # By host, the call that it has left by an error, why, and when.
        self._left: dict[int, tuple[int, str, float]] = {}
        self._done: set[int] = set()
        self._answers: dict[int, Any] = {}
        self._starts = self._finishes = self._closed = False
        self._thread = threading.Thread(
            target=self._follow, name="towers-watch", daemon=True
        )
        self._looks, self._ends = 0, threading.Event()
        self._counter = threading.Thread(
            target=self._count_looks, name="towers-watch-first-host", daemon=True
        )
        self._timer = threading.Timer(_END_S, self._end_itself)
        self._timer.daemon = True

    def start(self) -> None:
        """Begins to follow the news, once TensorFlow has connected the hosts."""
        self._starts = True
        self._thread.start()
        if self._rank > 0:
            self._counter.start()

    def enter(self) -> None:
        """Records that this host begins a call in which hosts meet, such as `fit`."""
        with self._lock:
            self._calls, self._inside = self._calls + 1, True
            self._entered_s = time.monotonic()

    def leave(self, error: BaseException | None) -> None:
        """Records that the call has ended, and tells other hosts of an error."""
        with self._lock:
            self._inside, self.doing = False, None
        if error is not None and self.failure is None:
            self._tell(left=self._calls, why=group.in_a_line(error))

    def begin(self, purpose: str) -> tuple[str, float, int] | None:
        """Records that this host enters a function with collectives.

        Returns:
            The function in which it is already, for `end`.
        """
        outer = self.doing
        self._count += 1
        self.doing = purpose, time.monotonic(), self._count
        self._ask_s = max(_LEFT_S, _USUAL * self._longest_s)
        return outer

    def end(self, outer: tuple[str, float, int] | None = None) -> None:
        """Records that the host has left the function of `begin`."""
        if self.doing is not None:
            took_s = time.monotonic() - self.doing[1]
            self._longest_s = max(self._longest_s, took_s)
        self.doing = outer

    def finish(self, seconds: float) -> bool:
        """Tells that this host's program is at its end, and waits for all others.

        Args:
            seconds: Maximum time to wait.

        Returns:
            Whether the programs of all hosts are at their ends.
        """
        if not self._starts or self.failure is not None:
            return False
        self._finishes = True
        # Python keeps the error that ends a program there.
        error = getattr(sys, "last_value", None)
        self._tell(done=True, why=_DONE if error is None else group.in_a_line(error))
        every = len(self._names)
        with self._changed:
            self._done.add(self._rank)
            self._changed.wait_for(
                lambda: len(self._done) == every or self.failure is not None, seconds
            )
            return len(self._done) == every

    def close(self) -> None:
        """Ends the threads, within a second."""
        self._closed = True
        self._ends.set()
        self._timer.cancel()
        if self._starts:
            self._thread.join()

    def ask(self, seconds: float) -> dict[int, Any]:
        """Asks all hosts what they do.

        Args:
            seconds: Maximum time to wait for answers.

        Returns:
            The answers that have come, by rank.
        """
        with self._lock:
            self._answers = {}
        self._tell(ask=True)
        with self._changed:
            every = len(self._names)
            self._changed.wait_for(lambda: len(self._answers) == every, seconds)
            return {rank: answer["does"] for rank, answer in self._answers.items()}

    def explain(self, error: BaseException) -> str | None:
        """Returns the failure of another host that has caused an error, if any.

        Args:
            error: An error of TensorFlow's, or of any other kind.
        """
        if self.failure is None and isinstance(error, cluster.ERRORS):
            text = str(error)
            if (lost := lost_by(text)) is not None:
                self._note(*lost, service=lost[0] > 0 or "|host" in text)
            elif "ollective" in text:
                with self._changed:
                    self._changed.wait_for(lambda: self.failure, SILENT_S + 3)
        return self.failure

    def _tell(self, **news):
        """Appends an item to the news."""
        if not self._starts:
            return
        text = json.dumps({"host": self._rank, **news})
        try:
            # Another host may take the same number.
            numbers = itertools.count(self._number)
            next(k for k in numbers if cluster.write(f"news/{k}", text))
        except cluster.ERRORS as error:
            self._lose_first_host(error)

    def _follow(self):
        """Reads the news, one item after another, until this host ends."""
        while not self._closed and self.failure is None:
            try:
                text = cluster.read(f"news/{self._number}", _LOOK_S)
                if text is not None:
                    self._number, self._heard_s = self._number + 1, time.monotonic()
                    self._hear(json.loads(text))
                self._look(time.monotonic())
            except cluster.ERRORS as error:
                self._lose_first_host(error)
                return

    def _count_looks(self):
        """Notes that the first host is lost once it has not answered for long."""
        while not self._ends.wait(_LOOK_S) and self.failure is None:
            self._looks += 1
            if self._looks > _SILENT_LOOKS:
                self._note(0, _SILENT, service=False)

    def _hear(self, news):
        rank = news["host"]
        if "left" in news:
            self._left[rank] = news["left"], news["why"], time.monotonic()
        elif "done" in news:
            with self._changed:
                self._done.add(rank)
                # Why it has left the present call says more than that it has ended.
                left = self._left.get(rank)
                if left is None or left[0] != self._calls or news["why"] != _DONE:
                    self._left[rank] = 0, news["why"], time.monotonic()
                self._changed.notify_all()
        elif "ask" in news:
            doing = self.doing  # another thread changes it meanwhile
            self._tell(
                does=self.describe(),
                count=doing and doing[2],
                purpose=doing and doing[0],
                collectives=[*self.collectives],
            )
        elif "does" in news:
            with self._changed:
                self._answers[rank] = news
                self._changed.notify_all()
            self._compare()
        elif "failed" in news:
            self._note(news["failed"], news["why"], tell=False)

    def _look(self, now_s):
        """Looks for hosts that are lost, or for which others wait in vain."""
        if self._rank > 0:
            # This does not return while the first host is stopped; a read does.
            cluster.write(f"looks/{self._rank}", "")
            self._looks = 0
        else:
            # Collectives notice it by themselves; a host that reads a value does not.
            for rank in {*cluster.lost(len(self._names))} - self._done:
                self._note(rank, _SILENT)
            if now_s - self._heard_s > _NOTHING_NEW_S:
                self._tell()
        # Hosts also meet outside of calls, as when a model is made.
        inside, doing = self._inside, self.doing
        begun_s = self._entered_s if inside or doing is None else doing[1]
        for rank, (call, why, left_s) in [*self._left.items()]:
            waits = inside and call == self._calls
            waits = waits or (rank in self._done and (inside or doing is not None))
            if waits and now_s - max(left_s, begun_s) > _LEFT_S:
                self._note(rank, f"has left what the others are in: {why}")
        if self._rank == 0 and doing and now_s - doing[1] > self._ask_s:
            self._ask_s *= 2
            with self._lock:
                self._answers = {}
            self._tell(ask=True)

    def _compare(self):
        """Ends this host if others are in another collective than it is in."""
        own = self._answers.get(self._rank)
        for rank, other in [*self._answers.items()]:
            if own is None or self.broken is not None:
                return
            pair = difference(own, other)
            if pair is not None:
                names = self._names[self._rank], self._names[rank]
                self.broken = HostsDifferError.between(
                    names[0], pair[0], names[1], pair[1]
                )
                # To abort collectives that hosts enter with different arguments may
                # end in a segmentation fault of TensorFlow's.
                _end(str(self.broken), 1)

    def _lose_first_host(self, error):
        """Notes that the coordination service, which runs there, does not answer."""
        if self._rank > 0 and not self._closed and 0 not in self._done:
            rank, why = lost_by(str(error)) or (0, _ENDED)
            self._note(rank, why, service=False)

    def _note(self, rank, why, tell=True, service=True):
        """Notes the first failure, tells the others, and ends all collectives.

        Args:
            rank: The host that has failed.
            why: What it has done, for a sentence.
            tell: Whether others may not know it.
            service: Whether the coordination service is there, and can tell them.
        """
        with self._changed:
            if self.failure is not None or self._closed:
                return
            self.failure = f"{self._names[rank]} {why}"
            self.broken = HostFailedError(f"{self.failure}, so this host ends.")
            self._timer.start()
            self._changed.notify_all()
        if not service:
            return
        if tell:
            self._tell(failed=rank, why=why)
        cluster.report(_REPORT.format(rank=rank, why=why.replace("|", "/")))

    def _end_itself(self):
        if self._inside or self._finishes or self.doing is not None:
            _end(f"{self.failure}; this host ends.", ANOTHER_FAILED)


def lost_by(text: str) -> tuple[int, str] | None:
    """Returns the host that an error of TensorFlow's names as lost, and why.

    Args:
        text: The error's message.
    """
    if (report := re.search(r"\|host (\d+)\| (.*?)\|", text)) is not None:
        return int(report[1]), report[2]
    if (closed := re.search(r"remote target \S+/task:(\d+)", text)) is not None:
        return int(closed[1]), _ENDED
    if (silent := re.search(r"unhealthy.*?/task:(\d+)", text, re.DOTALL)) is not None:
        return int(silent[1]), _SILENT
    if "/tensorflow.CoordinationService/" in text:
        return 0, _SILENT
    return None


def difference(own: dict[str, Any], other: dict[str, Any]) -> tuple[str, str] | None:
    """Returns the collectives in which two hosts differ; `None` if in none.

    Args:
        own: This host's answer: its collectives, and the call in which it is.
        other: Another host's.
    """
    pairs = zip(own["collectives"], other["collectives"], strict=False)
    for here, there in pairs:
        if here != there:
            return here, there
    if own["count"] == other["count"] and own["purpose"] != other["purpose"]:
        return own["purpose"], other["purpose"]
    return None


def _end(text, code):
    print(f"\ntowers: {text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)

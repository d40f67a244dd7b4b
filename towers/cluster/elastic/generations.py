"""The rules: when a generation of hosts ends, and who is in the next one.

A generation runs until something is a reason for another: a process arrives or wants
to leave, or a host is lost. Then all its hosts have to say that they are ready, as they
do between two steps. The next generation has those and all others that are ready.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from towers.cluster.elastic.events import Event, Formed, Lost, Over, Wanted
from towers.cluster.elastic.talk import sentence
from towers.cluster.rendezvous.host import QUIET_S, HostDescription, difference
from towers.program import words

# From when a host has lost others to when it is known which one has ended.
FIND_S = 2.0


class Timer(Protocol):
    """What calls a function later."""

    def cancel(self) -> None:
        """Has it not call it."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """What was asked for.

    Attributes:
        where: The coordinator's address.
        least: How many hosts a generation has at least.
        most: How many it has at most.
        expected: How many the first one waits for.
        join_seconds: How long to wait for hosts.
        fail_seconds: How long a host may take to be ready once there is a reason.
        max_restarts: How many generations may begin because of a failure; `None` for
            any number.
    """

    where: str
    least: int
    most: int
    expected: int
    join_seconds: float
    fail_seconds: float
    max_restarts: int | None


@dataclasses.dataclass(eq=False)
class Arrival:
    """A process that has come.

    Attributes:
        number: How many had come before it.
        slot: What its launcher calls it; the first generation is in this order.
        node: The name of its machine.
        pid: Its process.
        versions: Of what has to be the same on all.
        send: Sends it a message.
        end: Closes its connection once all is sent.
        rank: Its number in the present generation; `None` if it is in none.
        address: Once it is ready, where it listens for the next generation's hosts.
        steps: How many it has done, as it said last.
        leaves: Why it leaves; `None` if it does not.
        expects: Whether it has asked for its place in a generation to come.
    """

    number: int
    slot: int | None
    node: str
    pid: int
    versions: dict[str, str]
    send: Callable[[dict[str, Any]], None]
    end: Callable[[], None]
    rank: int | None = None
    address: str | None = None
    steps: int = 0
    leaves: str | None = None
    expects: bool = False

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        if self.rank is None:
            kind = "new host" if self.leaves is None else "host that leaves"
            return f"a {kind} ({self.node}, pid {self.pid})"
        return self.named(self.rank)

    def named(self, rank: int) -> str:
        """What to call it where it has some number."""
        return f"host {rank} ({self.node}, pid {self.pid})"

    @property
    def does(self) -> str:
        """What it does: "prepares", "is ready", "trains" or "leaves"."""
        if self.leaves is not None:
            return "leaves"
        if self.address is not None:
            return "is ready"
        return "prepares" if self.rank is None else "trains"


class HostGenerations:
    """One after another.

    Attributes:
        generation: The number of the present one; -1 before the first.
        entries: All that have come and not gone, in this order.
        over: Why none begins any more; `None` as long as some may.
    """

    def __init__(
        self,
        rules: Rules,
        after: Callable[[float, Callable[[], None]], Timer],
        tell: Callable[[Event], None],
        say: Callable[[str], None],
    ):
        """Waits for the hosts of the first one.

        Args:
            rules: What was asked for.
            after: Calls a function after some seconds, in the thread of all else.
            tell: Is told what happens.
            say: Says a sentence to the user.
        """
        self._rules, self._after, self._tell, self._say = rules, after, tell, say
        self.generation, self.entries = -1, []
        self.over: str | None = None
        self._most, self._expected = rules.most, rules.expected
        self._restarts = 0
        # The reasons why the present one ends: the first, and the first failure.
        self._why: str | None = None
        self._failure: str | None = None
        self._limits: list[Timer] = []
        self._waits = self._is_late = False
        self._wait_for_hosts(QUIET_S)

    def come(self, entry: Arrival) -> bool:
        """Takes one that comes, or tells it why not; returns whether it did."""
        why = self.over or difference(_hosts([*self.in_order(), entry]))
        if why is not None:
            self._turn_away(entry, why, missing=self.over is not None)
            return False
        self.entries.append(entry)
        entry.send({"welcome": [self._rules.least, self._rules.most]})
        return True

    def ready(self, entry: Arrival, steps: int, address: str) -> None:
        """Is told that one is ready, after so many steps, and where it listens."""
        if self.over is not None:
            return self._turn_away(entry, self.over)
        entry.steps, entry.address = steps, address
        if entry.rank is not None and self._why is None and not self._limits:
            # It has found what the end of a connection here will tell.
            find = functools.partial(self._find, entry)
            self._limits = [self._after(FIND_S, find)]
        self._decide()

    def leave(self, entry: Arrival, why: str) -> None:
        """Is told that one is about to leave."""
        if entry.leaves is None and self.over is None:
            entry.leaves = why
            if entry.rank is not None:
                self._end_present(f"{entry.name} leaves: {why}")
            self._decide()

    def lose(self, entry: Arrival, why: str, done: bool = False) -> None:
        """Is told that one has gone.

        Args:
            entry: Which one; nothing happens if it has gone before.
            why: What has become of it, such as "has ended".
            done: Whether it has said that the run is done.
        """
        if entry not in self.entries:
            return
        self.entries.remove(entry)
        failed = entry.leaves is None and not done and self.over is None
        failed = failed and entry.rank is not None
        self._tell(Lost(entry.name, entry.slot, entry.rank, why, failed))
        if done and entry.rank is not None:
            return self.finish(f"The run is done on {entry.name}.")
        if failed:
            self._end_present(f"{entry.name} {why}", failed=True)
        self._decide()

    def want(self, count: int, without: Collection[int] = ()) -> None:
        """Is told that another number of hosts is wanted; see `Coordinator.want`."""
        if self.over is not None:
            return
        self._most = self._expected = count
        self._tell(Wanted(count))
        there = [each for each in self.in_order() if each.leaves is None]
        go = [each for each in there if each.slot in without]
        stay = [each for each in there if each not in go]
        for entry in [*go, *reversed(stay[count:])]:
            why = f"{words.count(count, 'host is', 'hosts are')} wanted"
            if entry in go:
                why = "its machine is no longer wanted"
            entry.send({"leave": why})
            self.leave(entry, why)
        self._decide()

    def expect(self, count: int) -> None:
        """Is told how many the first one is to wait for."""
        self._expected = count
        self._decide()

    def in_order(self) -> list[Arrival]:
        """All that are there: by rank, then those that are in no generation."""

        def place(each):
            if each.rank is not None:
                return 0, each.rank, 0
            return 1 + (each.slot is None), each.slot or 0, each.number

        return sorted(self.entries, key=place)

    def _decide(self) -> None:
        """Begins a generation if it is time to."""
        if self.over is not None:
            return
        stay = [each for each in self.in_order() if each.leaves is None]
        present = [each for each in stay if each.rank is not None]
        ready = [each for each in stay if each.address is not None]
        are_ready = all(each.address is not None for each in present)
        if self._why is None and self.generation >= 0:
            new = [each for each in ready if each.rank is None]
            if are_ready:
                self._find(ready[0])
            elif new and len(present) < self._most:
                self._end_present(f"{new[0].named(len(present))} arrives")
            return
        if not are_ready:
            return
        chosen = ready[: max(self._most, len(present))]
        is_first = self.generation < 0 and not self._is_late
        if len(chosen) >= (self._expected if is_first else self._rules.least):
            self._form(chosen)
        elif not self._waits:
            self._wait_for_hosts(0)

    def _end_present(self, why: str, failed: bool = False) -> None:
        """Has the present generation end between two steps, or where hosts are lost."""
        is_first = self._why is None
        self._why = self._why or why
        if failed:
            self._failure = self._failure or why
            most = self._rules.max_restarts
            if most is not None and self._restarts >= most:
                begun = words.count(self._restarts, "restart")
                said = f"{why}, after {begun} of {most} (--max_restarts)"
                return self.finish(sentence(said), failed=True)
        for entry in self.entries:
            if entry.rank is not None and entry.address is None:
                if failed:
                    entry.send({"lost": why, "generation": self.generation})
                elif is_first:
                    entry.send({"change": why})
        if (failed or is_first) and not self._waits:
            self._cancel()
            self._limits = [self._after(self._rules.fail_seconds, self._drop)]

    def _find(self, entry: Arrival) -> None:
        """Has the present generation end where nobody has ended, as far as is known."""
        self._end_present(f"{entry.name} has lost others", failed=True)
        self._decide()

    def _drop(self) -> None:
        """Leaves out those that should be ready and are not."""
        late = [each for each in self.in_order() if each.does == "trains"]
        for entry in late:
            why = (
                f"neither went on nor ended within {self._rules.fail_seconds:g} s of "
                f"this: {self._why}"
            )
            self._turn_away(entry, sentence(f"{entry.name} {why}"))
            self.lose(entry, why)

    def _form(self, chosen: list[Arrival]) -> None:
        """Begins a generation."""
        self._cancel()
        most = max(each.steps for each in chosen)
        # Others get what the first one has, so nobody has done more.
        first = next(each for each in chosen if each.steps == most)
        chosen = [first, *(each for each in chosen if each is not first)]
        self._restarts += self._failure is not None
        self.generation += 1
        for entry in self.entries:
            entry.rank = None
        for rank, entry in enumerate(chosen):
            entry.rank = rank
        formed = {
            "generation": self.generation,
            "addresses": [each.address for each in chosen],
            "names": [each.name for each in chosen],
        }
        for entry in chosen:
            entry.address = None
            entry.send({"formed": {**formed, "rank": entry.rank}})
        slots, names = (each.slot for each in chosen), formed["names"]
        failed, why = self._failure is not None, self._why or ""
        self._why = self._failure = None
        self._tell(Formed(self.generation, tuple(names), tuple(slots), why, failed))

    def _wait_for_hosts(self, quiet_s: float) -> None:
        """Waits for more of them, and says so after some seconds."""
        self._cancel()
        self._waits = True
        until = {
            quiet_s: self._say_who_is_here,
            self._rules.join_seconds: self._give_up,
        }
        self._limits = [self._after(*each) for each in until.items()]

    def _say_who_is_here(self) -> None:
        wanted = self._rules.least if self.generation >= 0 else self._expected
        more = wanted - sum(each.does == "is ready" for each in self.entries)
        left = self._rules.join_seconds - (QUIET_S if self.generation < 0 else 0)
        self._say(
            f"{self._who_is_here()}; waiting for {more} more, for {left:.0f} s at most."
        )

    def _who_is_here(self) -> str:
        said = []
        for does, names in (("is ready", "are ready"), ("prepares", "prepare")):
            those = [each for each in self.in_order() if each.does == does]
            if those or not said:
                count = words.count(len(those), f"host {does}", f"hosts {names}")
                listed = words.all_of(each.name for each in those) if those else ""
                said.append(f"{count} ({listed})" if listed else count)
        return f"At {self._rules.where}, {' and '.join(said)}"

    def _give_up(self) -> None:
        """Begins with those that are ready if they may do; else ends all."""
        self._waits, self._is_late = False, True
        ready = [each for each in self.entries if each.does == "is ready"]
        if len(ready) >= self._rules.least:
            return self._decide()
        self.finish(
            f"{self._who_is_here()} after {self._rules.join_seconds:g} s; expected "
            f"{self._rules.least} at least.",
            failed=True,
        )

    def finish(self, why: str, failed: bool = False) -> None:
        """Begins no generation any more, as the run is done or has failed."""
        if self.over is not None:
            return
        self._cancel()
        self.over = why
        for entry in self.entries:
            # The others may do what they do until they need another one.
            if failed or entry.address is not None:
                self._turn_away(entry, why)
        self._tell(Over(why, failed))

    def _turn_away(self, entry: Arrival, why: str, missing: bool = True) -> None:
        entry.send({"failed": why, "missing": missing})
        entry.end()

    def _cancel(self) -> None:
        for limit in self._limits:
            limit.cancel()
        self._limits, self._waits = [], False


def place_of(entry: Arrival, entries: Iterable[Arrival]) -> list[int]:
    """Returns the rank that a new one may expect, and of how many hosts; or nothing.

    It comes behind those that train, and those that have asked before, and from now on
    has asked, too. Nothing is known before any train.
    """
    entry.expects = True
    stay = [each for each in entries if each.leaves is None and each is not entry]
    present = [each for each in stay if each.rank is not None]
    rank = sum(each.rank is not None or each.expects for each in stay)
    return [rank, rank + 1] if present else []


def _hosts(entries: Iterable[Arrival]) -> list[HostDescription]:
    """What has to be the same of all, as of hosts that meet once."""
    return [
        HostDescription(rank, 0, 0, each.node, each.pid, "", each.versions)
        for rank, each in enumerate(entries)
    ]

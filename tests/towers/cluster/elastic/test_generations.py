"""The rules by which one generation of hosts follows another, without any process."""

import pytest

from towers.cluster.elastic.events import Formed, Lost, Over, Wanted
from towers.cluster.elastic.generations import (
    FIND_S,
    Arrival,
    HostGenerations,
    Rules,
    place_of,
)
from towers.cluster.rendezvous.host import QUIET_S

VERSIONS = {"python": "3", "tensorflow": "2.21", "keras": "3.15", "towers": "1"}
JOIN_S, FAIL_S = 600, 30


class Later:
    """A clock that goes on when a test says so."""

    def __init__(self):
        self.waiting = []

    def after(self, seconds, function):
        timer = Timer(self, seconds, function)
        self.waiting.append(timer)
        return timer

    def passes(self, seconds):
        """Calls what was to be called after so many seconds."""
        (timer,) = [each for each in self.waiting if each.seconds == seconds]
        timer.cancel()
        timer.function()


class Timer:
    def __init__(self, later, seconds, function):
        self.later, self.seconds, self.function = later, seconds, function

    def cancel(self):
        if self in self.later.waiting:
            self.later.waiting.remove(self)


class Run:
    """Generations, and what was told.

    Attributes:
        hosts: All that came.
    """

    def __init__(self, least=1, most=3, expected=None, max_restarts=None):
        self.later, self.events, self.said, self.hosts = Later(), [], [], []
        rules = Rules(
            *("a:1", least, most, expected or most, JOIN_S, FAIL_S, max_restarts)
        )
        self.generations = HostGenerations(
            rules, self.later.after, self.events.append, self.said.append
        )

    def come(self, slot=None, ready=0, **options):
        """One comes, and is ready, unless that is `None`; returns it."""
        number = len(self.hosts)
        heard = []
        entry = Arrival(
            *(number, slot, "n", number, options.get("versions", VERSIONS)),
            *(heard.append, lambda: heard.append("end")),
        )
        entry.heard = heard
        self.hosts.append(entry)
        if self.generations.come(entry) and ready is not None:
            self.ready(entry, ready)
        return entry

    def ready(self, *hosts_and_steps):
        *hosts, steps = hosts_and_steps
        for each in hosts:
            self.generations.ready(each, steps, f"a:{100 + each.number}")

    def lose(self, entry, **options):
        self.generations.lose(entry, "has ended", **options)

    def ranks(self):
        """The numbers of those in the present generation, by rank."""
        present = [e for e in self.generations.in_order() if e.rank is not None]
        assert [each.rank for each in present] == [*range(len(present))]
        for each in present:
            if each.address is None:
                formed = [m["formed"] for m in each.heard if "formed" in m][-1]
                assert formed["rank"] == each.rank
                assert formed["generation"] == self.generations.generation
                assert formed["names"] == [one.name for one in present]
                assert formed["addresses"] == [
                    f"a:{100 + one.number}" for one in present
                ]
        return [each.number for each in present]

    def formed(self):
        return [each for each in self.events if isinstance(each, Formed)]


def heard(entry, name):
    return [each[name] for each in entry.heard if name in each]


def test_the_first_generation_begins_once_all_are_ready():
    run = Run(expected=3)
    run.come(), run.come()
    assert not run.formed() and run.generations.generation == -1
    run.come()
    assert run.ranks() == [0, 1, 2]
    names = tuple(f"host {k} (n, pid {k})" for k in range(3))
    assert run.events == [Formed(0, names, (None,) * 3, "", False)]
    # Nobody is waited for any more.
    assert not run.later.waiting


def test_hosts_begin_in_the_order_of_their_slots():
    run = Run(most=4)
    for slot in (2, 0, None, 1):
        run.come(slot)
    assert run.ranks() == [1, 3, 0, 2]
    assert run.formed()[0].slots == (0, 1, 2, None)


def test_which_place_a_new_one_may_expect():
    run = Run(most=4, expected=2)
    first, second = run.come(), run.come(ready=None)
    entries = run.generations.in_order
    # Nobody trains yet.
    assert place_of(second, entries()) == []
    run.ready(second, 0)
    third, fourth = run.come(ready=None), run.come(ready=None)
    assert place_of(fourth, entries()) == [2, 3]
    assert place_of(third, entries()) == [3, 4]
    run.generations.leave(first, "SIGTERM")
    assert place_of(fourth, entries()) == [2, 3]
    run.lose(third)
    assert place_of(fourth, entries()) == [1, 2]


def test_fewer_begin_if_no_more_come():
    run = Run(least=2)
    run.come(), run.come(), run.come(ready=None)
    run.later.passes(QUIET_S)
    assert run.said == [
        "At a:1, 2 hosts are ready (a new host (n, pid 0) and a new host (n, pid 1)) "
        "and 1 host prepares (a new host (n, pid 2)); waiting for 1 more, for 590 s at "
        "most."
    ]
    run.later.passes(JOIN_S)
    assert run.ranks() == [0, 1]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_do_not_begin(count):
    run = Run(least=2)
    hosts = [run.come() for _ in range(count)]
    run.later.passes(JOIN_S)
    listed = "1 host is ready (a new host (n, pid 0))" if count else "0 hosts are ready"
    why = f"At a:1, {listed} after 600 s; expected 2 at least."
    assert run.events == [Over(why, True)]
    for each in [*hosts, run.come()]:
        assert each.heard[-2:] == [{"failed": why, "missing": True}, "end"]


def test_a_host_is_lost_and_the_others_go_on():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.lose(two)
    for each in (one, three):
        assert each.heard[-1] == {
            "lost": "host 1 (n, pid 1) has ended",
            "generation": 0,
        }
    run.ready(one, 7)
    assert len(run.formed()) == 1
    run.ready(three, 7)
    assert run.ranks() == [0, 2]
    lost = Lost("host 1 (n, pid 1)", None, 1, "has ended", True)
    names = "host 0 (n, pid 0)", "host 1 (n, pid 2)"
    formed = Formed(1, names, (None, None), "host 1 (n, pid 1) has ended", True)
    assert run.events[1:] == [lost, formed]
    # It comes back.
    new = run.come(ready=None)
    assert heard(one, "change") == []
    run.ready(new, 0)
    assert heard(one, "change") == ["host 2 (n, pid 3) arrives"]
    run.ready(one, three, 9)
    assert run.ranks() == [0, 2, 3]
    assert run.formed()[-1].why == "host 2 (n, pid 3) arrives"
    assert not run.formed()[-1].failed


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_all_but_one_are_lost(lost):
    run = Run()
    hosts = [run.come() for _ in range(3)]
    last = hosts.pop(lost)
    run.lose(hosts[0])
    run.ready(last, 4)
    assert len(run.formed()) == 1
    run.lose(hosts[1])
    assert run.ranks() == [lost]


def test_all_are_lost_and_others_come():
    run = Run(least=2)
    for each in [run.come() for _ in range(3)]:
        run.lose(each)
    run.later.passes(0)
    assert run.said == [
        "At a:1, 0 hosts are ready; waiting for 2 more, for 600 s at most."
    ]
    run.come(), run.come()
    assert run.ranks() == [3, 4]


def test_the_one_with_most_steps_is_first_where_the_first_one_is_lost():
    run = Run(most=4)
    hosts = [run.come() for _ in range(4)]
    run.lose(hosts[0])
    run.ready(hosts[1], 5), run.ready(hosts[2], 6), run.ready(hosts[3], 6)
    assert run.ranks() == [2, 1, 3]


def test_the_first_one_stays_unless_another_has_done_more_steps():
    run = Run(most=4)
    hosts = [run.come() for _ in range(3)]
    new = run.come()
    run.ready(hosts[2], 5), run.ready(hosts[1], 5), run.ready(hosts[0], 5)
    assert run.ranks() == [0, 1, 2, 3]
    run.lose(new)
    run.ready(hosts[0], 6), run.ready(hosts[1], 6), run.ready(hosts[2], 7)
    assert run.ranks() == [2, 0, 1]


def test_no_more_than_the_most_are_in_it():
    run = Run(most=2)
    one, two = run.come(), run.come()
    spares = run.come(), run.come()
    assert run.ranks() == [0, 1] and heard(one, "change") == []
    run.lose(two)
    run.ready(one, 1)
    # A spare one is there at once.
    assert run.ranks() == [0, 2]
    assert [each.does for each in spares] == ["trains", "is ready"]


def test_one_leaves():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.generations.leave(two, "SIGTERM")
    assert heard(one, "change") == ["host 1 (n, pid 1) leaves: SIGTERM"]
    # It takes part to the last step, and is told, too.
    assert heard(two, "change") == heard(three, "change") == heard(one, "change")
    run.ready(one, three, 3)
    assert run.ranks() == [0, 2]
    assert not run.formed()[-1].failed
    # That it ends then harms nobody.
    run.lose(two)
    name = "a host that leaves (n, pid 1)"
    assert run.events[-1] == Lost(name, None, None, "has ended", False)
    assert heard(one, "lost") == [] and two.does == "leaves"


def test_one_leaves_that_has_not_begun():
    run = Run(most=2)
    run.come()
    run.generations.leave(run.come(ready=None), "SIGTERM")
    run.come()
    assert run.ranks() == [0, 2]


def test_two_changes_at_once():
    """One arrives, one leaves, and one is lost, which makes it a failure."""
    run = Run(max_restarts=1)
    one, two, three = (run.come() for _ in range(3))
    run.generations.leave(two, "SIGTERM")
    four = run.come()
    run.ready(one, 2)
    run.lose(three)
    assert run.ranks() == [0, 3]
    assert [heard(each, "change") for each in (one, four)] == [
        ["host 1 (n, pid 1) leaves: SIGTERM"],
        [],
    ]
    assert run.formed()[-1].why == "host 1 (n, pid 1) leaves: SIGTERM"
    assert run.formed()[-1].failed
    run.lose(four)
    assert isinstance(run.events[-1], Over)


def test_restarts_end():
    run = Run(max_restarts=2)
    one, two, other = (run.come() for _ in range(3))
    for steps in range(2):
        run.lose(other)
        run.ready(one, two, steps)
        # That one arrives does not count.
        other = run.come()
        run.ready(one, two, steps)
    assert [each.failed for each in run.formed()] == [False, True, False, True, False]
    run.lose(other)
    why = "Host 2 (n, pid 4) has ended, after 2 restarts of 2 (--max_restarts)."
    assert run.events[-1] == Over(why, True)
    assert heard(one, "failed") == [why] and one.heard[-1] == "end"


def test_below_the_least_others_are_waited_for():
    run = Run(least=2, most=2)
    one, two = run.come(), run.come()
    run.lose(two)
    run.ready(one, 5)
    run.later.passes(0)
    assert run.said == [
        "At a:1, 1 host is ready (host 0 (n, pid 0)); waiting for 1 more, for 600 s at "
        "most."
    ]
    run.come(ready=None)
    run.later.passes(JOIN_S)
    why = (
        "At a:1, 1 host is ready (host 0 (n, pid 0)) and 1 host prepares (a new host "
        "(n, pid 2)) after 600 s; expected 2 at least."
    )
    assert run.events[-1] == Over(why, True)
    assert heard(one, "failed") == [why]


def test_below_the_least_another_comes_in_time():
    run = Run(least=2, most=2)
    one, two = run.come(), run.come()
    run.lose(two)
    run.ready(one, 5)
    run.come()
    assert run.ranks() == [0, 2] and not run.later.waiting


def test_who_is_not_ready_in_time_is_left_out():
    run = Run(most=4, expected=3)
    one, two, three = (run.come() for _ in range(3))
    run.come()
    run.ready(one, 1)
    # One that leaves may take longer.
    run.generations.leave(three, "SIGTERM")
    run.later.passes(FAIL_S)
    why = "neither went on nor ended within 30 s of this: host 3 (n, pid 3) arrives"
    assert heard(two, "failed") == [f"Host 1 (n, pid 1) {why}."]
    assert "end" in two.heard and "end" not in three.heard
    assert run.events[-2] == Lost("host 1 (n, pid 1)", None, 1, why, True)
    assert run.ranks() == [0, 3]
    # Its connection ends then.
    run.lose(two)
    assert isinstance(run.events[-1], Formed)


def test_who_finds_first_that_another_is_lost_tells_the_others():
    """Its links have broken before the end of the other one was heard of."""
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.ready(one, 3)
    assert heard(two, "lost") == []
    run.ready(two, 3)
    run.lose(three)
    assert run.ranks() == [0, 1]
    assert run.formed()[-1].why == "host 2 (n, pid 2) has ended"
    assert run.formed()[-1].failed and not run.later.waiting


def test_hosts_may_lose_one_another_where_none_has_ended():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.ready(one, 3)
    run.later.passes(FIND_S)
    why = "host 0 (n, pid 0) has lost others"
    assert heard(two, "lost") == heard(three, "lost") == [why]
    run.ready(two, three, 3)
    assert run.ranks() == [0, 1, 2]
    # If all say so, it is so.
    run.ready(three, one, two, 4)
    assert run.ranks() == [0, 1, 2]
    assert [(each.why, each.failed) for each in run.formed()[1:]] == [
        (why, True),
        (why, True),
    ]


def test_other_versions_are_turned_away():
    run = Run(most=2)
    one = run.come()
    other = run.come(versions=VERSIONS | {"keras": "3.9"})
    why = (
        "Hosts have different versions of keras: 3.15 on host 0 (n, pid 0) and 3.9 on "
        "host 1 (n, pid 1); install the same one on all."
    )
    assert other.heard == [{"failed": why, "missing": False}, "end"]
    run.come()
    assert run.ranks() == [0, 2] and heard(one, "failed") == []


def test_fewer_are_wanted_and_more():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    spare = run.come()
    run.generations.want(1)
    assert [heard(each, "leave") for each in run.hosts] == [
        [],
        *[["1 host is wanted"]] * 3,
    ]
    assert Wanted(1) in run.events
    assert heard(one, "change") == ["host 2 (n, pid 2) leaves: 1 host is wanted"]
    run.ready(one, 1)
    assert run.ranks() == [0]
    for each in (two, three, spare):
        # They hear it by a signal, and say so themselves.
        run.generations.leave(each, "SIGTERM")
        run.lose(each)
    # One that comes nevertheless is a spare one.
    new = run.come()
    assert run.ranks() == [0] and new.does == "is ready"
    run.generations.want(2)
    assert heard(one, "change")[-1] == f"host 1 (n, pid {new.number}) arrives"
    run.ready(one, 2)
    assert run.ranks() == [0, new.number]
    assert not any(getattr(each, "failed", False) for each in run.events)


def test_a_run_that_is_done():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.lose(one, done=True)
    why = "The run is done on host 0 (n, pid 0)."
    assert run.events[-1] == Over(why, False)
    # The others end by themselves; who wants to go on cannot.
    assert heard(two, "failed") == heard(two, "change") == heard(two, "lost") == []
    run.lose(three)
    assert not run.events[-1].failed
    run.ready(two, 3)
    assert heard(two, "failed") == [why]
    assert run.come().heard == [{"failed": why, "missing": True}, "end"]
    run.generations.finish("Again."), run.generations.want(1)
    assert run.generations.over == why


def test_one_that_is_ready_is_lost():
    run = Run()
    one, two, three = (run.come() for _ in range(3))
    run.lose(three)
    run.ready(two, 1)
    run.lose(two)
    run.ready(one, 1)
    assert run.ranks() == [0]

"""Coordinators and members, in processes and threads."""

import json
import os
import queue
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from tests.towers.cluster.elastic.counting import STEPS
from towers.cluster import environment
from towers.cluster.elastic import Coordinator, Formed, Lost, Over, talk
from towers.hosts.group import ElasticPlace
from towers.program.ending import ANOTHER_FAILED

ROOT = Path(__file__).parents[4]
FOREVER = 10**9


class Run:
    """A coordinator, and processes that count.

    Attributes:
        processes: By their slots.
    """

    def __init__(self, **options):
        self.events, self.processes = queue.Queue(), {}
        options = {"least": 1, "most": 3, "token": "a secret of all hosts", **options}
        self.coordinator = Coordinator(tell=self.events.put, **options)
        self.coordinator.start()

    def start(self, *slots, goal=FOREVER):
        for slot in slots:
            place = ElasticPlace(
                self.coordinator.address, "a secret of all hosts", slot
            )
            self.processes[slot] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.towers.cluster.elastic.counting"),
                    str(goal),
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    **environment.elastic_variables(place),
                    "PYTHONPATH": str(ROOT),
                },
                stdout=subprocess.PIPE,
                text=True,
            )

    def event(self, kind, **expected):
        """Waits for an event of a kind; returns it."""
        while True:
            event = self.events.get(timeout=HANG_S)
            if isinstance(event, kind):
                found = {name: getattr(event, name) for name in expected}
                assert found == expected, event
                return event

    def hear(self, slot):
        return json.loads(self.processes[slot].stdout.readline())

    def begin(self, *slots, **expected):
        """Waits until a generation of these does its steps; returns where it began."""
        self.event(Formed, slots=slots, **expected)
        told = [self.hear(slot) for slot in slots]
        for rank, each in enumerate(told):
            assert each["place"] == [rank, len(slots)]
            assert each["steps"] == told[0]["steps"]
            assert each["counter"] == told[0]["counter"]
        return told[0]

    def kill(self, slot):
        self.processes[slot].kill()
        self.end(slot)

    def end(self, slot):
        """Waits for a process; returns its exit code and the last line."""
        process = self.processes.pop(slot)
        out, _ = process.communicate(timeout=HANG_S)
        lines = out.splitlines()
        return process.returncode, json.loads(lines[-1]) if lines else None

    def close(self):
        for slot in [*self.processes]:
            self.kill(slot)
        self.coordinator.close()


@pytest.fixture
def run():
    every = []

    def start(**options):
        every.append(Run(**options))
        return every[-1]

    yield start
    for each in every:
        each.close()


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize("victim", range(3))
def test_one_of_three_is_killed_and_another_arrives(run, victim):
    run = run()
    run.start(0, 1, 2)
    run.begin(0, 1, 2, why="", failed=False)
    name = f"host {victim} ({socket.gethostname()}, pid {run.processes[victim].pid})"
    run.kill(victim)
    why = "has ended"
    run.event(Lost, name=name, slot=victim, rank=victim, why=why, failed=True)
    rest = sorted({0, 1, 2} - {victim})
    before = run.begin(*rest, failed=True)
    assert before["steps"] >= STEPS
    run.start(3)
    after = run.begin(*rest, 3, failed=False)
    # Each of the two has added 1 in each step between.
    steps = after["steps"] - before["steps"]
    assert steps >= STEPS and after["counter"] - before["counter"] == 2 * steps


@pytest.mark.parametrize("last", [0, 2])
def test_all_but_one_are_killed(run, last):
    run = run()
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    for victim in {0, 1, 2} - {last}:
        run.kill(victim)
    while run.event(Formed, failed=True).slots != (last,):
        pass
    while run.hear(last)["place"] != [0, 1]:
        pass


def test_all_are_killed(run):
    run = run(least=2)
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    for victim in range(3):
        run.kill(victim)
    run.start(3, 4)
    # Two may have gone on before.
    while {*run.event(Formed, failed=True).slots} != {3, 4}:
        pass


def test_one_leaves(run):
    run = run()
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    run.processes[0].send_signal(signal.SIGTERM)
    begun = run.event(Formed, slots=(1, 2), failed=False)
    assert begun.why.startswith("host 0 (") and begun.why.endswith("leaves: SIGTERM")
    code, said = run.end(0)
    assert (code, said["error"]) == (143, "This host leaves: SIGTERM.")
    run.event(Lost, slot=0, failed=False)


def test_others_are_wanted(run):
    run = run()
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    run.coordinator.want(1)
    run.begin(0, failed=False)
    assert [run.end(slot)[0] for slot in (1, 2)] == [143, 143]
    run.coordinator.want(2)
    run.start(3)
    run.begin(0, 3, failed=False)


@pytest.mark.slow
def test_too_few_remain(run):
    run = run(least=2, most=2, join_seconds=8)
    run.start(0, 1)
    run.begin(0, 1)
    run.kill(1)
    over = run.event(Over, failed=True)
    assert over.why.endswith(") after 8 s; expected 2 at least.")
    code, said = run.end(0)
    assert (code, said["error"]) == (ANOTHER_FAILED, over.why)


def test_restarts_end(run):
    run = run(max_restarts=0)
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    run.kill(2)
    over = run.event(Over, failed=True)
    assert over.why.endswith(") has ended, after 0 restarts of 0 (--max_restarts).")
    for slot in (0, 1):
        code, said = run.end(slot)
        assert (code, said["error"]) == (ANOTHER_FAILED, over.why)


def test_a_run_that_is_done(run):
    run = run()
    run.start(0, 1, 2, goal=500)
    told = [run.end(slot) for slot in range(3)]
    assert [code for code, _ in told] == [0, 0, 0]
    assert [said["counter"] for _, said in told] == [1500] * 3
    run.event(Over, failed=False)
    assert {run.event(Lost, failed=False).slot for _ in range(2)} <= {0, 1, 2}


@pytest.mark.slow
def test_one_that_stands_still_is_lost(run, monkeypatch):
    monkeypatch.setattr(talk, "SILENT_S", 3.0)
    run = run()
    run.start(0, 1, 2)
    run.begin(0, 1, 2)
    run.processes[1].send_signal(signal.SIGSTOP)
    run.event(Lost, slot=1, why="has not been heard for 3 s", failed=True)
    run.begin(0, 2)
    run.processes[1].send_signal(signal.SIGCONT)
    code, said = run.end(1)
    assert code == ANOTHER_FAILED and said["error"].startswith(
        "The coordinator at 127."
    )


@pytest.mark.slow
def test_nothing_grows_with_the_changes(run):
    run = run(most=2)
    run.start(0, 1)
    opened = []
    for change in range(8):
        slots = [each for each in run.processes]
        opened.append(run.begin(*slots)["open"])
        run.kill(slots[1])
        run.begin(slots[0])
        run.start(change + 2)
    # A change that is under way may hold a file more for a moment.
    before, after = (
        [min(each) for each in zip(*half, strict=True)]
        for half in (opened[:4], opened[4:])
    )
    assert after == before, opened

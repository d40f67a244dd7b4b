"""Starts generations of hosts, until one ends well or no restart is left.

Supervisors of several machines know nothing of one another. Hosts carry the number of
their generation: one that is behind is turned away, one that is ahead ends the meeting
of the others, with code 75, "not my fault". So all count alike.
"""

import dataclasses
import queue
import signal
from collections.abc import Mapping

from towers.cluster import addresses, environment
from towers.hosts.group import ProcessPlace
from towers.launch.arguments import LaunchOptions
from towers.launch.generation import USAGE, Events, Outcome, StartedHosts
from towers.launch.host import Host
from towers.launch.machine import SIGNALS, Machine, say
from towers.processes import signals
from towers.program.ending import STOPPED

_LOCAL = "127.0.0.1"
_LONGEST_PAUSE_S = 60


def run(options: LaunchOptions, environ: Mapping[str, str]) -> int:
    """Starts the hosts, and returns the exit code once all have ended.

    Raises:
        ValueError: They cannot be started as is asked for.
    """
    machine = Machine(options, environ)
    strays, launcher = machine.strays, Supervisor(options, machine)
    strays.watch(options.fail_seconds)
    signals.listen(SIGNALS, lambda n: launcher.events.put(SIGNALS[n]))
    try:
        return launcher.run()
    finally:
        strays.end(0)


class Supervisor:
    """What stays from one generation of hosts to the next.

    Attributes:
        events: Where signals are put.
    """

    def __init__(self, options: LaunchOptions, machine: Machine):
        """Takes over what is asked for, and what the hosts share."""
        self.events: Events = queue.SimpleQueue()
        self._options, self._machine = options, machine

    def run(self) -> int:
        """Runs generations, and returns the exit code of the last one."""
        options, strays = self._options, self._machine.strays
        self._machine.say_where(options.most)
        for generation in range(options.max_restarts + 1):
            hosts = self._start(generation)
            outcome = StartedHosts(
                hosts, self.events, strays, options.fail_seconds
            ).run()
            if outcome.said and outcome.stopped is None:
                say(outcome.said)
            if generation == options.max_restarts or not may_go_on(outcome):
                break
            if number := pause(self.events, generation + 1, options.max_restarts):
                return 128 + number
        return outcome.code

    def _start(self, generation: int) -> list[Host]:
        options = self._options
        coordinator, count = options.coordinator, 1
        if options.host_rank is None:
            count = options.most
            with addresses.held_port(_LOCAL) as free:
                coordinator = addresses.joined(_LOCAL, free.getsockname()[1])
        first = ProcessPlace(
            *(options.host_rank or 0, options.most, coordinator, self._machine.token),
            *(options.join_seconds, options.interface),
            generation=generation,
        )
        hosts: list[Host] = []
        try:
            for rank in range(first.rank, first.rank + count):
                place = environment.variables(dataclasses.replace(first, rank=rank))
                hosts.append(self._machine.start(rank, place, self.events.put))
        except ValueError:
            self._machine.strays.signal(signal.SIGKILL)
            raise
        return hosts


def may_go_on(outcome: Outcome) -> bool:
    """Tells whether a restart may help."""
    wrong = outcome.code not in (0, USAGE, *STOPPED)
    return wrong and outcome.stopped is None


def pause(events: Events, restart: int, most: int) -> int | None:
    """Waits before a restart; returns the signal that forbids it, if one comes."""
    seconds = min(_LONGEST_PAUSE_S, 2 ** (restart - 1))
    say(f"All hosts start again in {seconds} s (restart {restart} of {most}).")
    try:
        while (number := events.get(timeout=seconds)) == signal.SIGUSR1:
            pass
        return number
    except queue.Empty:
        return None

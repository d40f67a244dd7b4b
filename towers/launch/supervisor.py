"""Starts generations of hosts, until one ends well or no restart is left."""

import contextlib
import dataclasses
import os
import queue
import secrets
import signal
import sys
import tempfile
from collections.abc import Mapping

from towers.cluster import addresses, environment
from towers.cluster.membership import Place
from towers.launch import gpus, signals
from towers.launch.arguments import Options
from towers.launch.generation import STOPPED, Events, Generation, Outcome
from towers.launch.host import Host
from towers.launch.strays import Strays
from towers.program import words

_LOCAL = "127.0.0.1"
_LONGEST_PAUSE_S = 60
# A host that fails first so many times running is left out, if it may be.
_TIMES = 3
_USAGE = 2
# What hosts get for each signal: they have nothing to do with a terminal that goes.
SIGNALS = {
    **{each: each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
    signal.SIGHUP: signal.SIGTERM,
}


def run(options: Options, environ: Mapping[str, str]) -> int:
    """Starts the hosts, and returns the exit code once all have ended.

    Raises:
        ValueError: They cannot be started as is asked for.
    """
    supervisor = Supervisor(options, environ)
    supervisor.strays.watch(options.fail_seconds)
    signals.listen(SIGNALS, lambda n: supervisor.events.put(SIGNALS[n]))
    try:
        return supervisor.run()
    finally:
        supervisor.strays.end(0)


class Supervisor:
    """What stays from one generation to the next.

    Attributes:
        events: Where signals are put.
        strays: All that the hosts start.
    """

    def __init__(self, options: Options, environ: Mapping[str, str]):
        """Divides this machine among the hosts.

        Args:
            options: What is asked for.
            environ: The environment that the hosts get, but for their places.

        Raises:
            ValueError: There are too few GPUs, or there is no token or no folder.
        """
        self.events: Events = queue.SimpleQueue()
        self.strays = Strays()
        self._options = options
        self._environ = {**environ, **self.strays.mark}
        self._token = secrets.token_hex(16)
        self._gpus: list[list[str]] = [[]]
        self._log_dir = ""
        # What a host is called changes when another one is left out; its GPUs do not.
        self._slots = [*range(options.most)]
        if options.host_rank is not None:
            self._slots = [0]
            if options.most > 1:
                self._token = _token(environ)
            return
        # On one machine, all is on its loopback interface.
        self._environ.pop("TOWERS_INTERFACE", None)
        self._gpus = gpus.divide(options.most, options.num_gpus, environ)
        if options.most > 1:
            self._log_dir = _made(options.log_dir)

    def run(self) -> int:
        """Runs generations, and returns the exit code of the last one."""
        self._say_where()
        firsts: list[int | None] = []
        for generation in range(self._options.max_restarts + 1):
            hosts = self._start(generation)
            outcome = Generation(
                hosts, self.events, self.strays, self._options.fail_seconds
            ).run()
            if outcome.said and outcome.stopped is None:
                say(outcome.said)
            last = generation == self._options.max_restarts
            if last or not may_go_on(outcome):
                break
            slot = None if outcome.rank is None else self._slot(outcome.rank)
            firsts.append(slot)
            if firsts[-_TIMES:] == [slot] * _TIMES:
                self._leave_out(slot)
            if number := pause(self.events, generation + 1, self._options.max_restarts):
                return 128 + number
        return outcome.code

    def _slot(self, rank: int) -> int:
        return self._slots[rank if self._options.host_rank is None else 0]

    def _leave_out(self, slot: int | None) -> None:
        if slot is None or len(self._slots) <= self._options.least:
            return
        rank = self._slots.index(slot)
        self._slots.remove(slot)
        later = "" if rank == len(self._slots) else "; those after it count one less"
        say(
            f"Host {rank} was the first to fail {_TIMES} times running, and is left "
            f"out: {words.count(len(self._slots), 'host')} go on{later}."
        )

    def _start(self, generation: int) -> list[Host]:
        options = self._options
        coordinator, count = options.coordinator, options.most
        if options.host_rank is None:
            count = len(self._slots)
            with addresses.held_port(_LOCAL) as free:
                coordinator = addresses.joined(_LOCAL, free.getsockname()[1])
        first = Place(
            *(options.host_rank or 0, count, coordinator, self._token),
            *(options.join_seconds, options.interface),
            generation=generation,
        )
        hosts: list[Host] = []
        try:
            for k, slot in enumerate(self._slots):
                place = dataclasses.replace(first, rank=first.rank + k)
                hosts.append(self._host(place, self._gpus[slot]))
        except ValueError:
            self.strays.signal(signal.SIGKILL)
            raise
        return hosts

    def _host(self, place: Place, visible: list[str]) -> Host:
        environ = self._environ | environment.variables(place)
        if visible:
            environ[gpus.VISIBLE] = ",".join(visible)
            environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        # The output of the only host here is the launcher's, as the first one's is.
        log = None
        if self._options.host_rank is None and place.rank:
            log = self._log(place.rank)
        return Host(place.rank, self._options.command, environ, log, self.events.put)

    def _log(self, rank: int) -> str:
        return os.path.join(self._log_dir, f"host{rank}.log")

    def _say_where(self) -> None:
        options = self._options
        if options.host_rank is not None:
            said = f"Starting host {options.host_rank} of {options.most}"
        else:
            said = f"Starting {words.count(options.most, 'host')} on this machine"
            if any(self._gpus):
                parts = ", ".join("+".join(each) for each in self._gpus)
                said += f", with the GPUs {parts}"
        if self._log_dir:
            last = options.most - 1
            logs = self._log(1) + (f" to host{last}.log" if last > 1 else "")
            said += f"; the output of hosts other than the first is in {logs}"
        say(f"{said}.")


def may_go_on(outcome: Outcome) -> bool:
    """Tells whether a restart may help."""
    wrong = outcome.code not in (0, _USAGE, *STOPPED)
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


def _token(environ: Mapping[str, str]) -> str:
    if token := environ.get("TOWERS_TOKEN"):
        return token
    raise ValueError(
        "Received no TOWERS_TOKEN; expected the same secret in the environment on all "
        "machines, such as openssl rand -hex 16 prints."
    )


def _made(folder: str | None) -> str:
    if folder is None:
        return tempfile.mkdtemp(prefix="towers-launch-")
    folder = os.path.abspath(os.path.expanduser(folder))
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"Cannot write logs to {folder} ({error.strerror}); choose another "
            "--log_dir."
        ) from error
    return folder


def say(line: str) -> None:
    """Tells the user something."""
    with contextlib.suppress(OSError):  # its reader may have gone
        print(f"towers.launch: {line}", file=sys.stderr, flush=True)

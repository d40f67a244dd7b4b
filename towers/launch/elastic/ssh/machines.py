"""Machines of a list as places for hosts that come and go."""

import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from towers.cluster import addresses
from towers.launch.arguments import LaunchOptions
from towers.launch.elastic.slot import ProcessSlot
from towers.launch.host import Host
from towers.launch.machine import made_log_dir, say
from towers.program import words

# What hosts on other machines get of the launcher's environment.
_PASSED_ON = "TOWERS_", "TF_", "XLA_", "NCCL_", "KERAS_"
# What ssh ends with where it reaches nobody, or has lost the other machine.
_SSH_FAILED = 255
_SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10"
# For a host elsewhere to be killed before its ssh is.
_KILLED_S = 5.0
# Any that is not used here: for the address by which this machine reaches another one.
_ANY_PORT = 9


class SshHost(Host):
    """A host on another machine, as the ssh that has started it.

    Attributes:
        machine: Where it is.
    """

    def __init__(self, machine: str, rank: int, ssh: Sequence[str], asked: str, **how):
        """Starts it.

        Args:
            machine: See above.
            rank: Its number among the hosts.
            ssh: The command that reaches the machine, and starts the program of this
                package there.
            asked: The line that this reads first.
            how: As of `Host`.
        """
        self.machine = machine
        self._lock = threading.Lock()
        read, self._input = os.pipe()
        with open(read) as stdin:
            super().__init__(rank, ssh, os.environ, stdin=stdin, **how)
        self._write(asked)

    @property
    def is_lost(self) -> bool:
        """Whether its machine was lost, or could not be reached."""
        return self.code == _SSH_FAILED

    @property
    def how(self) -> str:
        """How it has ended, in words."""
        if self.is_lost:
            return f"ssh has lost {self.machine}, or does not reach it"
        return f"{super().how} on {self.machine}"

    def signal(self, number: int) -> None:
        """Sends it a signal."""
        if self.code is None:
            self._write(str(int(number)))
        if number == signal.SIGKILL:
            # Where the network is cut, ssh would not end; the host there does, then.
            end = threading.Timer(_KILLED_S, self._process.kill)
            end.daemon = True
            end.start()

    def _write(self, line):
        with self._lock, contextlib.suppress(OSError):  # its end will be told
            if self._input is not None:
                os.write(self._input, f"{line}\n".encode())

    def _wait(self, ended):
        self._process.wait()
        with self._lock:
            os.close(self._input)
            self._input = None
        ended(self)


class Machines:
    """The machines of a list, as `Machine` is this one.

    Attributes:
        token: What all hosts know and strangers do not.
        listens_at: Where the coordinator listens.
        places_later: Whether a host may have to wait for a place.
    """

    places_later = False

    def __init__(self, options: LaunchOptions, wanted: Sequence[str]):
        """Takes over what is asked for.

        Args:
            options: That.
            wanted: The machines that are to have a host, one for each.

        Raises:
            ValueError: None is known here, there is no ssh, or no log can be written.
        """
        self.token = secrets.token_hex(16)
        self._options, self._wanted = options, tuple(wanted)
        self._ssh = _command()
        self._of_slots: dict[int, str] = {}
        here = _address_for(options, wanted)
        self.listens_at = addresses.joined(here, 0)
        self._log_dir = made_log_dir(options.log_dir)

    def want(self, machines: Sequence[str], slots: Sequence[ProcessSlot]) -> set[int]:
        """Is told which machines are to have a host from now on.

        Returns:
            The numbers of those of the slots whose hosts are on others.
        """
        self._wanted = tuple(machines)
        there = [each.number for each in slots if each.is_there]
        left = [*machines]
        gone = set()
        for number in there:
            machine = self._of_slots.get(number)
            if machine in left:
                left.remove(machine)
            else:
                gone.add(number)
        stay = {*there} - gone
        self._of_slots = {k: v for k, v in self._of_slots.items() if k in stay}
        return gone

    def start(
        self,
        number: int,
        place: Mapping[str, str],
        ended: Callable[[Host], None],
        placed: Callable[[Host], None] | None = None,
    ) -> Host:
        """Starts a host on a machine that has none yet; see `Machine.start`."""
        machine = self._machine_for(number)
        passed = {k: v for k, v in os.environ.items() if k.startswith(_PASSED_ON)}
        passed.pop("TOWERS_INTERFACE", None)  # this machine's
        asked = {
            "number": number,
            "command": self._options.command,
            "folder": os.getcwd(),
            "environ": {**passed, **place},
        }
        log = os.path.join(self._log_dir, f"host{number}.log") if number else None
        program = [sys.executable, "-m", "towers.launch.elastic.ssh"]
        ssh = [*self._ssh, machine, shlex.join(program)]
        line = json.dumps(asked)
        return SshHost(machine, number, ssh, line, log=log, ended=ended)

    def say_where(self, count: int) -> None:
        """Says how many hosts start, where, and where they write."""
        hosts, machines = words.count(count, "host"), ", ".join(self._wanted)
        say(
            f"Starting {hosts} by ssh on {machines}; the output of hosts other than "
            f"the first is in {self._log_dir}."
        )

    def _machine_for(self, number):
        """The machine of a slot: that of its last host, or one without a host."""
        if number not in self._of_slots:
            free = [*self._wanted]
            for taken in self._of_slots.values():
                if taken in free:
                    free.remove(taken)
            self._of_slots[number] = free[0]
        return self._of_slots[number]


def _command():
    """The command that reaches other machines."""
    text = os.environ.get("TOWERS_SSH", _SSH)
    try:
        command = shlex.split(text)
    except ValueError:
        command = []
    if not command or shutil.which(command[0]) is None:
        raise ValueError(
            f"Received machines in --host_file, which {text!r} is to reach; expected a "
            "command that is installed, so install ssh or give another by TOWERS_SSH."
        )
    return command


def _address_for(options, machines):
    """The address at which the machines reach this one."""
    if options.interface is not None:
        return addresses.of_interface(options.interface)
    names = [each.rpartition("@")[2] for each in machines]
    found = [*filter(None, map(_route_to, names))]
    if not found:
        raise ValueError(
            f"Received {names[0]} in --host_file, which is not known here; expected "
            "the name or IP address of a machine, or --interface as well."
        )
    # Others do not reach what this machine calls itself.
    others = [each for each in found if not addresses.is_only_local(each)]
    return (others or found)[0]


def _route_to(name):
    """The address by which this machine reaches another one; `None` if unknown."""
    try:
        where = addresses.resolved(name)
        family = socket.AF_INET6 if ":" in where else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect((where, _ANY_PORT))  # which sends nothing
            return way.getsockname()[0]
    except OSError:
        return None

"""Gives the hosts that start on this machine an environment, GPUs and a log."""

import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping

from towers.cluster import environment
from towers.launch import gpus
from towers.launch.arguments import LaunchOptions
from towers.launch.host import Host
from towers.processes.strays import Strays
from towers.program import words

# What hosts get for each signal: they have nothing to do with a terminal that goes.
SIGNALS = {
    **{each: each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
    signal.SIGHUP: signal.SIGTERM,
}


class Machine:
    """This machine, divided among the hosts that are started on it.

    Attributes:
        strays: All that the hosts start.
        token: What all hosts know and strangers do not.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]):
        """Divides it.

        Args:
            options: What is asked for.
            environ: The environment that the hosts get, but for their places.

        Raises:
            ValueError: There are too few GPUs, or there is no token or no folder.
        """
        self.strays = Strays()
        self.token = secrets.token_hex(16)
        self._options = options
        self._environ = {**environ, **self.strays.mark}
        # The only host here has what the launcher has.
        self._gpus: list[list[str]] = []
        self._log_dir = ""
        if options.host_rank is not None:
            if options.most > 1:
                self.token = _token(environ)
            return
        # On one machine, all is on its loopback interface.
        self._environ.pop("TOWERS_INTERFACE", None)
        self._gpus = gpus.divide(options.most, options.num_gpus, environ)
        if options.most > 1:
            self._log_dir = made_log_dir(options.log_dir)

    def start(
        self,
        number: int,
        place: Mapping[str, str],
        ended: Callable[[Host], None],
    ) -> Host:
        """Starts a host.

        Args:
            number: Which of those that share this machine.
            place: The environment that says its place.
            ended: Is called in another thread once it has ended.

        Raises:
            ValueError: It cannot be started.
        """
        environ, log = {**self._environ, **place}, None
        if self._gpus and self._gpus[number]:
            environ[gpus.VISIBLE] = ",".join(self._gpus[number])
            environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        # The output of the only host here is the launcher's, as the first one's is.
        if self._options.host_rank is None and number:
            log = self._log(number)
        return Host(number, self._options.command, environ, log, ended)

    def say_where(self, count: int) -> None:
        """Says how many hosts start, and where they write."""
        options = self._options
        if options.host_rank is not None:
            said = f"Starting host {options.host_rank} of {options.most}"
        else:
            said = f"Starting {words.count(count, 'host')} on this machine"
            if any(self._gpus):
                parts = ", ".join("+".join(each) for each in self._gpus)
                said += f", with the GPUs {parts}"
        if self._log_dir:
            last = options.most - 1
            logs = self._log(1) + (f" to host{last}.log" if last > 1 else "")
            said += f"; the output of hosts other than the first is in {logs}"
        say(f"{said}.")

    def _log(self, number: int) -> str:
        return os.path.join(self._log_dir, f"host{number}.log")


def _token(environ: Mapping[str, str]) -> str:
    if token := environment.token(environ):
        return token
    raise ValueError(
        "Received no TOWERS_TOKEN; expected the same secret in the environment on all "
        "machines, such as openssl rand -hex 16 prints."
    )


def made_log_dir(folder: str | None) -> str:
    """Makes the folder for what hosts write, a temporary one by default.

    Raises:
        ValueError: It cannot be made, or nobody can write there.
    """
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

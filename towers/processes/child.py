"""Starts a process in a session of its own, and keeps its output."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil

from towers.program import voice, words

# A line longer than this is shown in parts.
_LINE = 2**16


class Child:
    """A process that has been started.

    Attributes:
        log: The file of its output; `None` if that is this program's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        ended: Callable[[Any], None],
        log: str | None = None,
        show: Callable[[bytes], None] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: IO | None = None,
    ):
        """Starts it.

        Args:
            command: What it runs.
            environ: Its environment.
            ended: Is called with this object, in another thread, once it has ended.
            log: See above; what is there stays.
            show: With a log, is called in another thread with each line of its errors.
            pass_fds: File descriptors that it inherits.
            stdin: Its input; by default this program's, or none where it has a log.

        Raises:
            OSError: It cannot be started.
        """
        self.log = log
        self._killed_before = _killed_for_memory()
        # A session: a terminal's Ctrl-C comes from this program, and so once.
        options = {"env": environ, "start_new_session": True, "pass_fds": pass_fds}
        self._shows = None
        if log is None:
            self._process = subprocess.Popen(command, stdin=stdin, **options)
        else:
            # Whatever happens, the file has what was written.
            options["env"] = {"PYTHONUNBUFFERED": "1", **environ}
            with open(log, "ab") as file:
                self._process = subprocess.Popen(
                    command,
                    stdin=stdin or subprocess.DEVNULL,
                    stdout=file,
                    stderr=file if show is None else subprocess.PIPE,
                    **options,
                )
            if show is not None:
                self._shows = _thread(self._show, show)
        _thread(self._wait, ended)

    @property
    def pid(self) -> int:
        """The number of its process."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; `None` while it runs."""
        return self._process.returncode

    @property
    def exit_code(self) -> int | None:
        """Its exit code as a shell has it: 128 and more for a signal."""
        return self.code if self.code is None or self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        """How it has ended, in words."""
        if self.code >= 0:
            return f"exit code {self.code}"
        name = words.signal_name(-self.code)
        if self.code == -signal.SIGKILL and _killed_for_memory() > self._killed_before:
            return f"{name}, by the kernel for want of memory"
        return name

    @property
    def is_stopped(self) -> bool:
        """Tells whether it stands still since a signal such as SIGSTOP."""
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False  # it has just ended

    def signal(self, number: int) -> None:
        """Sends a signal to the process, and to its group if it asks for the end.

        SIGUSR1 asks the process itself to save. It is sent only if the process handles
        it, because it would end one that has only just started.
        """
        if self.code is not None:
            return
        try:
            if number == signal.SIGUSR1:
                if _handles(self.pid, number):
                    self._process.send_signal(number)
                else:
                    name = words.signal_name(number)
                    voice.say(
                        f"{name} is not passed on to process {self.pid}, which does "
                        "not handle it, or not yet."
                    )
            else:
                os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    def all_is_shown(self, seconds: float) -> None:
        """Waits for the last lines of a process that has ended."""
        if self._shows is not None:
            self._shows.join(seconds)

    def _wait(self, ended):
        self._process.wait()
        ended(self)

    def _show(self, show):
        """Shows each line of its errors, and adds it to the file."""
        with open(self.log, "ab", buffering=0) as file, self._process.stderr as lines:
            while line := lines.readline(_LINE):
                try:
                    file.write(line)
                except OSError:
                    pass  # the disk is full
                show(line)


def _handles(pid: int, number: int) -> bool:
    """Tells whether a process handles or ignores a signal, as far as is known."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)$", status, re.M)
    return not masks or any(int(mask, 16) >> number - 1 & 1 for mask in masks)


def _killed_for_memory() -> int:
    """How many processes the kernel has killed for want of memory; 0 if unknown."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.M)
    except OSError:
        found = None
    return int(found[1]) if found else 0


def _thread(target: Callable, *args) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True)
    thread.start()
    return thread

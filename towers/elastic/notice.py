"""Looks for a notice that this machine is about to be taken away.

A file or a command gives it. Only Python's own library is needed, so that flags can be
checked before Keras is imported.
"""

import os
import signal
import subprocess
from typing import Protocol

COMMAND = "command:"
"""What a command begins with; all else is the path of a file."""

# Towers asked these clouds itself.
_CLOUDS = "aws", "azure", "gcp"
_LIMIT_S = 10.0
_MOST_BYTES, _MOST_LETTERS = 2**10, 200
# A shell's exit codes for a command that it cannot run.
_CANNOT_RUN = 126, 127


class NoticeError(Exception):
    """Nobody can tell whether there is a notice."""


class NoticeSource(Protocol):
    """Where a notice comes from.

    Attributes:
        every_s: How many seconds to wait between two looks.
    """

    every_s: float

    def look(self) -> str | None:
        """Returns a notice in a few words, if there is one.

        Raises:
            NoticeError: It cannot be told.
        """


def check(where: str, name: str = "where") -> None:
    """Checks that notices may come from there.

    Args:
        where: The path of a file, or "command:" and a line for the shell.
        name: What to call it.

    Raises:
        ValueError: They cannot.
    """
    expected = f"the path of a file, or {COMMAND} and a line for the shell"
    if where.startswith(COMMAND):
        line = where.removeprefix(COMMAND)
        if not line.strip() or not line.isprintable():
            raise ValueError(f"Received {name}={where}; expected {expected}.")
        return
    if where in _CLOUDS or "://" in where:
        raise ValueError(
            f"Received {name}={where}; expected {expected}, such as '{COMMAND}curl -sf "
            "URL'; docs/train/resuming.md has one for each cloud."
        )
    path = os.path.abspath(os.path.expanduser(where))
    if not where or os.path.isdir(path):
        raise ValueError(f"Received {name}={where}; expected {expected}.")
    if not os.path.isdir(os.path.dirname(path)):
        raise ValueError(
            f"Received {name}={where}, but there is no folder {os.path.dirname(path)}; "
            "expected the path of a file in a folder that exists."
        )


def source(where: str) -> NoticeSource:
    """Returns where notices come from; see `check`."""
    if where.startswith(COMMAND):
        return _Command(where.removeprefix(COMMAND))
    return _File(os.path.abspath(os.path.expanduser(where)))


class _File:
    """A file that somebody writes; nothing is known of it before."""

    every_s = 1.0

    def __init__(self, path: str):
        self._path = path

    def look(self) -> str | None:
        """Looks whether it exists."""
        if not os.path.exists(self._path):
            return None
        text = b""
        try:
            if os.path.isfile(self._path):  # a pipe could keep us waiting
                with open(self._path, "rb") as file:
                    text = file.read(_MOST_BYTES)
        except OSError:
            pass  # it is there, and that is the notice
        return _with_first_line(f"the file {self._path} exists", text)


class _Command:
    """A shell command that exits with code 0 once the machine is to go."""

    every_s = 5.0

    def __init__(self, line: str):
        self._line = line

    def look(self) -> str | None:
        """Runs it."""
        process = subprocess.Popen(
            self._line,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            # What the shell has started may hold the pipes.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise NoticeError(
                f"{self._line} has not ended after {_LIMIT_S:g} s"
            ) from error
        if process.returncode in _CANNOT_RUN:
            raise NoticeError(_with_first_line(f"{self._line} cannot be run", err))
        if process.returncode:
            return None
        return _with_first_line(f"{self._line} succeeds", out)


def _with_first_line(what: str, text: bytes) -> str:
    """Adds the first line of what somebody has written, if they have."""
    line = text[:_MOST_BYTES].decode(errors="replace").strip().partition("\n")[0]
    words = "".join(filter(str.isprintable, " ".join(line.split())))[:_MOST_LETTERS]
    return f'{what} and says "{words}"' if words else what

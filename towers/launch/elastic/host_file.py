"""The file in which somebody says how many hosts are wanted, or on which machines."""

import errno
import os
import re
import time

from towers.launch.arguments import LaunchOptions, check_here
from towers.launch.machine import say

# Names and addresses, with a user where ssh needs one.
_MACHINE = re.compile(r"(?:\w[\w.-]*@)?(?!\d+$)(?:\w|::)[\w.:-]*(?:%[\w.-]+)?")
_MOST_BYTES = 2**20
_EXPECTED = {
    "number": "the number of hosts",
    "list": "machines, one on each line",
    "": "the number of hosts, or machines, one on each line",
}
# Between two looks at it.
_PAUSE_S = 1.0


class HostFile:
    """The file: a number, or a machine on each line.

    Attributes:
        wanted: What was read last, as `read` returns it.
        next_s: When to look at it again, by `time.monotonic`.
    """

    def __init__(self, path: str, least: int, most: int):
        """Takes the path, and which numbers may be there."""
        self._path, self._least, self._most = path, least, most
        self._seen: tuple[int, ...] = ()
        self._kind, self.wanted = "", 0
        self.next_s = 0.0

    @classmethod
    def of(cls, options: LaunchOptions) -> "HostFile | None":
        """Reads the file that is asked for; `None` if none is.

        Raises:
            ValueError: As `read`.
        """
        if options.host_file is None:
            return None
        file = cls(options.host_file, options.least, options.most)
        file.read()
        return file

    def read(self) -> int | list[str]:
        """Returns the number, or the names or addresses of the machines.

        Raises:
            ValueError: The file is not there, or has something else.
        """
        self.next_s = time.monotonic() + _PAUSE_S
        try:
            self._seen = self._look()
            if not os.path.isfile(self._path):
                # To open a pipe, such as <(...) of a shell, would wait for its writer.
                raise OSError(errno.EINVAL, "not a regular file")
            with open(self._path) as file:
                text = file.read(_MOST_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no text"
            raise ValueError(
                f"Cannot read --host_file={self._path} ({why}); expected a file with "
                "the number of hosts."
            ) from error
        number = re.fullmatch(r"[0-9]{1,6}", text)
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        machines = [line for line in lines if line]
        if not number and not all(map(_MACHINE.fullmatch, machines)):
            machines = []
        count = int(text) if number else len(machines)
        kind = "number" if number else "list"
        if not self._least <= count <= self._most or self._kind not in ("", kind):
            expected = _EXPECTED[self._kind]
            raise ValueError(
                f"Received {text[:200]!r} in {self._path}; expected {expected}, from "
                f"{self._least} to {self._most}."
            )
        names = [each.rpartition("@")[2] for each in machines]
        if repeated := [each for each in names if names.count(each) > 1]:
            raise ValueError(
                f"Received {repeated[0]} twice in {self._path}; expected each machine "
                "once, as its host has all of its GPUs."
            )
        if number:
            check_here(count, self._path)
        self._kind, self.wanted = kind, count if number else machines
        return self.wanted

    @property
    def count(self) -> int:
        """How many hosts were wanted last."""
        return len(self.wanted) if isinstance(self.wanted, list) else self.wanted

    def changed(self) -> int | list[str] | None:
        """Returns what `read` does if the file has changed, once in a second at most.

        What is wrong with it is said; then nothing changes.
        """
        if time.monotonic() < self.next_s:
            return None
        self.next_s = time.monotonic() + _PAUSE_S
        try:
            found = self._look()
            # Of one that is empty, somebody is just writing the text.
            return self.read() if found != self._seen and found[1] else None
        except OSError:
            return None  # somebody may be about to replace it
        except ValueError as error:
            say(str(error))
            return None

    def _look(self):
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino

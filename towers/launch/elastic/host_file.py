"""The file in which somebody says how many hosts are wanted."""

import os
import re
import time

from towers.launch.machine import say

# Between two looks at it.
_PAUSE_S = 1.0


class HostFile:
    """The file: a number.

    Attributes:
        next_s: When to look at it again, by `time.monotonic`.
    """

    def __init__(self, path: str, least: int, most: int):
        """Takes the path, and which numbers may be there."""
        self._path, self._least, self._most = path, least, most
        self._seen: tuple[int, ...] = ()
        self.next_s = 0.0

    def read(self) -> int:
        """Returns the number.

        Raises:
            ValueError: The file is not there, or has something else.
        """
        self.next_s = time.monotonic() + _PAUSE_S
        try:
            self._seen = self._look()
            with open(self._path) as file:
                text = file.read(100).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "no text"
            raise ValueError(
                f"Cannot read --host_file={self._path} ({why}); expected a file with "
                "the number of hosts."
            ) from error
        known = re.fullmatch(r"[0-9]{1,6}", text)
        if not known or not self._least <= int(text) <= self._most:
            raise ValueError(
                f"Received {text!r} in {self._path}; expected the number of hosts, "
                f"from {self._least} to {self._most}."
            )
        return int(text)

    def changed(self) -> int | None:
        """Returns the number if the file has changed, once in a second at most.

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

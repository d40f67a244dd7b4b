"""One host of a run: a process, and where its output goes."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence

from towers.processes.child import Child


class Host(Child):
    """A process that has been started.

    Attributes:
        rank: Its number among the hosts.
    """

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: str | None,
        ended: Callable[["Host"], None],
        pass_fds: Sequence[int] = (),
    ):
        """Starts it.

        Args:
            rank: See above.
            command: What it runs.
            environ: Its environment.
            log: The file of its output, as of `Child`. Errors are shown, too.
            ended: Is called in another thread once it has ended.
            pass_fds: File descriptors that it inherits.

        Raises:
            ValueError: It cannot be started.
        """
        self.rank = rank
        try:
            super().__init__(command, environ, ended, log, self._show_error, pass_fds)
        except OSError as error:
            raise ValueError(
                f"Cannot start {command[0]} ({error.strerror}); expected after -- flags"
                " of towers train, a Python file, -m and a module, or a command."
            ) from error

    def _show_error(self, line: bytes) -> None:
        if not line.endswith(b"\n"):
            line += b"\n"
        said = f"[host {self.rank}] ".encode() + line
        with contextlib.suppress(OSError):  # its reader may have gone
            sys.stderr.write(said.decode(errors="replace"))
            sys.stderr.flush()

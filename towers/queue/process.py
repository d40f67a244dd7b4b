"""The process of a run, and what it tells while it trains.

It is `towers train`, which knows of no queue: TensorFlow cannot give back a GPU's
memory, and a run that fails may take its process with it. Devices and threads come by
its environment, so a run alone in the same environment has the same bits.
"""

import contextlib
import json
import os
import sys
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence

from towers.processes.child import Child
from towers.train.settings import REPORTS

_SAID = "towers.train: "
# Of a log, where the reason of a failure stands.
_TAIL = 2**16
_LONGEST = 300


class Process(Child):
    """A run that has been started.

    Args:
        flags: Those of towers.train.
        log: The file of its output, behind what is there.
        environ: Its environment.
        told: Is called in another thread with each report; see `Reports`.
        ended: Is called in another thread once it has ended.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(
        self,
        flags: Sequence[str],
        log: str,
        environ: Mapping[str, str],
        told: Callable[["Process", dict], None],
        ended: Callable[["Process"], None],
    ):
        os.makedirs(os.path.dirname(log), exist_ok=True)
        self._begin = os.path.getsize(log) if os.path.exists(log) else 0
        receive, send = os.pipe()
        # A run does not wait for a queue that stands still, as by Ctrl-Z.
        os.set_blocking(send, False)
        try:
            super().__init__(
                [sys.executable, "-m", "towers.train", *flags],
                {**environ, REPORTS: str(send)},
                ended,
                log,
                pass_fds=[send],
            )
        except OSError:
            os.close(receive)
            raise
        finally:
            os.close(send)
        threading.Thread(target=self._read, args=(receive, told), daemon=True).start()

    @property
    def reason(self) -> str:
        """Why it has failed, in a line: its last words."""
        if self.code < 0:
            return self.how
        try:
            with open(self.log, "rb") as file:
                file.seek(max(self._begin, os.path.getsize(self.log) - _TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"{self.how}, and its log cannot be read ({error.strerror})"
        lines = [line.rstrip() for line in lines if line.strip()]
        said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
        # Else what ends a traceback.
        last = (said or lines or [self.how])[-1]
        return textwrap.shorten(last, _LONGEST, placeholder="...")

    def _read(self, receive, told):
        with open(receive, errors="replace") as lines:
            for line in lines:
                # The run never waits for a reader, so a report may come in part.
                with contextlib.suppress(ValueError, RecursionError):
                    report = json.loads(line)
                    if isinstance(report, dict):
                        told(self, report)

"""Notes what is shown as it takes long, in tests where nothing does."""

import pytest

from towers.program import progress
from towers.program.progress import Progress


class Seen:
    """What has begun, with what was done of how much when it ended."""

    def __init__(self, patch: pytest.MonkeyPatch):
        """Listens until the test ends."""
        self._all = []
        enter = Progress.__enter__

        def listen(shown):
            self._all.append(shown)
            return enter(shown)

        patch.setattr(Progress, "__enter__", listen)

    def of(self, beginning: str) -> list[tuple[int, int | None]]:
        """Returns how much was done, and was to do, of what begins so."""
        return [
            (each.done, each.total)
            for each in self._all
            if each.what.startswith(beginning)
        ]

    @property
    def running(self) -> list[str]:
        """What has not ended."""
        return [each.what for each in progress._active]

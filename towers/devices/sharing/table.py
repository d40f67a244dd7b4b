"""Keeps a file with the runs of a machine, in order of arrival.

A run locks the file to read or write it. Each write replaces the whole file. In
/dev/shm it is lost with the machine's memory, as are the runs.
"""

import contextlib
import dataclasses
import os
import typing
from collections.abc import Iterator

from towers.devices.sharing.division import SharingRun
from towers.devices.sharing.errors import RegistryError
from towers.devices.sharing.machine import SharedMachine, file_name
from towers.program import locks, small_file, whole_file
from towers.program.voice import warn

# Other runs hold the lock only while they write the file.
_LOCK_S = 10.0
_TYPES = {
    field.name: typing.get_origin(field.type) or field.type
    for field in dataclasses.fields(SharingRun)
}


class Table:
    """The runs listed in the file of a folder.

    Attributes:
        path: The file.
    """

    def __init__(self, folder: str, machine: SharedMachine):
        """Takes the folder, which need not exist, and the machine of the processes."""
        self.path = os.path.join(folder, file_name())
        self._machine = machine

    @contextlib.contextmanager
    def locked(self) -> Iterator[list[SharingRun]]:
        """A context in which no other run reads or writes the file.

        Yields:
            The list of runs that still live. Changes to it are written on leaving the
            context, unless by an error.

        Raises:
            RegistryError: The file cannot be read or written.
        """
        try:
            with self._lock():
                before = self._read()
                runs = [
                    run
                    for run in before or ()
                    if self._machine.runs(run.pid, run.started)
                ]
                yield runs
                if runs != before:
                    self._write(runs)
        except OSError as error:
            raise RegistryError(
                f"Received {self.path} as the file in which runs meet, which cannot be "
                f"used ({error}); expected one that can be read and written."
            ) from error

    @contextlib.contextmanager
    def _lock(self):
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        with locks.waited_for(f"{self.path}.lock", _LOCK_S):
            yield

    def _read(self) -> list[SharingRun] | None:
        """Reads the file; returns `None` if it is damaged."""
        try:
            content = small_file.read_json(self.path, dict)
            return [_run(entry) for entry in content["runs"]]
        except FileNotFoundError:
            return []
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            warn(
                f"{self.path} cannot be understood ({error}), so it is begun anew; the "
                "runs that stood there enter it again when they look next."
            )
            return None

    def _write(self, runs):
        content = {"runs": [dataclasses.asdict(run) for run in runs]}
        whole_file.write_json(self.path, content)


def _run(entry: dict) -> SharingRun:
    """Makes a run from an entry of the file.

    Raises:
        ValueError: A value has a wrong type.
        TypeError: A value is missing or unknown.
    """
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry.items()
    }
    for name, value in values.items():
        items = value if isinstance(value, tuple) else ()
        of_type = isinstance(value, _TYPES.get(name, object))
        if not of_type or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} is {value!r}")
    run = SharingRun(**values)
    if run.pid < 1:
        raise ValueError(f"pid is {run.pid}")
    return run

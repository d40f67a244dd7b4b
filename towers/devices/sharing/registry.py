"""A run's view of the places that the runs of a machine share."""

import dataclasses
import secrets
from collections.abc import Callable, Collection, Sequence

from towers.devices.sharing import division, machine
from towers.devices.sharing.division import SharingRun
from towers.devices.sharing.errors import RegistryError
from towers.devices.sharing.machine import SharedMachine
from towers.devices.sharing.table import Table
from towers.devices.wish import check_unique, is_int

Filled = Callable[[Sequence[str], Collection[int]], Collection[str]]

# How often a waiting run looks, and after how many seconds it says so.
_POLL_S, _PATIENCE_S = 0.5, 5.0


def nobody(places: Sequence[str], pids: Collection[int]) -> Collection[str]:
    """Reports no place as filled; see `Others.filled`."""
    return ()


class Registry:
    """Shares places with the other runs of this machine and user.

    A run joins, looks now and then which places it should hold, grows or shrinks, and
    reports its places. A place that a look has named is the run's alone, until the run
    reports that it holds others, or a later look does not name it. A run that dies
    leaves its places to the others.
    """

    def __init__(
        self,
        places: Sequence[str],
        minimum: int,
        limit: int,
        folder: str | None = None,
        filled: Filled = nobody,
        name: str = "",
        here: SharedMachine | None = None,
    ):
        """Takes the request of a run; other runs do not see it yet.

        Args:
            places: The places that it can use, all or some of the shared ones, the best
                first. Parts of a GPU are named "GPU/0 of 2" and so on.
            minimum: The number of places that it is sure of once it has joined.
            limit: The number of places that it takes at most, if others leave them.
            folder: The folder in which runs meet; by default one of this machine and
                user, see `machine.usual_folder`.
            filled: Finds places filled by processes that are no runs, such as
                `Others().filled`. The run leaves such a place if its minimum allows it.
            name: The name of this run in messages, such as its model_dir.
            here: Replaces this machine's processes and clock.

        Raises:
            ValueError: An argument is not possible, or the folder is not this user's.
        """
        _check(places, minimum, limit)
        self._places, self._minimum, self._limit = tuple(places), minimum, limit
        self._name, self._filled = name, filled
        self._machine = here or SharedMachine()
        self._table = Table(folder or machine.usual_folder(), self._machine)
        self._run: SharingRun | None = None
        # The places that it really uses, in the order in which it got them.
        self._held: tuple[str, ...] = ()
        self._reported: frozenset[str] | None = None
        self._pids: frozenset[int] = frozenset()

    def join(self, seconds: float, say: Callable[[str], None]) -> tuple[str, ...]:
        """Waits until this run has at least its minimum of places.

        It gets none before. Meanwhile the looks of other runs tell them what to give
        up.

        Args:
            seconds: The longest time to wait.
            say: Receives a line that names the runs it waits for, after some seconds.

        Returns:
            The places that it holds now, in its order.

        Raises:
            RegistryError: There are too few places for all minimums, others have not
                given up theirs in time, or another run divides a GPU into different
                parts.
        """
        self._enter()
        try:
            return self._wait(seconds, say)
        except BaseException:
            self.leave()
            raise

    def look(self) -> tuple[str, ...]:
        """Computes which places this run should hold now.

        These are at least its minimum, its own or free, and reserved from now on.

        Returns:
            The places, in its order.

        Raises:
            RegistryError: It has not joined, or the file cannot be used.
        """
        self._check_joined("look")
        self._examine()
        with self._table.locked() as runs:
            index, taken = self._find(runs)
            aim = [p for p in division.divide(runs)[index] if p not in taken]
            # A new place may still be another run's; until then the run keeps its own.
            for place in (*runs[index].held, *self._held):
                if len(aim) < self._minimum and place not in aim:
                    aim.append(place)
            self._keep(runs, index, [p for p in (*self._held, *aim) if p not in taken])
        return self._ordered(aim)

    def hold(self, places: Sequence[str]) -> None:
        """Reports the places that this run uses now; other runs may take the rest.

        Args:
            places: The places that the last look named, or fewer, or free ones.

        Raises:
            RegistryError: It has not joined, a place belongs to another run or was not
                listed by this run, or the file cannot be used.
        """
        self._check_joined("hold")
        if strange := [place for place in places if place not in self._places]:
            raise RegistryError(
                f"Received {strange[0]!r} to hold; expected one of this run's places: "
                f"{', '.join(self._places)}."
            )
        with self._table.locked() as runs:
            index, taken = self._find(runs)
            for place in places:
                if place in taken and place not in self._held:
                    raise RegistryError(
                        f"Received {place!r} to hold, which {taken[place]} holds; "
                        "expected free places and this run's, as look() names them."
                    )
            known = [place for place in self._held if place in places]
            held = tuple(dict.fromkeys((*known, *places)))
            self._keep(runs, index, [place for place in held if place not in taken])
        self._held = held

    def leave(self) -> None:
        """Leaves all places to other runs; does nothing if this run has not joined.

        Raises:
            RegistryError: The file cannot be used.
        """
        if self._run is None:
            return
        with self._table.locked() as runs:
            runs[:] = [run for run in runs if run.token != self._run.token]
        self._run, self._held, self._reported = None, (), None

    def _enter(self):
        if self._run is not None:
            raise RegistryError(
                "Received join() a second time; expected leave() first."
            )
        pid, started = self._machine.process()
        run = SharingRun(
            token=secrets.token_hex(8),
            pid=pid,
            started=started,
            name=self._name,
            minimum=self._minimum,
            limit=self._limit,
            places=self._places,
            waits=True,
        )
        with self._table.locked() as runs:
            _check_parts(run, runs)
            if not division.fits([*runs, run]):
                raise RegistryError(_does_not_fit(run, runs))
            runs.append(run)
            self._run = run
            self._pids = frozenset(member.pid for member in runs)

    def _wait(self, seconds, say):
        begun = self._machine.now()
        reported = None
        while True:
            self._examine()
            held, holders = self._try()
            if held:
                return held
            waited = self._machine.now() - begun
            if waited >= seconds:
                raise RegistryError(
                    f"Received no {_places(self._minimum)} within {seconds:g} s, as "
                    f"{holders}; expected them to be given up, so end one of these "
                    "runs, or wait longer."
                )
            if waited >= _PATIENCE_S and reported != holders:
                say(f"Waiting for {_places(self._minimum)}: {holders}.")
                reported = holders
            self._machine.sleep(min(_POLL_S, seconds - waited))

    def _try(self):
        """Takes the places that this run should hold, if they are free and enough.

        Returns:
            The places, and in words the runs that still hold others' places.
        """
        with self._table.locked() as runs:
            index, taken = self._find(runs)
            aims = division.divide(runs)
            free = [place for place in aims[index] if place not in taken]
            if len(free) < self._minimum:
                return (), _holders(runs, aims)
            self._keep(runs, index, free)
            self._held = tuple(free)
        return self._ordered(free), ""

    def _find(self, runs: list[SharingRun]) -> tuple[int, dict[str, SharingRun]]:
        """Finds this run among all runs, and the holder of each place of other runs.

        If the file was lost, the run enters again, with the places still free.
        """
        own = self._run
        taken = {p: run for run in runs if run.token != own.token for p in run.held}
        tokens = [run.token for run in runs]
        if own.token not in tokens:
            held = tuple(place for place in self._held if place not in taken)
            runs.append(dataclasses.replace(own, held=held))
            tokens.append(own.token)
        index = tokens.index(own.token)
        runs[index] = dataclasses.replace(
            runs[index], filled=own.filled, waits=own.waits
        )
        self._pids = frozenset(run.pid for run in runs)
        return index, taken

    def _keep(self, runs, index, held):
        """Writes the places that no other run may take."""
        held = tuple(dict.fromkeys(held))
        self._run = dataclasses.replace(runs[index], held=held, waits=False)
        runs[index] = self._run

    def _examine(self):
        """Asks which places are filled; only two equal answers in a row count."""
        now = frozenset(self._filled(self._places, self._pids))
        before = now if self._reported is None else self._reported
        filled = tuple(
            place
            for place in self._places
            if (place in now and place in before)
            or ((place in now or place in before) and place in self._run.filled)
        )
        self._reported = now
        self._run = dataclasses.replace(self._run, filled=filled)

    def _ordered(self, places):
        return tuple(place for place in self._places if place in places)

    def _check_joined(self, asked):
        if self._run is None or self._run.waits:
            raise RegistryError(f"Received {asked}() before join(); expected join().")


def _check(places, minimum, limit):
    if isinstance(places, str) or not places:
        raise RegistryError(
            f"Received {places!r} as places; expected a list of at least one."
        )
    check_unique("places", places, places)
    if not is_int(minimum) or not 1 <= minimum <= len(places):
        raise RegistryError(
            f"Received a minimum of {minimum!r} places; expected a whole number from 1 "
            f"to {len(places)}, as many as there are."
        )
    if not is_int(limit) or limit < minimum:
        raise RegistryError(
            f"Received a limit of {limit!r} places; expected a whole number of at "
            f"least {minimum}, the minimum."
        )


def _places(count):
    return f"{count} place{'s' * (count != 1)}"


def _check_parts(run, others):
    """Raises an error if a run divides a GPU into other parts than other runs."""
    parts = _parts(run)
    for other in others:
        for gpu, theirs in _parts(other).items():
            if parts.get(gpu, theirs) != theirs:
                raise RegistryError(
                    f"Received --gpu_split={parts[gpu]} for {gpu}, which {other.name} "
                    f"has with --gpu_split={theirs}; expected the same in all runs."
                )


def _parts(run):
    """Returns the number of parts of each GPU, from places such as GPU-a/0 of 2."""
    partitions = (place.partition("/") for place in run.places)
    return {gpu: part.partition(" of ")[2] for gpu, _, part in partitions if part}


def _does_not_fit(run, runs):
    minimums = ", ".join(f"{member.minimum} for {member}" for member in runs)
    every = {place for member in (run, *runs) for place in member.places}
    rest = f", with {minimums} before" if runs else ""
    return (
        f"Received a minimum of {_places(run.minimum)} for this run{rest}; expected "
        f"all together to fit into {_places(len(every))}, so ask for less, or wait "
        "until a run has ended."
    )


def _holders(runs: Sequence[SharingRun], aims: Sequence[tuple[str, ...]]) -> str:
    """Names the runs that hold more than they should, and by how much."""
    above = [
        f"{run} has still to give up {len({*run.held} - {*aim})} of "
        f"{_places(len(run.held))}"
        for run, aim in zip(runs, aims, strict=True)
        if {*run.held} - {*aim}
    ]
    return " and ".join(above) or "others wait for the same ones"

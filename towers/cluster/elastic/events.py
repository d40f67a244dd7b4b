"""What the coordinator tells a launcher of the hosts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Formed:
    """A generation has begun.

    Attributes:
        generation: Its number, from 0.
        names: What its hosts are called in sentences, by their ranks.
        slots: What their launchers call them, as `Member` was told.
        why: What has ended the generation before; empty for the first.
        failed: Whether that was a failure.
    """

    generation: int
    names: tuple[str, ...]
    slots: tuple[int | None, ...]
    why: str
    failed: bool


@dataclasses.dataclass(frozen=True)
class Lost:
    """A process has gone, or is left out.

    Attributes:
        name: What it was called.
        slot: What its launcher calls it.
        rank: Its number in the present generation; `None` if it was in none.
        why: What became of it, such as "has ended".
        failed: Whether the others have to go on without it before they wanted to.
    """

    name: str
    slot: int | None
    rank: int | None
    why: str
    failed: bool


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Another number of hosts is wanted; those that are too many were told to leave.

    Attributes:
        count: How many.
    """

    count: int


@dataclasses.dataclass(frozen=True)
class Over:
    """No other generation begins.

    Attributes:
        why: A sentence.
        failed: Whether something went wrong.
    """

    why: str
    failed: bool


Event = Formed | Lost | Wanted | Over

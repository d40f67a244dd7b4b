"""A wish for other towers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


def _nothing(*_: Any) -> None:
    pass


class Wish(NamedTuple):
    """Other towers for a run.

    Attributes:
        why: Who or what wants it, in a few words.
        gpus: The devices, as `TowerModel.resize` takes them.
        split_ratios: As of `TowerModel.resize`.
        applied: Is called once the towers are these, before their first step.
        done: Is told, in a sentence, what has become of the wish.
        refused: Is told, in a sentence, why it cannot be.
    """

    why: str
    gpus: Sequence[str]
    split_ratios: Sequence[int] | None = None
    applied: Callable[[], None] = _nothing
    done: Callable[[str], None] = _nothing
    refused: Callable[[str], None] = _nothing


class WishSource(Protocol):
    """Where wishes for other towers come from."""

    def look(self) -> Wish | None:
        """Returns a wish, if there is one."""

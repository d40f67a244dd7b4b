"""A wish for other towers."""

from collections.abc import Sequence
from typing import NamedTuple


class Wish(NamedTuple):
    """Other towers for a run.

    Attributes:
        why: Who or what wants it, in a few words.
        gpus: The devices, as `TowerModel.resize` takes them.
        split_ratios: As of `TowerModel.resize`.
    """

    why: str
    gpus: Sequence[str]
    split_ratios: Sequence[int] | None = None

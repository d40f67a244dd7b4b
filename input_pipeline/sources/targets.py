"""What a model is to give for an example."""

import dataclasses
from typing import Literal

TargetKind = Literal["class", "numbers", "labels", "mask", "tags", "tokens"]


@dataclasses.dataclass(frozen=True)
class Target:
    """What a model is to give for an example of a source.

    Attributes:
        kind: ``class``: one of several classes, int64 []. ``numbers``: float32 [size].
            ``labels``: which of several labels hold, float32 [size] of 0 and 1.
            ``mask``: a class for each pixel, int64 [H, W]. ``tags``: a class for each
            token, int64 [T]. ``tokens``: the next token at each position, int64 [T].
        size: number of classes, numbers, labels or tokens in the vocabulary.
        names: one for each of them, or None.
    """

    kind: TargetKind
    size: int
    names: tuple[str, ...] | None = None

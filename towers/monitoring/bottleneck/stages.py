"""Finds the slowest stage of the towers, and the layer to move."""

from collections.abc import Sequence

from towers.layers.pipeline import Pipeline, weighted
from towers.monitoring.bottleneck.verdict import Advice, SpeedFinding

# A stage is slower if it works longer than another by this fraction of the time.
_MORE = 0.1


def finding(busy: Sequence[float], pipeline: Pipeline) -> SpeedFinding | None:
    """Names the stage that the others wait for; `None` if they are about equal.

    Args:
        busy: The fraction of the time in which each stage is at work.
        pipeline: The stages.
    """
    if len(busy) < 2:
        return None
    slowest = max(range(len(busy)), key=busy.__getitem__)
    others = [k for k in (slowest - 1, slowest + 1) if 0 <= k < len(busy)]
    idlest = min(others, key=busy.__getitem__)
    if busy[slowest] - busy[idlest] < _MORE:
        return None
    text = (
        f"stage {slowest} is the slowest: it is at work {busy[slowest]:.0%} of the "
        f"time, stage {idlest} {busy[idlest]:.0%}"
    )
    layers = pipeline.layers
    own = [x.name for x in weighted(pipeline.model) if layers.get(id(x)) == slowest]
    if len(own) < 2:
        return SpeedFinding(text)
    layer = own[0] if idlest < slowest else own[-1]
    tip = f"try to move {layer} to stage {idlest} (placement)"
    return SpeedFinding(text, Advice(f"stage {slowest}", tip))

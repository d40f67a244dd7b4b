"""Says in a sentence what a run is bound by, and what to do."""

from collections.abc import Mapping, Sequence

from towers.monitoring.bottleneck.advice import advise
from towers.monitoring.bottleneck.tfdata_stats import Stage, pace_ms, slowest

# A part binds the step if it is shorter than the longest by at most these shares of the
# step. The second share is for parts that did so before: lines that follow one another
# then say the same.
_CLOSE = 0.1
_STILL_CLOSE = 0.2

# From this share of waiting on, a way to less of it is worth a word.
_WORTHWHILE = 0.1

# Of the time of a step: a stage that takes so much has nothing to spare for a hiccup.
_AS_SLOW = 0.9

# To hand over a batch that is ready takes less.
_HANDED_MS = 1.0

# With so many batches ahead, it is not their number.
_ENOUGH = 8

# The parts of a step, in the order in which they are named.
_TOOK = {
    "input": "towers waited {} of the time",
    "compute": "computing took {}",
    "copy": "copying to towers took {}",
    "reduce": "reducing and applying took {}",
    "python": "Python took {}",
    "hosts": "waiting for other hosts took {}",
    "network": "adding over hosts took {}",
}
_TRY = {
    "copy": "a larger batch of smaller examples, or more steps in a call, in which the "
    "next batch is copied meanwhile",
    "reduce": "another --variable_update, XLA, or a larger batch",
    "python": "a larger batch, or more steps in a call (--steps_per_loop, "
    "steps_per_execution)",
    "network": "a larger batch, or a faster network between hosts",
}

_KINDS = {"python": "Python", "hosts": "other-hosts"}


def bound_by(
    parts_ms: Mapping[str, float], before: Sequence[str] = ()
) -> tuple[str, ...]:
    """Finds what takes the largest part of a step.

    Args:
        parts_ms: Milliseconds of a step by part, which add up to more than 0: "input",
            "compute", "copy", "reduce" and "python"; with several hosts "hosts" and
            "network", too.
        before: What steps were bound by in the interval before.

    Returns:
        The largest part, and others that are about as large; "input" first.
    """
    step_ms, largest_ms = sum(parts_ms.values()), max(parts_ms.values())
    return tuple(
        name
        for name in _TOOK
        if name in parts_ms
        and (largest_ms - parts_ms[name]) / step_ms
        <= (_STILL_CLOSE if name in before else _CLOSE)
    )


def verdict(
    parts_ms: Mapping[str, float],
    bound: Sequence[str],
    stages: Sequence[Stage],
    advice: Mapping[str, str] | None = None,
    copies_wait: bool = False,
) -> str:
    """Says in a sentence what a run is bound by, and what to do.

    Args:
        parts_ms: As for `bound_by`.
        bound: What that found.
        stages: Of the input, the last one first; none if nothing is known.
        advice: What to do about a stage, by its label, if the pipeline has words of its
            own; see `advice.advise`.
        copies_wait: Whether what is timed as copying may be waiting for a thread, so
            that nothing is advised about it.
    """
    step_ms = sum(parts_ms.values())
    waiting = parts_ms["input"] / step_ms
    named = [name for name in _TOOK if name in bound or name == "input"]
    said = [_TOOK[name].format(_share(parts_ms[name] / step_ms)) for name in named]
    known = _TRY.keys() - ({"copy"} if copies_wait else ())
    tips = [f"try {_TRY[name]}" for name in bound if name in known]
    if "input" in bound or waiting >= _WORTHWHILE:
        wait_ms = parts_ms["input"]
        cause = _cause(wait_ms, step_ms - wait_ms, stages, advice or {})
        if cause is None:
            cause = f"a batch that is ready is handed over in {wait_ms:.1f} ms"
            if "input" in bound and "python" not in bound:
                cause += f", so try {_TRY['python']}"
        tips.insert(0, cause)
    kinds = [_KINDS.get(name, name) for name in bound]
    kind = " and ".join(f"{name}-" for name in kinds) + "bound"
    return "; ".join([f"{kind}: {', '.join(said)}", *tips])


def _share(part):
    return f"{part:.0%}" if part >= 0.1 or part < 0.01 else f"{part:.1%}"


def _cause(wait_ms, step_ms, stages, advice):
    """Why towers wait, and what to do; `None` if batches are ready."""
    if not stages:
        return (
            "tf.data has no statistics of this input, so the slowest stage is unknown; "
            "try a tf.data.Dataset, with options.autotune left on"
        )
    if pace_ms(stages) >= _AS_SLOW * step_ms:
        name, found = advise(slowest(stages), stages, advice)
        return f"the slowest stage is {name}; try this: {found}"
    ahead = next((s.ahead for s in stages if s.ahead and s.segment == 1), 0)
    if wait_ms < _HANDED_MS or ahead >= _ENOUGH:
        return None
    found = f".prefetch({_ENOUGH}) at its end, or more steps in a call"
    runs = f"no more than {ahead} ahead of the towers" if ahead else "no batch ahead"
    return (
        f"no stage is slower than a step, but the input runs {runs}; "
        f"try {advice.get('prefetch', found)}"
    )

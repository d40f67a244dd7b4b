"""Says in a sentence what a run is bound by, and what to do."""

from collections.abc import Mapping, Sequence

from towers.stages import Stage, pace_ms, slowest

STARVED = 0.05
"""From this share of waiting on, a run is called input-bound."""

# Of the time of a step: a stage that takes so much has nothing to spare for a hiccup.
_AS_SLOW = 0.9

# To hand over a batch that is ready takes less.
_HANDED_MS = 1.0

# With so many batches ahead, it is not their number.
_ENOUGH = 8

_PARTS = {
    "copy": "{:.1f} ms go into copying to the towers",
    "reduce": "{:.1f} ms go into reducing and applying",
    "Python": "{:.1f} ms go by in Python",
}
_TRY = {
    "copy": "a larger batch of smaller examples, or more steps in a call, in which the "
    "next batch is copied meanwhile",
    "reduce": "another builder (--variable_update), XLA, or a larger batch",
    "Python": "a larger batch, or more steps in a call (--steps_per_loop, "
    "steps_per_execution)",
}

_ADVICE = {
    "map": "pass it num_parallel_calls=tf.data.AUTOTUNE, .cache() what it makes, or do "
    "less in it",
    "map in parallel": "do less in it, .cache() what it makes, or give the input more "
    "CPU cores, here or by tf.data's service",
    "batch": "make the examples smaller, or pass it num_parallel_calls",
    "shuffle": "take a smaller buffer, and shuffle before decoding",
    "data_service": "start more workers",
    "read": "keep the data on a faster disk or in memory (.cache()), in fewer and "
    "larger files, or .interleave() several with num_parallel_calls",
    "read in parallel": "keep the data on a faster disk or in memory (.cache()), or in "
    "fewer and larger files",
    "generator": "give it workers (keras.utils.PyDataset has them), or write its "
    "data to TFRecord files once and for all",
    "interleave": "begin fewer data sets in it, of larger files or longer epochs",
    "flat_map": "begin fewer data sets in it, of larger files or longer epochs",
    "": "do less in it, or .cache() what it makes",
}


def verdict(
    waiting: float,
    parts_ms: Mapping[str, float],
    stages: Sequence[Stage],
    advice: Mapping[str, str] | None = None,
) -> str:
    """Says in a sentence what a run is bound by, and what to do.

    Args:
        waiting: Share of the time in which the towers waited for input.
        parts_ms: Milliseconds of a step without that: "compute", "copy", "reduce" and
            "Python".
        stages: Of the input, the last one first; none if nothing is known.
        advice: What to do about a stage, by its label, where there is more to say than
            of tf.data in general.
    """
    # Not rounded up to where it would be called starved.
    share = f"{waiting:.0%}" if waiting >= 0.1 or waiting < 0.01 else f"{waiting:.1%}"
    waited = f"towers waited {share} of the time"
    step_ms = sum(parts_ms.values())
    largest = max(parts_ms, key=parts_ms.get)
    wait_ms = step_ms * waiting / max(1 - waiting, 1e-9)
    if waiting >= STARVED:
        cause = _cause(wait_ms, step_ms, stages, advice or {})
        if cause is not None:
            return f"input-bound: {waited}; {cause}"
        waited += ", as it takes a moment to hand over a batch that is ready"
        if wait_ms > parts_ms[largest]:
            return f"input-bound: {waited}; try {_TRY['Python']}"
    if largest == "compute":
        return f"compute-bound: {waited}"
    return (
        f"{largest}-bound: {waited}, but {_PARTS[largest].format(parts_ms[largest])} "
        f"of a step's {step_ms + wait_ms:.1f}; try {_TRY[largest]}"
    )


def _cause(wait_ms, step_ms, stages, advice):
    """Why towers wait, and what to do; `None` if batches are ready."""
    if not stages:
        return (
            "tf.data has no statistics of this input, so the slowest stage is unknown; "
            "try a tf.data.Dataset, with options.autotune left on"
        )
    if pace_ms(stages) >= _AS_SLOW * step_ms:
        stage = slowest(stages)
        found = advice.get(stage.label) or _advice(stage)
        return f"the slowest stage is {stage}; try this: {found}"
    ahead = next((s.ahead for s in stages if s.ahead and s.segment == 1), 0)
    if wait_ms < _HANDED_MS or ahead >= _ENOUGH:
        return None
    found = f".prefetch({_ENOUGH}) at its end, or more steps in a call"
    runs = f"no more than {ahead} ahead of the towers" if ahead else "no batch ahead"
    return (
        f"no stage is slower than a step, but the input runs {runs}; "
        f"try {advice.get('prefetch', found)}"
    )


def _advice(stage):
    if "generator" in stage.kind.lower():
        kind = "generator"
    elif stage.label == "read":
        kind = "read"
    else:
        kind = next((kind for kind in _ADVICE if kind and kind in stage.kind), "")
    parallel = f"{kind} in parallel"
    return _ADVICE[parallel if stage.threads > 1 and parallel in _ADVICE else kind]

"""Describes what a run is bound by, with advice."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from towers.monitoring.bottleneck.tfdata_stats import Stage, pace_ms, slowest

# A part binds the step if it is shorter than the longest by at most these fractions of
# the step. The second one is for parts that did so before: so that successive lines say
# the same.
_CLOSE = 0.1
_STILL_CLOSE = 0.2

# From this fraction of waiting on, advice is given.
_WORTHWHILE = 0.1

# As a fraction of a step: a stage that takes this long cannot catch up after a delay.
_AS_SLOW = 0.9

# Handing over a batch that is ready takes less time.
_HANDED_MS = 1.0

# With this many batches ahead, their number is not the problem.
_ENOUGH = 8

# The parts of a step, in the order of the sentence.
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
_MORE_CORES = "give the input more CPU cores, here or by tf.data's service"
_FASTER = "keep the data on a faster disk or in memory (.cache())"

# By tf.data's word for a transformation; each names only arguments that it has. Those
# below "in parallel" have several threads already.
_OF_TF_DATA = {
    "map": "pass it num_parallel_calls=tf.data.AUTOTUNE, .cache() what it makes, or do "
    "less in it",
    "map in parallel": "do less in it, .cache() what it makes, or " + _MORE_CORES,
    "batch": "make the examples smaller, or pass it num_parallel_calls",
    "batch in parallel": "make the examples smaller",
    "padded_batch": "make the examples smaller, or pad them in a .map() with "
    "num_parallel_calls and then .batch() them",
    "shuffle": "take a smaller buffer_size, and shuffle before decoding",
    "filter": "compute what it asks for in a .map() with num_parallel_calls before it, "
    "or .cache() what it leaves",
    "flat_map": "use .interleave() in its place, with num_parallel_calls",
    "interleave": "pass it num_parallel_calls=tf.data.AUTOTUNE",
    "interleave in parallel": "begin fewer data sets in it, of larger files or longer "
    "epochs",
    "scan": "move what needs no state to a .map() with num_parallel_calls",
    "unbatch": "leave the examples in their batches, in a .map() of whole batches",
    "memory_cache": "put .batch() before it, so that it hands over less often",
    "file_cache": "leave out its filename, to keep the data in memory, or name one on "
    "a faster disk",
    "data_service": "start more workers",
}
_OF_OTHERS = "put .batch() before it, so that it has less to do, or .cache() its result"

# By what is read.
_FILES = f"{_FASTER}, in fewer and larger files, or .interleave() several with "
_FILES += "num_parallel_calls"
_FILES_IN_PARALLEL = f"{_FASTER}, or in fewer and larger files"
_IN_MEMORY = "let it begin with whole batches in place of single examples"
_GENERATOR = (
    "make a keras.utils.PyDataset of it, which has workers, or write its data to "
    "TFRecord files once and for all"
)
_KINDS_IN_MEMORY = (
    *("FromTensor", "Tensor", "TensorSlice", "SparseTensorSlice"),
    *("Range", "Random", "Window"),
)

# Keras cuts arrays by functions of this name.
_OF_KERAS = "grab_batch", "slice_batch_indices"
_ARRAYS = "give fit a tf.data.Dataset of batches, or a larger batch_size"


def bound_by(
    parts_ms: Mapping[str, float], before: Sequence[str] = ()
) -> tuple[str, ...]:
    """Finds the largest parts of a step.

    Args:
        parts_ms: Milliseconds of a step by part, which add up to more than 0: "input",
            "compute", "copy", "reduce" and "python"; with several hosts also "hosts"
            and "network".
        before: The parts that bound steps in the interval before.

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


class Advice(NamedTuple):
    """A remedy for a finding.

    Attributes:
        topic: Its subject, which stays where figures in the text vary from one interval
            to the next.
        text: The advice.
    """

    topic: str
    text: str


class SpeedFinding(NamedTuple):
    """A measured result, with advice if there is any.

    Attributes:
        text: What was measured.
        advice: The remedy; `None` if there is none.
    """

    text: str
    advice: Advice | None = None


class SpeedVerdict(NamedTuple):
    """The bottleneck of some steps. As a string, it is a sentence with all advice.

    Attributes:
        kind: Which parts of a step take most, such as "compute-bound".
        text: What was measured.
        advice: What to do about it.
    """

    kind: str
    text: str
    advice: tuple[Advice, ...] = ()

    def __str__(self) -> str:
        return self.sentence(self.advice)

    def sentence(self, advice: Sequence[Advice]) -> str:
        """Returns kind, text and some of the advice."""
        return "; ".join([f"{self.kind}: {self.text}", *(tip.text for tip in advice)])

    def plus(self, finding: SpeedFinding | None) -> Self:
        """Returns the verdict with another finding."""
        if finding is None:
            return self
        more = self.advice if finding.advice is None else (*self.advice, finding.advice)
        return self._replace(text=f"{self.text}; {finding.text}", advice=more)


class News:
    """Tells which verdicts on a run are news.

    A verdict is news if it has another kind than the last one that was said, for two
    intervals, or if it has advice that was not given yet. Each advice is given once.
    """

    def __init__(self):
        self._said: str | None = None
        self._before: str | None = None
        self._topics: set[str] = set()

    def of_interval(self, verdict: SpeedVerdict) -> str | None:
        """Returns what is to be said after an interval; `None` if nothing is new."""
        lasts = verdict.kind == self._before
        self._before = verdict.kind
        changes = lasts and verdict.kind != self._said
        return self.sentence(verdict) if changes or self._new(verdict) else None

    def sentence(self, verdict: SpeedVerdict) -> str:
        """Returns the verdict, with the advice that was not given yet."""
        new = self._new(verdict)
        self._said = verdict.kind
        self._topics.update(tip.topic for tip in new)
        return verdict.sentence(new)

    def _new(self, verdict):
        return [tip for tip in verdict.advice if tip.topic not in self._topics]


def verdict(
    parts_ms: Mapping[str, float],
    bound: Sequence[str],
    stages: Sequence[Stage],
    advice: Mapping[str, str] | None = None,
) -> SpeedVerdict:
    """Describes what a run is bound by, with advice.

    Args:
        parts_ms: As for `bound_by`.
        bound: The result of `bound_by`.
        stages: The stages of the input, the last one first; empty if unknown.
        advice: The pipeline's own advice on a stage, by its label, if it has any; see
            `advice.advise`.
    """
    step_ms = sum(parts_ms.values())
    waiting = parts_ms["input"] / step_ms
    named = [name for name in _TOOK if name in bound or name == "input"]
    shares = [_TOOK[name].format(_share(parts_ms[name] / step_ms)) for name in named]
    kinds = [_KINDS.get(name, name) for name in bound]
    kind = " and ".join(f"{name}-" for name in kinds) + "bound"
    measured = SpeedVerdict(kind, ", ".join(shares))
    if "input" in bound or waiting >= _WORTHWHILE:
        wait_ms = parts_ms["input"]
        cause = _cause(wait_ms, step_ms - wait_ms, stages, advice or {})
        if cause is None:
            cause = SpeedFinding(
                f"a batch that is ready is handed over in {wait_ms:.1f} ms"
            )
            if "input" in bound and "python" not in bound:
                cause = cause._replace(advice=_try("python"))
        measured = measured.plus(cause)
    tips = [_try(name) for name in bound if name in _TRY]
    return measured._replace(advice=(*measured.advice, *tips))


def _try(name):
    return Advice(name, f"try {_TRY[name]}")


def _share(part):
    return f"{part:.0%}" if part >= 0.1 or part < 0.01 else f"{part:.1%}"


def _cause(wait_ms, step_ms, stages, advice):
    """Explains why towers wait, with advice; `None` if batches are ready."""
    if not stages:
        return SpeedFinding(
            "tf.data has no statistics of this input, so the slowest stage is unknown",
            Advice(
                "statistics", "try a tf.data.Dataset, with options.autotune left on"
            ),
        )
    if pace_ms(stages) >= _AS_SLOW * step_ms:
        name, tip = advise(slowest(stages), stages, advice)
        return SpeedFinding(
            f"the slowest stage is {name}", Advice(name, f"try this: {tip}")
        )
    ahead = next((s.ahead for s in stages if s.ahead and s.segment == 1), 0)
    if wait_ms < _HANDED_MS or ahead >= _ENOUGH:
        return None
    tip = f".prefetch({_ENOUGH}) at its end, or more steps in a call"
    runs = f"no more than {ahead} ahead of the towers" if ahead else "no batch ahead"
    return SpeedFinding(
        f"no stage is slower than a step, but the input runs {runs}",
        Advice("prefetch", f"try {advice.get('prefetch', tip)}"),
    )


# What to do about the slowest stage of an input: in words that its author knows.


def advise(
    stage: Stage, stages: Sequence[Stage], own: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """Names a stage of the input, and says what to do about it.

    Args:
        stage: One of `stages`.
        stages: Of the input, the last one first.
        own: What to do about a stage, by its label, if the pipeline has words of its
            own; those that it has no word for bring the records: "read".
    """
    if own:
        return _on_own(stage, own)
    if any(each.label in _OF_KERAS for each in stages):
        return "Keras's own, which cuts the arrays into batches", _ARRAYS
    if stage.kind == "flat_map":
        # `Dataset.from_generator`, which Keras uses as well, is made of both.
        after = stages[stages.index(stage) + 1 :][:1]
        stage = next((each for each in after if _generates(each)), stage)
    return str(stage), _of_tf_data(stage)


def _on_own(stage, own):
    if stage.label in own and stage.label != "read":
        return str(stage), own[stage.label]
    word = {"data_service": "service"}.get(stage.kind, stage.kind)
    word = word if word in own else "read"
    return f"`{word}`", own.get(word) or _of_tf_data(stage)


def _of_tf_data(stage):
    parallel = stage.threads > 1
    if _generates(stage):
        return _GENERATOR
    if stage.label == "read":
        if stage.kind in _KINDS_IN_MEMORY:
            return _IN_MEMORY
        return _FILES_IN_PARALLEL if parallel else _FILES
    kind = stage.kind.removesuffix("_impl")
    found = _OF_TF_DATA.get(f"{kind} in parallel") if parallel else None
    return found or _OF_TF_DATA.get(kind, _OF_OTHERS)


def _generates(stage):
    return "generator" in stage.kind.lower()

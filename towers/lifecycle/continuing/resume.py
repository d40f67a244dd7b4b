"""Checks that a run can go on with the arguments of `fit`, and reports changes."""

from collections.abc import Mapping
from typing import Any

from towers.lifecycle.checkpoints.store import Position
from towers.lifecycle.continuing import data_position
from towers.lifecycle.continuing.data_position import ResumeError, too_few
from towers.model.fit_call import FitCall
from towers.program import words
from towers.program.voice import say


class OtherDataError(ResumeError):
    """A run goes on in the middle of an epoch with different data.

    Attributes:
        run: The name of the run.
        changes: For each difference, by name, the old and the new value.
    """

    def __init__(
        self,
        run: str,
        changes: Mapping[str, tuple[Any, Any]],
        causes: Mapping[str, str] | None = None,
    ):
        """Takes the changes, and their causes if known."""
        super().__init__(
            f"The run {run} goes on in the middle of an epoch, but the data are "
            f"others: {_listed(changes, '{}, but received {}', causes)}; "
            "expected the same."
        )
        self.run, self.changes = run, changes


def start(
    run: str,
    about: Mapping[str, Any],
    position: Position,
    call: FitCall,
    data: dict[str, Any],
    used: bool,
) -> data_position.Start:
    """Returns how to go on with the data; reports changes in them.

    Args:
        run: The name of the run.
        about: The description of its checkpoint.
        position: The position at which it goes on.
        call: The call of `fit`.
        data: The known facts that decide which records a batch has.
        used: Whether an earlier `fit` has trained on the same object.

    Raises:
        ResumeError: The run cannot go on with these data.
    """
    changes, steps = _changes(about, data), data["steps_per_epoch"]
    check_classes(run, *changes.pop("classes", (None, None)))
    if "validation" in changes:
        _say_validation_differs(run, *changes.pop("validation"))
    if changes and position.batch:
        if [*changes] == ["steps_per_epoch"]:
            _check_batches(position.batch, steps)
        raise OtherDataError(run, changes)
    if position.batch:
        _check_batches(position.batch, steps)
    if changes:
        say(
            f"Note: The run {run} goes on with other data, from their beginning:"
            f" {_listed(changes, '{} before, {} now')}."
        )
        return data_position.start_anew(call.options, position)
    start = data_position.start(call.options, position, about.get("past"), used)
    if start.note:
        say(
            "Note: This run goes on with data that are not from towers.input_pipeline."
            f"make_dataset. {start.note}."
        )
    return start


def _changes(about, data):
    """Returns, by name, the old and the new value of facts that differ."""
    size = about.get("batch_size")
    before = about.get("data", {} if size is None else {"batch size": size}) or {}
    names = before.keys() & data.keys()
    if "data" in about:
        # Foreign data have no such name.
        names |= {"dataset"} & (before.keys() | data.keys())
    return _differences({n: before.get(n) for n in names}, data)


def _differences(then, now):
    both = {name: (then.get(name), now.get(name)) for name in sorted(then)}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1]}


def _say_validation_differs(run, then, now):
    changes = _differences(dict.fromkeys(now) | then, now)
    say(
        f"Note: The run {run} is validated on other data: "
        f"{_listed(changes, '{} before, {} now')}; the best checkpoint so far was "
        "chosen by the data before."
    )


def check_classes(
    run: str, before: Any, now: Any, nouns: tuple[str, str] = ("class", "classes")
) -> None:
    """Checks that data have the classes that a run has been trained on.

    Args:
        run: The name of the run.
        before: The names of the classes then, or their number; `None` if unknown.
        now: The same for the data that the run goes on with.
        nouns: The words for one class and for several.

    Raises:
        ResumeError: The classes differ.
    """
    one, several = nouns
    if before is None or now is None or before == now:
        return
    numbers = [
        classes if isinstance(classes, int) else len(classes)
        for classes in (before, now)
    ]
    if numbers[0] != numbers[1]:
        had = words.count(numbers[0], one, several)
        different = f"{had}, but received data with {numbers[1]}"
    elif int in map(type, (before, now)):
        return
    else:
        first = next(
            i
            for i, names in enumerate(zip(before, now, strict=True))
            if len({*names}) > 1
        )
        different = f"a {one} {before[first]!r}, but received {now[first]!r} for it"
    raise ResumeError(
        f"The run {run} has {different}; expected the same {several}, so choose "
        "another directory for these data (--model_dir)."
    )


def _listed(changes, text, causes=None):
    return "; ".join(
        f"{name} {text.format(*('unknown' if fact is None else fact for fact in both))}"
        + (f" (by {causes[name]})" if causes and name in causes else "")
        for name, both in changes.items()
    )


def _check_batches(done: int, steps: int | None) -> None:
    if steps is not None and done > steps:
        raise too_few(done)

"""Cases of how `fit` reads batches: several in a call, ahead, and to an end: data."""

import dataclasses
import functools

import numpy as np

from tests.exact import cases

# Seven batches: a call of four or of ten steps finds the end on its way.
SIZES = (8,) * 6 + (5,)
CALLS = {
    f"steps_per_execution={steps}": {"steps_per_execution": steps} for steps in (4, 10)
}
CALLS |= {f"{way}, run_eagerly": c | {"run_eagerly": True} for way, c in CALLS.items()}
# What a batch is made of.
KINDS = (
    "sample weights",
    "inputs only, add_loss",
    "nested of inputs",
    "dict of outputs, each with loss, loss weight, metrics, sample weights",
    "ragged inputs",
    "sparse inputs",
    "of arrays, which fit cuts",
)


def _ahead(count):
    return {"options": {"prefetch": count}}


def _repeated(data):
    return data.repeat()


def _of_unknown_length(data):
    return data.filter(lambda *_: True)


def _generated(data):
    """A generator of a user's, without weights."""
    for batch in data.repeat().as_numpy_iterator():
        yield (*batch, None)


def _by_hand(model):
    """Calls of a user, with batches of any size."""
    found = []
    for rows in (11, 2, 1, 11):
        ((x, y),) = cases._numbers((rows,))()
        found += [model.train_on_batch(x, y), model.test_on_batch(x, y)]
        found.append(model.predict_on_batch(x))
        found.append(model.train_on_batch(x, y, sample_weight=np.float32(0.5)))
    return found


def _loops():
    case = functools.partial(cases._case, "loops", batches=cases._numbers(SIZES))
    rows = cases._numbers((11,))()[0]
    validated = {"fit": {"validation_data": rows, "validation_batch_size": 4}}
    for name, further in CALLS.items():
        options = {"compile": functools.partial(dict, metrics=["mae"], **further)}
        yield case(name, **options, **validated)
        if "eagerly" not in name:
            yield case(f"{name}, unknown length", feed=_of_unknown_length, **options)
        if "=4" in name:
            yield case(f"{name}, by hand", between=_by_hand, **options)
    yield case("by hand", between=_by_hand)
    yield case("with validation", **validated)
    for count in (1, 10):
        name, options = f"prefetch={count}", _ahead(count)
        yield case(name, **options, **validated)
        yield case(f"{name}, unknown length", feed=_of_unknown_length, **options)
        yield case(
            f"{name}, epochs that go on in the data",
            feed=_repeated,
            fit={"steps_per_epoch": 3, "epochs": 3},
            again=cases._numbers((8, 8, 4)),
            **options,
        )
    yield from _kinds()


def _kinds():
    found = {case.name: case for case in cases._batches()}
    kinds = [found[kind] for kind in KINDS]
    fed = {"steps_per_epoch": 3}
    kinds.append(cases._case("batches", "of a generator", feed=_generated, fit=fed))
    for case in kinds:
        case = dataclasses.replace(case, group="loops")

        def several(compile=case.compile):
            return compile() | {"steps_per_execution": 2}

        for way, fields in {
            "steps_per_execution=2": {"compile": several},
            "prefetch=2": _ahead(2),
        }.items():
            yield dataclasses.replace(case, name=f"{case.name}, {way}", **fields)


CASES = [*_loops()]

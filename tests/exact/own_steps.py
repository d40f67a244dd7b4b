"""Cases of models that define a step themselves: examples, and published ones."""

import functools
import importlib
import pathlib

import keras
import numpy as np

from tests.exact.case import Case
from tests.exact.published_steps import EXAMPLES

FOLDER = pathlib.Path(__file__).parents[2] / "examples/steps"
NAMES = sorted({path.stem for path in FOLDER.glob("*.py")} - {"common"})
# Even batches, uneven ones, and some with fewer examples than towers.
SIZES = 7, 5, 8, 3, 6, 1, 8, 4, 2, 5
PUBLISHED_SIZES = 7, 8, 2, 3
# Adam divides a gradient by its size, so with its own epsilon of 1e-7 what is only
# rounding would become a step.
EPSILON = 1e-4
EXAMPLE, PUBLISHED = "own steps", "published steps"


def _cut(sizes, rows):
    ends = np.cumsum(sizes)
    return [
        keras.tree.map_structure(lambda a: a[end - size : end], rows)  # noqa: B023
        for size, end in zip(sizes, ends, strict=True)
    ]


def _built(example):
    model = example.build()
    for value in vars(model).values():
        if isinstance(value, keras.Optimizer) and hasattr(value, "epsilon"):
            value.epsilon = EPSILON
    return model


def _examples():
    for name in NAMES:
        example = importlib.import_module(f"examples.steps.{name}")
        kind = next(
            kind for kind in vars(example).values() if _has_own_step(kind, example)
        )
        tests_itself = kind.test_step is not keras.Model.test_step
        yield Case(
            EXAMPLE,
            name,
            functools.partial(_built, example),
            lambda example=example: _cut(SIZES, example.data()),
            compile=None,
            fit={"epochs": 1},
            later=("evaluate",) if tests_itself else (),
            towers=2,
        )


def _has_own_step(kind, example):
    own = isinstance(kind, type) and kind.__module__ == example.__name__
    return own and issubclass(kind, keras.Model)


def _published():
    for name, example in EXAMPLES.items():
        yield Case(
            PUBLISHED,
            name,
            example.make,
            lambda example=example: _cut(PUBLISHED_SIZES, example.data()),
            optimizer=None,
            compile=example.compile,
            later=("evaluate",) if example.evaluates else (),
        )


CASES = [*_examples(), *_published()]

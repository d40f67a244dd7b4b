"""Exact cases whose towers change before each call of training, against plain Keras."""

import dataclasses

import keras
import pytest

import towers
from tests.exact import combinations, oracle
from tests.exact.test_exact_cases import LONG, RUNS, is_slow
from tests.variants import number_of, slow

# Fewer and more than the two to begin with, also without the first of them.
LAYOUTS = (0, 1), (3,), (1, 3, 2)
BUILDERS = "parameter_server", "replicated"


class Resizes(keras.callbacks.Callback):
    """Resizes a tower model before each call, and leaves plain Keras alone."""

    def __init__(self):
        super().__init__()
        self._calls = 0

    def on_train_batch_begin(self, batch, logs=None):
        if hasattr(self.model, "resize"):
            self.model.resize(gpus=LAYOUTS[self._calls % len(LAYOUTS)])
            self._calls += 1


# A reference hangs on how many towers there are, which changes here.
CASES = [
    run.values[0]
    for run in RUNS
    if run.values[1] in BUILDERS
    and run.values[0].group != combinations.GROUP
    and run.values[0].verdict == "equal"
    and run.values[0].reference is None
    and "split_ratios" not in run.values[0].options
    and str(run.values[0]) not in LONG
]
CASES = [*dict.fromkeys(CASES)]


def _is_quick(case):
    return not is_slow(case) and number_of(case) % 4 == 0


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("case", "builder"),
    [
        (pytest.param if _is_quick(case) else slow)(
            case, builder, id=f"{case}-{builder}"
        )
        for case in CASES
        for builder in [BUILDERS[number_of(case) // 3 % len(BUILDERS)]]
    ],
)
def test_towers_that_change_equal_one_device(case, builder):
    def wrap(model):
        return towers.multi_gpu_model(
            model, gpus=2, variable_update=builder, **case.options
        )

    callbacks = [*case.fit.get("callbacks", ()), Resizes()]
    case = dataclasses.replace(case, fit={**case.fit, "callbacks": callbacks})
    found = oracle.outcome(case, wrap, later=("evaluate",))
    assert found["verdict"] == case.verdict, found

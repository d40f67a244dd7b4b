"""Exact cases by towers of stages and micro-batches, against plain Keras."""

import dataclasses

import pytest

import towers
from tests.exact import combinations, oracle
from tests.exact.layouts import in_stages, refused
from tests.exact.test_exact_cases import RUNS, alone, is_slow
from tests.variants import number_of, slow


@dataclasses.dataclass(frozen=True)
class Layout:
    """How devices share a model, and a batch.

    A model with fewer layers with weights than stages gets a stage for each.
    """

    towers: int
    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    recompute: str = "none"
    builder: str = "parameter_server"

    def __str__(self):
        return ", ".join(map(str, dataclasses.astuple(self)))

    def outcome(self, case):
        """Runs a case so, and compares it with one device; see `oracle.outcome`."""
        parts = self.towers * self.micro_batches
        if parts > 1:
            # Of what a reference computes for each tower by itself.
            case = dataclasses.replace(refused(case), towers=parts)
        else:
            case = alone(case)

        def wrap(model):
            options = in_stages(case, model, self.stages) | case.options
            if ratios := options.pop("split_ratios", None):
                options["split_ratios"] = ratios[: self.towers]
            return towers.multi_gpu_model(
                model,
                gpus=self.towers * options.get("stages", 1),
                micro_batches=self.micro_batches,
                pipeline_schedule=self.schedule,
                recompute=self.recompute,
                variable_update=self.builder,
                **options,
            )

        return oracle.outcome(case, wrap) | {"expected": case.verdict}


LAYOUTS = [
    Layout(1, 2, 1),
    Layout(1, 2, 2),
    Layout(2, 2, 2, builder="replicated"),
    Layout(1, 2, 5, "gpipe"),
    Layout(1, 4, 2, "1f1b", "stage"),
    Layout(1, 4, 5, "gpipe", "layer"),
    Layout(2, 2, 5, "gpipe", "stage"),
    Layout(2, 1, 2, "1f1b", "layer", "replicated"),
]
CASES = {
    str(case): case
    for case in dict.fromkeys(run.values[0] for run in RUNS)
    if case.group != combinations.GROUP
}
# A layer that is called on two stages, rows of a table that travel and the norm of all
# gradients, a loss that has to see all outputs, more micro-batches than rows.
FIRST = [
    ("models/functional, shared layer", 1),
    ("gradients/Embedding, global_clipnorm", 4),
    ("losses/function, pairwise ranking", 2),
    ("batches/sizes (1, 8)", 3),
]


def check(name, layout):
    found = layout.outcome(CASES[name])
    assert found["verdict"] == found["expected"], found


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(("name", "k"), FIRST)
def test_stages_equal_one_device(name, k):
    check(name, LAYOUTS[k])


def _layouts(name, k):
    """A quick case has all layouts; the name of another one says which it has."""
    has_layout = k == number_of(name) // 7 % len(LAYOUTS) or not is_slow(CASES[name])
    return (slow(name, LAYOUTS[k]),) if has_layout else ()


@pytest.mark.parametrize(
    ("name", "layout"),
    [one for name in CASES for k in range(len(LAYOUTS)) for one in _layouts(name, k)],
    ids=str,
)
def test_all_cases(name, layout):
    check(name, layout)

"""Exact cases with the optimizer's state in shards: no number may change."""

import dataclasses

import pytest

import towers
from tests.exact import cases, oracle
from tests.exact.test_exact_cases import LONG
from tests.variants import slow

# What these are about is how weights change; other groups do not know the difference.
GROUPS = "float8", "gradients", "mixed precision", "optimizers"
# Those of which the others are variants.
QUICK = (
    "float8/idle towers, clipping and a loss scale",
    "gradients/Embedding, global_clipnorm",
    "mixed precision/mixed_float16, overflow on the second tower",
    "optimizers/Adam",
    "optimizers/Muon",
    "optimizers/gradient accumulation and clipping",
)
CASES = [case for case in cases.CASES if case.group in GROUPS]


def test_quick_cases_exist():
    assert {*QUICK} <= {str(case) for case in CASES}


def _run(case):
    """Only the quick ones are for `make test`."""
    name = str(case)
    return pytest.param(case, id=name) if name in QUICK else slow(case, id=name)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    "case",
    [_run(case) for case in CASES if str(case) not in LONG],
)
def test_sharded_state_equals_one_device(case):
    options = {**case.options, "shard_optimizer_state": True}

    def wrap(model):
        return towers.multi_gpu_model(
            model, gpus=case.towers, variable_update="replicated", **options
        )

    found = oracle.outcome(dataclasses.replace(case, options=options), wrap, later=())
    assert found["verdict"] == case.verdict, found

"""The table of exact cases: each builder, each case, against plain Keras."""

import json
import os
import pathlib

import pytest

import towers.model
from tests.exact import oracle
from tests.exact.cases import CASES

ROOT = pathlib.Path(__file__).parents[2]
# For scripts/parity_report.py.
FILE = pathlib.Path(os.environ.get("TOWERS_EXACT_FILE", ROOT / ".exact/towers.jsonl"))


@pytest.mark.parametrize("builder", list(towers.model.BUILDERS))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_towers_equal_one_device(case, builder):
    def wrap(model):
        return towers.multi_gpu_model(
            model, gpus=case.towers, builder=builder, **case.options
        )

    found = oracle.outcome(case, wrap)
    _append({"builder": builder} | found)
    assert found["verdict"] == case.verdict, found


def _append(record):
    FILE.parent.mkdir(parents=True, exist_ok=True)
    # One write of a line, so that those of several processes do not mix.
    with FILE.open("ab", buffering=0) as file:
        file.write(f"{json.dumps(record)}\n".encode())

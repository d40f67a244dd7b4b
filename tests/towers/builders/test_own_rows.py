"""Models with a `train_step` of their own, and `loss_placement="tower"`."""

import functools
import json

import pytest

from tests import hosts
from tests.exact import oracle
from tests.towers.builders import own_rows
from towers import multi_gpu_model

pytestmark = pytest.mark.quick_one_in(2)

LIMIT = 1e-5


def check(ours, ratios):
    apart = oracle.differences(ours, own_rows.of_each_tower(ratios))
    worst = max(apart, key=apart.get)
    assert apart[worst] <= LIMIT, (worst, apart[worst])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratios", "update"),
    [
        ((2, 1), "parameter_server"),
        ((1, 1, 1), "parameter_server"),
        ((1, 3, 2), "replicated"),
    ],
)
def test_towers_compute_with_their_own_rows(ratios, update, caplog):
    options = {"split_ratios": ratios, "loss_placement": "tower"}
    options["variable_update"] = update
    wrap = functools.partial(multi_gpu_model, gpus=len(ratios), **options)
    check(own_rows.on_towers(wrap), ratios)
    assert "as loss_placement='tower' asks: 'MatMul' at" in caplog.text
    assert "own_rows.py:" in caplog.text
    assert "with the rows of all towers" not in caplog.text


def test_hosts_compute_with_their_own_rows(tmp_path):
    file = tmp_path / "found.json"
    module = "tests.towers.builders.own_rows_on_hosts"
    hosts.run(module, (1, 2), file)
    apart = json.loads(file.read_text())
    assert max(apart.values()) <= LIMIT, apart

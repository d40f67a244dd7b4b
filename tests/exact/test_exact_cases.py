"""The table of exact cases: each builder, each case, against plain Keras."""

import dataclasses
import json
import os
import pathlib

import pytest

import towers
from tests.exact import block_sparse, combinations, oracle, table
from tests.exact.table import CASES
from tests.variants import ALL, number_of, slow
from towers.builders.strategies import STRATEGIES

ROOT = pathlib.Path(__file__).parents[2]
# For scripts/parity_report.py.
FILE = pathlib.Path(os.environ.get("TOWERS_EXACT_FILE", ROOT / ".exact/towers.jsonl"))

# What these are about is how several towers cut a batch. `asynchronous` equals one
# device with one tower only.
OF_SEVERAL_TOWERS = "shares", "batches"
# What these are about is how weights change. A loss is evaluated by Keras, on the whole
# batch, as those of the other groups are.
OF_TRAINING = "optimizers", "gradients", "losses"
# What these are about is how outputs are put together.
OF_OUTPUTS = "batches", "networks", "shares"

# What the other builders do differently is met by many cases: `replicated` takes a
# fourth of them in place of `parameter_server`, of which it is one, `asynchronous` an
# eighth besides. All three predict by the same code, which a fourth of the cases tries,
# as `evaluate` has gone through the same outputs. Which ones it are hangs on the case's
# name alone, so that a new case changes nothing for the others. Of block-sparse layers,
# a slow case has one of the three, and a quick one has all. For the report, each
# builder takes all cases, and `parameter_server` predicts for all.
MAIN = "parameter_server"
TURNS = [(MAIN,)] * 8
TURNS[0] = MAIN, "asynchronous"
TURNS[1] = TURNS[5] = ("replicated",)

# To trace them takes 25 s, 11 s and 6 s; the layers are in other cases, too.
LONG = (
    "models/MobileNetV2, synchronized BatchNormalization",
    "models/MobileNetV2, frozen BatchNormalization",
    "float8/attention",
)

# What `make test` runs: of each group, what its other cases are variants of. The others
# are slow, as is whatever comes.
QUICK = {
    "batches": (
        "nested of inputs",
        "sizes (1, 8)",
        "sizes (8, 8, 5), 3 towers",
        "with validation",
    ),
    "block-sparse": ("random, tokens", "used twice, batches of (1, 8)"),
    "float8": ("idle towers, clipping and a loss scale",),
    "gradients": (
        "Embedding used twice",
        "Embedding, gathered",
        "Embedding, global_clipnorm",
        "frozen between two fits",
    ),
    "losses": (
        "KLDivergence",
        "function, pairwise ranking",
        "gradient penalty, state",
        "ignore_class",
        "py_function",
        "reduction mean_with_sample_weight",
        "reduction sum, sample weights",
    ),
    "losses that layers add": (
        "mean and sum",
        "sum, smaller than the towers",
        "variance over the batch",
    ),
    "masks": (
        "ignore_class of pixels, sum_over_batch_size",
        "the first tower has only padding, mean_with_sample_weight, weights",
    ),
    "metrics": ("function, and names",),
    "metrics of tokens and pixels": ("numbers, padding, weights",),
    "mixed precision": (
        "mixed_float16, loss of the whole batch",
        "mixed_float16, Adam",
        "mixed_float16, overflow on the second tower",
    ),
    "models": (
        "Conv2D",
        "functional, nested models",
        "functional, shared layer",
        "not built",
        "run_eagerly, add_loss",
        "steps_per_execution=3",
    ),
    "networks": (
        "convolutional, a learning rate for each batch",
        "siamese, arrays, of which a part validates",
    ),
    "optimizers": (
        "SGD",
        "constraint MaxNorm",
        "gradient accumulation and clipping",
        "learning rate set by a callback",
        "loss_scale_factor",
    ),
    "ranks": ("logits of tokens, reduction sum_over_batch_size, weights (n, tokens)",),
    "shares": ("(2, 3, 3), batches of (16, 16)", "(2, 3, 3), loss of the whole batch"),
    "state": (
        "BatchNormalization(synchronized=True), mask",
        "BatchNormalization, each share by itself",
        "counter, int64",
        "moving mean",
        "moving mean, with this batch",
        "moving norm",
        "moving sum",
        "stateful RNN",
        "vector quantizer",
    ),
    "tasks": ("binary, mlp",),
}
# Of combinations, those that are refused, which takes no time.
QUICK_KINDS = (
    "added loss that couples",
    "examples that meet",
    "raw state",
    "state that couples",
)


# To train and compare a combination takes 3 s, and 14 s with XLA; to see one refused
# takes half a second. One of each kind is tried here, the one of the smallest number,
# and all for the report. Each has one builder: other cases tell how builders differ.
OF_A_KIND = {
    kind: min(cases, key=number_of) for kind, cases in combinations.BY_KIND.items()
}


def builders(case):
    """The builders that a case runs with."""
    number = number_of(case)
    one = ((MAIN, "replicated")[number // 8 % 2],)
    if case.group == combinations.GROUP:
        return one if ALL or case in OF_A_KIND.values() else ()
    if case in table.OF_ONE_BUILDER:
        return one
    turns = TURNS[number % len(TURNS)]
    if ALL or (case.group == block_sparse.GROUP and not is_slow(case)):
        turns = tuple(STRATEGIES)
    elif case.group == block_sparse.GROUP:
        turns = (tuple(STRATEGIES)[number // 3 % len(STRATEGIES)],)
    several = case.group in OF_SEVERAL_TOWERS
    return [name for name in turns if not (name == "asynchronous" and several)]


def is_slow(case):
    """Whether only `make test-slow` runs a case."""
    if case.group == combinations.GROUP:
        return not any(case is OF_A_KIND[kind] for kind in QUICK_KINDS)
    return case.name not in QUICK[case.group]


def test_quick_cases_exist():
    assert {*QUICK_KINDS} <= OF_A_KIND.keys()
    for group, names in QUICK.items():
        assert {*names} <= {case.name for case in CASES if case.group == group}


# The names of the cases that `make test-oldest` runs.
OF_EACH_GROUP = {
    case.group: str(case)
    for case in sorted(CASES, key=number_of)
    if builders(case) and not is_slow(case)
}


def _run(case, builder):
    """A case with a builder."""
    name = f"{case}-{builder}"
    if not is_slow(case):  # It may run with the oldest versions.
        oldest = [pytest.mark.oldest] if str(case) in OF_EACH_GROUP.values() else []
        return pytest.param(case, builder, id=name, marks=oldest)
    return slow(case, builder, id=name)


# Builders of a case follow one another, mostly in one process: what one device makes of
# it is then computed once.
RUNS = [_run(case, builder) for case in table.ALL for builder in builders(case)]


@pytest.mark.parametrize("group", dict.fromkeys(case.group for case in CASES))
def test_some_of_each_group_are_quick(group):
    assert group in OF_EACH_GROUP


def later(case, builder):
    """What is looked at besides training."""
    if case in table.OF_ONE_BUILDER:
        return ("evaluate", "predict")
    if builder == "asynchronous" or (ALL and builder != MAIN):
        return ()
    if ALL:
        return ("evaluate", "predict")
    if case.group in OF_TRAINING:
        return ()
    predicts = case.group in OF_OUTPUTS or number_of(case) // len(TURNS) % 4 == 0
    return ("evaluate", "predict") if predicts else ("evaluate",)


@pytest.mark.parametrize(("case", "builder"), RUNS)
def test_towers_equal_one_device(case, builder):
    if builder == "asynchronous":
        case = alone(case)

    def wrap(model):
        return towers.multi_gpu_model(
            model, gpus=case.towers, variable_update=builder, **case.options
        )

    found = oracle.outcome(case, wrap, later=later(case, builder))
    _append({"builder": builder} | found)
    assert found["verdict"] == case.verdict, found


def alone(case):
    """The case on one tower, to which what several cannot cut is the whole."""
    options = {name: v for name, v in case.options.items() if name != "split_ratios"}
    # Some are refused whatever the number of towers.
    refused = case.expect == "stateful"
    expect = {} if refused else {"expect": "equal", "only": ""}
    return dataclasses.replace(case, towers=1, options=options, **expect)


def _append(record):
    FILE.parent.mkdir(parents=True, exist_ok=True)
    # One write of a line, so that those of several processes do not mix.
    with FILE.open("ab", buffering=0) as file:
        file.write(f"{json.dumps(record)}\n".encode())

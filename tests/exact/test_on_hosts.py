"""Exact cases on several hosts, against plain Keras on one device."""

import json

import pytest

from tests import hosts
from tests.exact import combinations, networks, table
from tests.exact.test_exact_cases import RUNS, is_slow
from tests.variants import number_of, slow

# What each host has: one tower each, two each, and one beside two.
LAYOUTS = (1, 1), (2, 2), (1, 2)
WAYS = [
    (layout, builder)
    for layout in LAYOUTS
    for builder in ("parameter_server", "replicated")
]
# Rows and values of a table travel; a loss has to see all outputs; a host has no rows;
# a state has to be that of all; nothing is traced.
FIRST = (
    "batches/sizes (1, 8)",
    "gradients/Embedding, global_clipnorm",
    "losses/function, pairwise ranking",
    "state/moving mean",
)


def run(layout, builder, names, folder, given="whole", stages=1, parts=1):
    """Runs cases on hosts; returns a record of each, by name."""
    file, listed = folder / "found.jsonl", folder / "names.txt"
    listed.write_text("\n".join(names))
    arguments = builder, file, listed, given, stages, parts
    hosts.run("tests.exact.on_hosts", layout, *arguments)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    return {f"{each['group']}/{each['case']}": each for each in records}


def _check(found, names):
    assert found.keys() == {*names}
    for name, record in found.items():
        assert record["verdict"] == record["expected"], (name, record)


@pytest.mark.parametrize(
    ("builder", "names"),
    [
        ("parameter_server/rows", FIRST[:2]),
        ("replicated", ("networks/embedding, validation",)),
        slow("parameter_server/rows", FIRST),
        slow("parameter_server", FIRST),
    ],
    ids=str,
)
def test_hosts_equal_one_device(builder, names, tmp_path):
    _check(run((1, 2), builder, names, tmp_path, "in turns"), names)


# Its norm is that of all shards; a scale has to be that of all hosts.
SHARDED = (
    *FIRST,
    "float8/idle towers, clipping and a loss scale",
    "mixed precision/mixed_float16, overflow on the second tower",
    "optimizers/EMA, overwrite",
    "optimizers/Muon",
    "optimizers/gradient accumulation and clipping",
)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_optimizer_state_is_divided_among_the_towers_of_all_hosts(layout, tmp_path):
    found = run(layout, "replicated/state", SHARDED, tmp_path)
    _check(found, SHARDED)


# A table is read as a whole, too; rows that both hosts have, masks.
TABLES = (
    "gradients/Embedding, SGD",
    "gradients/Embedding, Adam",
    "gradients/Embedding, Adagrad",
    "gradients/Embedding, global_clipnorm",
    "gradients/Embedding, gathered",
    "gradients/Embedding used twice",
    "gradients/Embedding tied to the output",
    "masks/Embedding, reduction sum, weights (n, tokens)",
    "masks/padding and weights, gradient accumulation",
    "masks/padding and weights, mixed_float16",
    "masks/padding and weights, run_eagerly",
)


@pytest.mark.parametrize(
    ("layout", "builder"),
    [
        slow((1, 1), "parameter_server/rows"),
        slow((1, 1), "replicated/auto"),
        slow((1, 2), "parameter_server/rows"),
        slow((1, 2), "replicated/rows"),
        slow((2, 1), "replicated/columns"),
        slow((2, 2), "parameter_server/rows"),
        slow((2, 2), "replicated/columns"),
        slow((2, 2), "replicated/rows"),
    ],
)
def test_tables_are_divided_among_the_towers_of_all_hosts(layout, builder, tmp_path):
    _check(run(layout, builder, TABLES, tmp_path, "in turns"), TABLES)


@pytest.mark.slow
def test_tables_of_hosts_over_devices_of_stages(tmp_path):
    found = run((1, 2), "replicated/rows", TABLES, tmp_path, "whole", 2, 2)
    _check(found, TABLES)


@pytest.mark.slow
def test_hosts_divide_optimizer_state_and_have_tables_in_shards(tmp_path):
    every = map(str, table.CASES)
    names = [name for name in every if name.startswith("gradients/Embedding, ")]
    _check(run((1, 2), "replicated/state+rows", names, tmp_path), names)


QUICK = [str(case) for case in table.CASES if not is_slow(case)]
OTHERS = [
    str(case)
    for case in [*networks.CASES, *(run.values[0] for run in RUNS)]
    if is_slow(case) and case.group != combinations.GROUP
]


def in_ways(names, ways, parts=5):
    """Returns parameters of tests: a way to train, and names of cases.

    Each case trains once; its name decides in which way. Each way has some tests, with
    a part of its cases each.
    """
    cases = {(way, part): [] for way in ways for part in range(parts)}
    for name in names:
        number = number_of(name)
        cases[ways[number // parts % len(ways)], number % parts].append(name)
    return [
        slow(*way, names_of_part, id=f"{way}, part {part}")
        for (way, part), names_of_part in cases.items()
        if names_of_part
    ]


@pytest.mark.parametrize(
    ("layout", "builder", "names"), in_ways(dict.fromkeys([*QUICK, *OTHERS]), WAYS)
)
def test_all_cases(layout, builder, names, tmp_path):
    _check(run(layout, builder, names, tmp_path), names)


@pytest.mark.parametrize(("layout", "builder", "names"), in_ways(QUICK, WAYS))
def test_quick_cases_of_hosts_that_are_given_their_rows(
    layout, builder, names, tmp_path
):
    names = [*dict.fromkeys([*FIRST, *names])]
    _check(run(layout, builder, names, tmp_path, "rows"), names)


@pytest.mark.parametrize(
    ("layout", "builder", "names"),
    # Of the last, the first host has no copies.
    [
        slow((1, 1), "parameter_server", FIRST),
        slow((1, 1), "replicated", FIRST),
        slow((1, 2), "replicated", FIRST),
        slow(
            *((1, 1), "replicated/state"),
            (*FIRST, "optimizers/gradient accumulation and clipping"),
        ),
    ],
)
def test_hosts_of_towers_of_stages(layout, builder, names, tmp_path):
    _check(run(layout, builder, names, tmp_path, "in turns", 2, 2), names)


# What ZeRO's first stage is about.
OF_STATE = [
    str(case)
    for case in dict.fromkeys(run.values[0] for run in RUNS)
    if case.group in ("float8", "gradients", "mixed precision", "optimizers")
]


@pytest.mark.parametrize(
    ("layout", "names"), in_ways(OF_STATE, [(layout,) for layout in LAYOUTS])
)
def test_divided_optimizer_state(layout, names, tmp_path):
    _check(run(layout, "replicated/state", names, tmp_path), names)


WAYS_OF_STAGES = [((1, 1), "replicated"), ((1, 2), "parameter_server")]


@pytest.mark.parametrize(("layout", "builder", "names"), in_ways(QUICK, WAYS_OF_STAGES))
def test_quick_cases_of_towers_of_stages(layout, builder, names, tmp_path):
    _check(run(layout, builder, names, tmp_path, "whole", 2, 2), names)

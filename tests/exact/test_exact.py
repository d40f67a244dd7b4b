"""The table of exact cases: each case, in several layouts, against plain Keras.

It asks of a case for a model, what `compile` and `fit` get, and the batches; it knows
nothing of how a step is built.
"""

import dataclasses
import functools
import json
import os
import pathlib

import pytest

from tests import hosts, mpi
from tests.exact import (
    block_sparse,
    combinations,
    float64,
    lookups,
    oracle,
    own_steps,
    table,
)
from tests.exact.layouts import Layout
from tests.variants import ALL, number_of, slow
from towers.layers import tables

ROOT = pathlib.Path(__file__).parents[2]
# For scripts/parity_report.py.
FILE = pathlib.Path(os.environ.get("TOWERS_EXACT_FILE", ROOT / ".exact/towers.jsonl"))

UPDATES = SERVER, COPIES, ASYNCHRONOUS = (
    "parameter_server",
    "replicated",
    "asynchronous",
)

# Groups about how several towers cut a batch. `asynchronous` equals one device with one
# tower only.
OF_SEVERAL_TOWERS = "shares", "batches"
# Groups about how weights change. Their cases only train: Keras evaluates their losses
# on the whole batch, as it does those of other groups.
OF_TRAINING = "optimizers", "gradients", "losses"
# Groups about how outputs are put together.
OF_OUTPUTS = "batches", "networks", "shares"
# Groups about values that are computed from outputs, wherever variables and layers are.
# A third of their cases run where towers change.
OF_RESULTS = (
    *("losses", "losses that layers add", "metrics", "metrics of tokens and pixels"),
    *("float64", "masks", "ranks", "tasks"),
)
# Groups about what changes where towers divide the optimizer's state.
OF_STATE = "float8", "gradients", "mixed precision", "optimizers"

# A case's name decides how its variables are updated, so a new case changes nothing for
# the others. A fourth of the cases run with `replicated` in place of
# `parameter_server`, an eighth also with `asynchronous`; a case of block-sparse layers
# has one of the three. All predict by the same code, so only a fourth of the cases
# predict. For the report, all cases run in each way, and predict with
# `parameter_server`.
TURNS = [(SERVER,)] * 8
TURNS[0] = SERVER, ASYNCHRONOUS
TURNS[1] = TURNS[5] = (COPIES,)

# Tracing takes 25 s, 11 s and 6 s. Other cases have these layers, too.
LONG = (
    "models/MobileNetV2, synchronized BatchNormalization",
    "models/MobileNetV2, frozen BatchNormalization",
    "float8/attention",
)

# `make test` runs these cases of each group. The others are variants of them, and slow.
QUICK = {
    "batches": (
        "nested of inputs",
        "sizes (1, 8)",
        "sizes (8, 8, 5), 3 towers",
        "with validation",
    ),
    "block-sparse": ("random, tokens", "used twice, batches of (1, 8)"),
    "float8": ("idle towers, clipping and a loss scale",),
    "float64": ("mean",),
    "gradients": (
        "Embedding used twice",
        "Embedding, gathered",
        "Embedding, global_clipnorm",
        "frozen between two fits",
    ),
    "lookups": ("several tables", "fewer rows than towers, global_clipnorm"),
    "loops": (
        "prefetch=10",
        "steps_per_execution=4, by hand",
        "steps_per_execution=4, unknown length",
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
    "metrics in calls": ("layers",),
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
        "idle towers, a layer that needs examples",
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
        "of the user's, which looks at whole variables",
        "constraint MaxNorm",
        "gradient accumulation and clipping",
        "learning rate set by a callback",
        "loss_scale_factor",
    ),
    "preprocessed": ("examples are turned at random, tower", "validation"),
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


# A combination takes 3 s, and 14 s with XLA; a refusal takes half a second. One of each
# kind runs, the one of the smallest number; for the report, all do.
OF_A_KIND = {
    kind: min(cases, key=number_of) for kind, cases in combinations.BY_KIND.items()
}


def ways(case):
    """Returns the ways to update variables that a case runs with."""
    number = number_of(case)
    one = ((SERVER, COPIES)[number // 8 % 2],)
    if case.group == combinations.GROUP:
        return one if ALL or case in OF_A_KIND.values() else ()
    if case in table.OF_ONE_WAY:
        return one
    turns = TURNS[number % len(TURNS)]
    if ALL:
        turns = UPDATES
    elif case.group == block_sparse.GROUP:
        turns = (UPDATES[number // 3 % len(UPDATES)],)
    several = case.group in OF_SEVERAL_TOWERS
    return [way for way in turns if not (way == ASYNCHRONOUS and several)]


def is_slow(case):
    """Tells whether only `make test-slow` runs a case."""
    if case.group == combinations.GROUP:
        return not any(case is OF_A_KIND[kind] for kind in QUICK_KINDS)
    return case.name not in QUICK.get(case.group, ())


def later(case, way):
    """Returns the methods that are looked at besides training."""
    if case in table.OF_ONE_WAY:
        return oracle.LATER
    if way == ASYNCHRONOUS or (ALL and way != SERVER):
        return ()
    if ALL:
        return oracle.LATER
    if case.group in OF_TRAINING:
        return ()
    predicts = case.group in OF_OUTPUTS or number_of(case) // len(TURNS) % 4 == 0
    return oracle.LATER if predicts else ("evaluate",)


CASES = {str(case): case for case in table.ALL}
# The names of the cases that `make test-oldest` runs.
OF_EACH_GROUP = {
    case.group: str(case)
    for case in sorted(table.OF_KERAS_STEPS, key=number_of)
    if ways(case) and not is_slow(case)
}
# The cases that do not take long.
SHORT = [case for case in table.OF_KERAS_STEPS if str(case) not in LONG]


def row(case, layout, is_quick, marks=()):
    """Returns parameters of a test."""
    name = f"{case}-{layout}"
    if is_quick:
        return pytest.param(case, layout, id=name, marks=marks)
    return slow(case, layout, id=name)


def check(record):
    # As text, which pytest shows whole.
    assert record["verdict"] == record["expected"], str(record)


def oldest_marks(case):
    """Returns the mark of what `make test-oldest` runs, for a case of each group."""
    return [pytest.mark.oldest] if str(case) in OF_EACH_GROUP.values() else []


# The ways of a case follow one another, mostly in one process, so that one device
# computes it once.
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(case, Layout(way), not is_slow(case), marks=oldest_marks(case))
        for case in [*table.OF_KERAS_STEPS, *combinations.CASES]
        for way in ways(case)
    ],
)
def test_towers(case, layout):
    record = layout.outcome(case, later=later(case, layout.update))
    _append(record)
    check(record)


def _append(record):
    FILE.parent.mkdir(parents=True, exist_ok=True)
    # One write of a line, so that those of several processes do not mix.
    with FILE.open("ab", buffering=0) as file:
        file.write(f"{json.dumps(record)}\n".encode())


def test_named_cases_exist():
    assert {*QUICK_KINDS} <= OF_A_KIND.keys()
    for group, names in QUICK.items():
        assert {*names} <= {case.name for case in CASES.values() if case.group == group}
    named = {*LONG, *QUICK_STATE, *WITH_STAGES, *QUICK_STEPS, *QUICK_PUBLISHED}
    named |= {*OFTEN, *WITH_SHARDED_STATE, *WITH_PARTS, *TABLES, *FURTHER_SHARDED}
    assert named <= CASES.keys()


@pytest.mark.parametrize(
    "group", dict.fromkeys(case.group for case in table.OF_KERAS_STEPS)
)
def test_some_of_each_group_are_quick(group):
    assert group in OF_EACH_GROUP


# Towers change before each call of training. Cases with a reference are left out: it
# depends on the number of towers.
@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(
            case,
            Layout((SERVER, COPIES)[number_of(case) // 3 % 2], resized=True),
            not is_slow(case) and number_of(case) % 4 == 0,
        )
        for case in SHORT
        if case.group not in OF_RESULTS or number_of(case) % 3 == 0
        if case.verdict == "equal"
        and case.towers > 1
        and case.reference is None
        and "split_ratios" not in case.options
    ],
)
def test_towers_that_change(case, layout):
    check(layout.outcome(case, later=("evaluate",)))


# Where towers change, what else is kept for each of them.
RESIZED = [
    Layout(COPIES, resized=True, shard_optimizer_state=True),
    Layout(SERVER, resized=True, options=(("prefetch", 3),)),
    Layout(COPIES, resized=True, options=(("prefetch", 1),)),
    Layout(COPIES, resized=True, nccl=True),
    Layout("auto", resized=True, options=(("prefetch", 2),)),
    Layout(SERVER, resized=True, options=(("check_numerics", True),)),
    Layout(SERVER, resized=True, options=(("device", "gpu"),)),
    Layout(SERVER, resized=True, options=(("cpu_merge", False),)),
    Layout(SERVER, stages=2, micro_batches=2, resized=True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(CASES[name], layout, True)
        for name, layouts in {
            "loops/with validation": RESIZED,
            "published steps/gradient centralization": [Layout(resized=True)],
        }.items()
        for layout in layouts
    ],
)
def test_what_towers_that_change_keep(case, layout):
    check(layout.outcome(case))


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

# Tables over towers: each way to cut them, with each way to update variables.
CUTS = "rows", "columns"
IN_SHARDS = [
    Layout(way, shard_embeddings=cut) for way in (SERVER, COPIES) for cut in CUTS
]
# What else there is to do with a table: another home, other ways to carry values, the
# towers' stages.
ELSEWHERE = ("packed", True), ("device", "/device:CPU:3")
BESIDE = [
    Layout(options=(("packed", True),)),
    Layout(options=(("cpu_merge", False),)),
    Layout(options=ELSEWHERE),
    *[Layout(shard_embeddings=cut, options=ELSEWHERE) for cut in CUTS],
    *[
        Layout(shard_embeddings=cut, options=(("check_numerics", True),))
        for cut in CUTS
    ],
    *[Layout(way, shard_embeddings="auto") for way in (SERVER, COPIES)],
    *[
        Layout(way, (2,), 2, 2, shard_embeddings=cut, options=options)
        for way in (SERVER, COPIES)
        for cut in (*CUTS, "auto")
        for options in ((), (("placement", "auto"),))
    ],
]
QUICK_SHARDS = {
    "lookups/fewer rows than towers, accumulation": IN_SHARDS[3],
    "lookups/fewer rows than towers, clipnorm": IN_SHARDS[0],
    "lookups/fewer rows than towers, global_clipnorm": IN_SHARDS[2],
}


def shards_of(case):
    """Returns the layouts of a case with tables."""
    if str(case) == "lookups/several tables":
        return [*IN_SHARDS, *BESIDE]
    if case.group == "lookups":
        return IN_SHARDS
    return [IN_SHARDS[number_of(case) % len(IN_SHARDS)]]


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(case, layout, QUICK_SHARDS.get(str(case)) == layout)
        for case in CASES.values()
        if case.group == "lookups" or str(case) in TABLES
        for layout in shards_of(case)
    ],
)
def test_tables_in_shards(case, layout, monkeypatch):
    # With "auto", a small table would be whole.
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)
    check(layout.outcome(case))


SHARDED = functools.partial(Layout, COPIES, shard_optimizer_state=True)
# Tables have shards of their own, and stages owners of their own.
FURTHER_SHARDED = {
    "gradients/two Embeddings, accumulated, EMA and clipvalue": (
        SHARDED(shard_embeddings="rows"),
        SHARDED(shard_embeddings="columns"),
    ),
    "gradients/two Embeddings, loss scale, decay and clipping": (
        SHARDED(shard_embeddings="rows"),
        SHARDED(shard_embeddings="columns"),
    ),
    "gradients/None for most numbers, an optimizer of all kinds": (
        SHARDED((2,), 2),
        SHARDED((2,), 2, 2),
    ),
}
QUICK_STATE = (
    "float8/idle towers, clipping and a loss scale",
    "gradients/Embedding, global_clipnorm",
    "mixed precision/mixed_float16, overflow on the second tower",
    "optimizers/Adam",
    "optimizers/Muon",
    "optimizers/gradient accumulation and clipping",
)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *[
            row(case, SHARDED(), str(case) in QUICK_STATE)
            for case in SHORT
            if case.group in OF_STATE
        ],
        *[
            row(CASES[name], layout, False)
            for name, layouts in FURTHER_SHARDED.items()
            for layout in layouts
        ],
    ],
)
def test_optimizer_state_of_which_each_tower_has_a_part(case, layout):
    check(layout.outcome(case, later=()))


STAGES = [
    Layout(SERVER, (1,), 2),
    Layout(SERVER, (1,), 2, 2),
    Layout(COPIES, (2,), 2, 2),
    Layout(SERVER, (1,), 2, 5, "gpipe"),
    Layout(SERVER, (1,), 4, 2, "1f1b", "stage"),
    Layout(SERVER, (1,), 4, 5, "gpipe", "layer"),
    Layout(SERVER, (2,), 2, 5, "gpipe", "stage"),
    Layout(COPIES, (2,), 1, 2, "1f1b", "layer"),
]
# A layer that is called on two stages, rows of a table that travel and the norm of all
# gradients, losses that see all outputs or none of them, more micro-batches than rows,
# a weight decay that waits for no gradient.
WITH_STAGES = {
    "models/functional, shared layer": 1,
    "gradients/Embedding, global_clipnorm": 4,
    "losses/function, pairwise ranking": 2,
    "losses/compute_loss overridden, CallsAgain": 1,
    "batches/sizes (1, 8)": 3,
    "lookups/fewer rows than towers, weight decay": 1,
}


def stages_of(case):
    """Returns the layouts of a case, and whether each is quick.

    A quick case has three of them, another one has one.
    """
    first, named = number_of(case) // 7, WITH_STAGES.get(str(case))
    numbers = [(first + k) % len(STAGES) for k in range(1 if is_slow(case) else 3)]
    if named is not None:
        numbers.append(named)
    return {STAGES[k]: k == named for k in numbers}


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(case, layout, is_quick)
        for case in table.OF_KERAS_STEPS
        # Half of the cases of one way, as these are about values.
        if case not in table.OF_ONE_WAY or number_of(case) % 2 == 0
        for layout, is_quick in stages_of(case).items()
    ],
)
def test_stages(case, layout):
    check(layout.outcome(case))


# All parameters, however small, are in parts on several devices.
PARTS = functools.partial(Layout, "sharded")
SMALL = ("min_bytes", 1)
PARAMETERS_IN_PARTS = [
    PARTS(options=(SMALL,)),
    PARTS(towers=(2,), micro_batches=2, options=(SMALL,)),
    PARTS(towers=(2,), micro_batches=2, recompute="layer", options=(SMALL,)),
    PARTS(towers=(2,), stages=2, micro_batches=2, options=(SMALL,)),
    PARTS(resized=True, options=(SMALL,)),
    PARTS(options=(SMALL, ("packed", True))),
    PARTS(options=(SMALL, ("check_numerics", True))),
    PARTS(compiled_first=True, options=(SMALL,)),
]


def layout_in_parts(case):
    """Returns the layout in which a case runs; a few go with neither of some.

    A case of one tower equals one device on that tower alone.
    """
    number = number_of(case) // 5
    layout = PARAMETERS_IN_PARTS[number % len(PARAMETERS_IN_PARTS)]
    plain = case.reference is not None or "split_ratios" in case.options
    plain |= case.towers == 1 or case.verdict != "equal"
    return PARAMETERS_IN_PARTS[0] if plain else layout


@pytest.mark.quick_one_in(5)
@pytest.mark.parametrize(
    ("case", "layout"),
    [row(case, layout_in_parts(case), not is_slow(case)) for case in SHORT],
)
def test_parameters_in_parts(case, layout):
    check(layout.outcome(case, later=("evaluate",)))


# A gradient of a gradient, and a condition.
QUICK_STEPS = "own steps/maml", "own steps/accumulate"
QUICK_PUBLISHED = (
    "published steps/DCGAN",
    "published steps/gradient centralization",
    "published steps/Siamese network",
)


def layouts_of_step(case):
    """Returns the layouts of a case whose model defines its step, and whether quick."""
    name = str(case)
    if case.group == float64.GROUP:
        return {Layout(towers=(3,)): False, Layout(COPIES, (3,)): False}
    if case.group == own_steps.PUBLISHED:
        first, quick = Layout(towers=(3,)), name in QUICK_PUBLISHED
        return {first: quick, Layout(towers=(2,), compiled_first=True): quick}
    quick = name in QUICK_STEPS
    layouts = {
        Layout(towers=(2,)): name == "own steps/maml",
        Layout(towers=(3,)): name == "own steps/accumulate",
        Layout(COPIES, (2,), options=(("all_reduce", "ring"),)): quick,
        Layout(COPIES, (3,), options=(("all_reduce", "device"),)): quick,
        Layout(COPIES, (3,), nccl=True): quick,
        Layout(ASYNCHRONOUS, (1,)): quick,
        # Where home is on another GPU, values travel in one piece.
        Layout(ASYNCHRONOUS, (1,), options=(("packed", True),)): quick,
    }
    if case.name != "simclr":
        # It compares pairs, so the numbers of parts are others.
        own = Layout(towers=(3,), options=(("loss_placement", "tower"),))
        layouts[own] = name == "own steps/accumulate"
    return layouts


@pytest.mark.quick_one_in(5)
@pytest.mark.parametrize(
    ("case", "layout"),
    [
        row(case, layout, is_quick)
        for case in table.OWN_STEPS
        for layout, is_quick in layouts_of_step(case).items()
    ],
)
def test_own_steps(case, layout):
    check(layout.outcome(case))


# What each host has: one tower each, two each, and one beside two.
HOSTS = (1, 1), (2, 2), (1, 2)
# Rows and values of a table travel; a loss has to see all outputs; a host has no rows;
# a state has to be that of all; nothing is traced.
OFTEN = (
    "batches/sizes (1, 8)",
    "gradients/Embedding, global_clipnorm",
    "losses/function, pairwise ranking",
    "state/moving mean",
)
# A norm is that of all shards; a scale has to be that of all hosts.
WITH_SHARDED_STATE = (
    *OFTEN,
    "float8/idle towers, clipping and a loss scale",
    "mixed precision/mixed_float16, overflow on the second tower",
    "optimizers/EMA, overwrite",
    "optimizers/Muon",
    "optimizers/gradient accumulation and clipping",
)
# Each host has all parts; one may have a single tower.
WITH_PARTS = (
    *OFTEN,
    "losses that layers add/mean and sum",
    "mixed precision/mixed_float16, overflow on the second tower",
    "optimizers/EMA, overwrite",
    "optimizers/Muon",
)
# Rows that hosts divide; each of them has some that the other looks up.
CHOSEN_ROWS = [str(case) for case in lookups.CASES if "rows" in case.name]


def is_for_hosts(case):
    """Tells whether a case runs on hosts: the quick ones, and a third of all others.

    Hosts add up what their towers have added up, whatever it is. They refuse ragged
    and sparse batches of which each has its own rows, as these cannot be sent.
    """
    if "ragged" in case.name or "sparse inputs" in case.name:
        return False
    if case.group == combinations.GROUP:
        return case in OF_A_KIND.values()
    return not is_slow(case) or number_of(case) % 3 == 0


def parts(layouts, cases, of_a_layout):
    """Divides cases among layouts, by their names, and those of each into parts.

    A test of a part starts the hosts once for all of its cases.
    """
    names = {(layout, part): [] for layout in layouts for part in range(of_a_layout)}
    for name in map(str, cases):
        number = number_of(name)
        layout = layouts[number // of_a_layout % len(layouts)]
        names[layout, number % of_a_layout].append(name)
    return [
        slow(layout, some, id=f"{layout}, part {part}")
        for (layout, part), some in names.items()
        if some
    ]


def run_on_hosts(layout, names, folder, by_mpi=False):
    """Runs cases on hosts, each a process, and checks their records."""
    file, listed = folder / "records.jsonl", folder / "names.txt"
    listed.write_text("\n".join(names))
    fields = dataclasses.asdict(layout)
    counts = fields.pop("towers")
    if by_mpi:
        joined = ",".join(map(str, counts))
        flags = *("mpi", "mpi", joined), json.dumps(fields), listed, file
        mpi.run(len(counts), "-m", "tests.exact.on_hosts", *flags)
    else:
        hosts.run("tests.exact.on_hosts", counts, json.dumps(fields), listed, file)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [f"{one['group']}/{one['case']}" for one in records] == [*names]
    for record in records:
        check(record)


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(SERVER, (1, 2), shard_embeddings="rows"), OFTEN[:2]),
        (Layout(COPIES, (1, 2), nccl=True), OFTEN),
        *parts(
            [Layout(COPIES, towers, nccl=True) for towers in HOSTS],
            [case for case in table.ALL if is_for_hosts(case) and not is_slow(case)],
            5,
        ),
        (
            Layout(COPIES, (1, 2)),
            (
                "networks/embedding, validation",
                "gradients/Embedding, momentum, fewer examples than towers",
                "loops/steps_per_execution=4, run_eagerly, by hand",
            ),
        ),
        slow(Layout(SERVER, (1, 2)), ("own steps/accumulate",)),
        # A gradient that is read by itself has an operation for each shard.
        (
            Layout(COPIES, (2, 1), shard_embeddings="columns"),
            ("gradients/Embedding, gathered",),
        ),
        *[
            slow(layout, ("gradients/Embedding, gathered",))
            for layout in [
                Layout(SERVER, (3, 2), shard_embeddings="columns"),
                Layout(SERVER, (2, 1), 1, 2, shard_embeddings="rows"),
                Layout(COPIES, (1, 2), 2, 2, shard_embeddings="rows"),
            ]
        ],
        *parts(
            [Layout(way, towers) for way in (SERVER, COPIES) for towers in HOSTS],
            [*filter(is_for_hosts, table.ALL)],
            5,
        ),
        *parts(
            [Layout(COPIES, towers, shard_optimizer_state=True) for towers in HOSTS],
            [case for case in CASES.values() if case.group in OF_STATE],
            5,
        ),
        *[
            slow(Layout(COPIES, towers, shard_optimizer_state=True), WITH_SHARDED_STATE)
            for towers in HOSTS
        ],
        *[slow(PARTS(towers=towers, options=(SMALL,)), WITH_PARTS) for towers in HOSTS],
        *[
            slow(Layout(way, towers, shard_embeddings=cut), TABLES)
            for towers, way, cut in [
                ((1, 1), SERVER, "rows"),
                ((1, 1), COPIES, "auto"),
                ((1, 2), SERVER, "rows"),
                ((1, 2), COPIES, "rows"),
                ((2, 1), COPIES, "columns"),
                ((2, 2), SERVER, "rows"),
                ((2, 2), COPIES, "columns"),
                ((2, 2), COPIES, "rows"),
            ]
        ],
        *[
            slow(
                Layout(way, towers, **of_each), CHOSEN_ROWS, id=f"{way}, {towers}, rows"
            )
            for way, of_each in {
                SERVER: {"shard_embeddings": "rows"},
                COPIES: {"shard_embeddings": "rows", "shard_optimizer_state": True},
            }.items()
            for towers in ((1, 1), (1, 2))
        ],
        *parts(
            [Layout(COPIES, (1, 1), 2, 2), Layout(SERVER, (1, 2), 2, 2)],
            [case for case in table.OF_KERAS_STEPS if not is_slow(case)],
            5,
        ),
        # Of the last, the first host has no copies.
        *[
            slow(layout, OFTEN)
            for layout in [
                Layout(SERVER, (1, 1), 2, 2),
                Layout(COPIES, (1, 1), 2, 2),
                Layout(COPIES, (1, 1), 2, 2, shard_optimizer_state=True),
                Layout(COPIES, (1, 2), 2, 2),
                Layout(SERVER, (1, 2), micro_batches=2),
            ]
        ],
    ],
    ids=str,
)
def test_hosts(layout, names, tmp_path):
    run_on_hosts(layout, names, tmp_path)


@mpi.NEEDED
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(SERVER, (1, 2)), OFTEN),
        *parts(
            [Layout(way, towers) for way in (SERVER, COPIES) for towers in HOSTS],
            [case for case in table.ALL if is_for_hosts(case) and not is_slow(case)],
            5,
        ),
        *[
            slow(Layout(COPIES, towers, shard_optimizer_state=True), WITH_SHARDED_STATE)
            for towers in HOSTS
        ],
        slow(PARTS(towers=(1, 2), options=(SMALL,)), WITH_PARTS),
        slow(Layout(SERVER, (1, 2), shard_embeddings="rows"), TABLES),
        slow(Layout(COPIES, (2, 2), shard_embeddings="columns"), TABLES),
    ],
    ids=str,
)
def test_hosts_of_mpi(layout, names, tmp_path):
    run_on_hosts(layout, names, tmp_path, by_mpi=True)

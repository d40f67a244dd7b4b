"""Ways to update race on the run's batches; a first call falls back from XLA."""

import functools
import itertools
import json
import weakref
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import as_on_gpu
from tests.variants import slow
from towers import Auto, multi_gpu_model
from towers.builders.builder import Builder
from towers.builders.strategies import STRATEGIES
from towers.collectives import reduce
from towers.collectives.world import Alone
from towers.hosts.group import SignalReceived
from towers.loop import loop
from towers.model import auto, program
from towers.model.auto import Choice
from towers.model.first_calls import ReplayableBatches
from towers.model.tower_model import TowerModel

pytestmark = pytest.mark.quick_one_in(2)

SERVER, COPIES = Choice(), Choice("replicated", "ring")
HOME_XLA = SERVER._replace(xla=True)
TOWERS = ["/device:CPU:0", "/device:CPU:1"]


def race(seconds, starts=(), steps=1, start_s=0.0, turns=None, rounds=None, **options):
    """Races ways that take so many seconds a call, or fail with a message.

    Args:
        seconds: Maps each way to the seconds of a call, to a function that returns
            them, or to the message of its failure.
        starts: Maps ways to the additional seconds of their start.
        turns: A list to which each way is added that makes a call.
        rounds: See `Contest`; set as the first candidate has started.
    """
    contest = auto.Contest([*seconds], start_s, **options)
    started = {next(iter(seconds))}
    while (way := contest.turn) is not None:
        if turns is not None:
            turns.append(way)
        taken = seconds[way]
        if way in started:
            contest.took(taken() if callable(taken) else taken)
            continue
        started.add(way)
        assert contest.candidate == way
        if rounds is not None:
            contest.rounds = rounds
        if isinstance(taken, str):
            contest.failed(taken)
        else:
            taken = taken() if callable(taken) else taken
            contest.took(taken + (starts[way] if starts else 0.0))
    assert contest.candidate is None
    return contest.trials(steps)


def test_the_fastest_is_chosen():
    trials = race({SERVER: 0.02, COPIES: 0.01})
    assert [trial.choice for trial in trials] == [COPIES, SERVER]
    assert trials[0].step_s == pytest.approx(0.01)
    assert race({SERVER: 0.02, COPIES: 0.01}, steps=10)[0].step_s == (
        pytest.approx(0.001)
    )


def test_what_is_hardly_faster_is_not_chosen():
    assert race({SERVER: 0.01, COPIES: 0.0095})[0].choice == SERVER


def test_what_would_take_too_long_is_not_tried():
    compiled = COPIES._replace(xla=True)
    seconds = {SERVER: 0.01, COPIES: 0.01, compiled: 0.01}
    starts = {COPIES: 2.0, compiled: 9.0}
    trials = race(seconds, starts, start_s=2.0)
    assert [bool(trial.step_s) for trial in trials] == [True, True, False]
    assert "too long" in trials[2].why
    slow = race(seconds, starts, start_s=11.0)
    assert [trial.step_s for trial in slow] == [None] * 3
    # Nor is anything if a call is long, however short the start.
    slow = race(dict.fromkeys(seconds, 3.0), start_s=3.0)
    assert [trial.step_s for trial in slow] == [None] * 3


def test_a_short_run_tries_little():
    seconds = {SERVER: 0.1, COPIES: 0.1}
    # A tenth of the run is less than a start and a race: 2 + 5 * 0.1 seconds.
    for calls, tried in ((200, False), (300, True)):
        trials = race(seconds, {COPIES: 2.0}, start_s=2.0, calls=calls)
        assert bool(trials[1].step_s) == tried


def test_a_long_run_on_cpus_has_a_limit():
    # Each start takes 50 s, and 2% of the run would be hours.
    seconds = dict.fromkeys(
        [SERVER, COPIES, Choice("replicated", "cpu"), HOME_XLA], 1.0
    )
    starts = dict.fromkeys(seconds, 50.0)
    options = {"start_s": 50.0, "calls": 100_000_000}
    trials = race(seconds, starts, most_s=auto.ON_CPUS_S, **options)
    assert [bool(trial.step_s) for trial in trials] == [True, True, True, False]
    assert all(trial.step_s for trial in race(seconds, starts, **options))


def test_what_did_not_fit_may_do_so_once_a_start_is_measured():
    compiled = COPIES._replace(xla=True)
    seconds = {SERVER: 0.01, compiled: 0.01, COPIES: 0.01}
    # Compiling is expected to take 15 s at first, and then 2.5 s.
    starts = {compiled: 2.0, COPIES: 0.5}
    assert all(t.step_s for t in race(seconds, starts, start_s=3.0))
    # It has taken 8 s, so the next one would, too.
    seconds |= {HOME_XLA: 0.01}
    starts |= {compiled: 8.0, HOME_XLA: 0.0}
    last = race(seconds, starts, start_s=1.5)[-1]
    assert last == auto.CandidateTrial(HOME_XLA, None, last.why)


def test_slower_calls_of_a_candidate_use_up_the_time():
    host = COPIES._replace(all_reduce_alg="cpu")
    # Three rounds with a call each lose 3 * 2.5 s of 10 s.
    seconds = {SERVER: 0.5, COPIES: 3.0, host: 0.5}
    trials = race(seconds, dict.fromkeys(seconds, 0.1), start_s=0.1)
    assert [bool(trial.step_s) for trial in trials] == [True, True, False]
    seconds[COPIES] = 1.0
    assert all(
        t.step_s for t in race(seconds, dict.fromkeys(seconds, 0.1), start_s=0.1)
    )


def test_each_is_compared_with_the_best_so_far():
    host = COPIES._replace(all_reduce_alg="cpu")
    turns = []
    trials = race({SERVER: 0.06, COPIES: 0.03, host: 0.045}, start_s=0.5, turns=turns)
    # A block of the best, the start of a candidate, and blocks of both in turn.
    first_race = [SERVER, COPIES, COPIES, COPIES]
    assert turns[:4] == first_race
    assert turns[4:16] == 4 * [SERVER, COPIES, COPIES]
    # The candidate has become the best. The next one loses after three rounds.
    assert turns[16:] == [
        COPIES,
        COPIES,
        host,
        *2 * [host, host, COPIES, COPIES],
        host,
        host,
    ]
    assert [(trial.choice, round(trial.step_s, 3)) for trial in trials] == [
        (COPIES, 0.03),
        (host, 0.045),
        (SERVER, 0.06),
    ]


def test_with_one_round_each_way_starts_once():
    turns, slow = [], {SERVER: 0.02, COPIES: 0.03}
    assert race(slow, turns=turns, rounds=1)[0].choice == SERVER
    # The time of the best is from before the start: three calls until it was 50 ms.
    assert turns == 3 * [SERVER] + [COPIES] + 5 * [COPIES]


def test_calls_without_a_time_are_not_counted():
    contest, turns = auto.Contest([SERVER, COPIES], 0.1), []
    # A block of the best, the start of the candidate, and a block of it.
    for seconds in (None, 0.06, 0.1, None, None, 0.06):
        turns.append(contest.turn)
        contest.took(seconds)
    assert turns == 2 * [SERVER] + 4 * [COPIES]
    assert contest.turn == SERVER


def test_a_machine_that_slows_down_favours_none():
    now_s = 0.0

    def slowing(seconds):
        def taken():
            nonlocal now_s
            # Each second everything takes twice as long.
            step_s = seconds * 2**now_s
            now_s += step_s
            return step_s

        return taken

    trials = race({SERVER: slowing(0.02), COPIES: slowing(0.016)}, start_s=0.5)
    assert trials[0].choice == COPIES


def test_what_fails_is_passed_over():
    host = COPIES._replace(all_reduce_alg="cpu")
    trials = race({SERVER: 0.02, COPIES: "no", host: 0.01})
    assert [trial.choice for trial in trials] == [host, SERVER, COPIES]
    assert trials[2] == auto.CandidateTrial(COPIES, None, "it fails: no")


def test_a_line_says_what_was_chosen_and_why():
    updating = "Updating variables by"
    for seconds, said in (
        (0.019, f"{updating} parameter_server: 20 ms a step, as none is 10% faster."),
        (0.021, f"{updating} parameter_server: 20 ms a step, the fastest of 2 ways."),
        (0.01, f"{updating} {COPIES}: 10 ms a step, the fastest of 2 ways."),
    ):
        assert auto.lines(race({SERVER: 0.02, COPIES: seconds})) == [said]


def test_what_fails_has_a_line():
    host = COPIES._replace(all_reduce_alg="cpu")
    trials = race({SERVER: 0.02, COPIES: "no", host: 0.03})
    assert auto.lines(trials)[1:] == [
        "replicated (ring) is left out, as it fails: no",
    ]


def test_what_would_take_too_long_is_counted():
    ways = auto.candidates(TOWERS, False, None, synchronized=False)
    slow = [auto.CandidateTrial(way, None, auto._TOO_LONG) for way in ways]
    assert auto.lines(slow) == [
        "Updating variables by parameter_server: measuring "
        f"{len(ways) - 1} other ways would take too long."
    ]
    measured = [auto.CandidateTrial(ways[0], 0.02), *slow[1:]]
    assert auto.lines(measured) == [
        "Updating variables by parameter_server: 20 ms a step."
    ]
    alone = auto.CandidateTrial(ways[0], None, "nothing to compare it with")
    assert auto.lines([alone]) == ["Updating variables by parameter_server."]


@pytest.mark.parametrize("faster_s", [11.9, 20.0])
def test_the_line_fits_100_characters(faster_s):
    longest = Choice("replicated", "device", xla=True)
    trials = [
        auto.CandidateTrial(longest, 12.3456),
        auto.CandidateTrial(Choice(), faster_s),
    ]
    fails = auto.CandidateTrial(longest, None, f"it fails: {'word ' * 12}")
    for line in auto.lines([*trials, fails]):
        assert len(f"towers: {line}") <= 100


@pytest.mark.parametrize(
    ("towers", "nccl", "xla", "names"),
    [
        (["/device:CPU:0"], False, False, ["parameter_server"]),
        (
            TOWERS,
            False,
            True,
            [
                f"{name} with XLA"
                for name in (
                    "parameter_server",
                    "replicated (cpu)",
                    "replicated (ring)",
                )
            ],
        ),
        (
            ["/device:GPU:0", "/device:GPU:1"],
            True,
            False,
            ["replicated (nccl)", "parameter_server"]
            + [f"replicated ({name})" for name in ("device", "ring")],
        ),
    ],
)
def test_candidates(towers, nccl, xla, names):
    found = auto.candidates(towers, nccl, xla, synchronized=False)
    assert list(map(str, found)) == names


def test_xla_is_a_candidate_where_the_user_leaves_it_open():
    found = auto.candidates(TOWERS, False, None, synchronized=False)
    assert [way.xla for way in found] == [False] * 3 + [True] * 3
    assert not any(w.xla for w in auto.candidates(TOWERS, False, None, True))


def test_of_a_way_that_is_told_only_xla_is_left_open():
    for towers in (TOWERS, ["/device:GPU:0", "/device:GPU:1"]):
        ways = functools.partial(auto.candidates, towers, True, told=COPIES)
        assert ways(None, False) == [COPIES, COPIES._replace(xla=True)]
        assert ways(False, False) == [COPIES]
        assert ways(True, False) == [COPIES._replace(xla=True)]
        assert ways(None, True) == ways(None, False, in_stages=True) == [COPIES]


def test_on_gpus_the_likeliest_come_first():
    gpus = [f"/device:GPU:{i}" for i in range(8)]

    def names(*arguments, **options):
        return [*map(str, auto.candidates(*arguments, **options))]

    assert names(gpus, True, None, False)[:5] == [
        "replicated (nccl)",
        "replicated (nccl) with XLA",
        "parameter_server",
        "replicated (device)",
        "replicated (ring)",
    ]
    assert names(gpus, False, None, False)[:3] == [
        "replicated (device)",
        "replicated (device) with XLA",
        "parameter_server",
    ]
    assert names(gpus[:1], False, None, False) == [
        "parameter_server",
        "parameter_server with XLA",
    ]
    # Other hosts may have GPUs, too.
    across_hosts = names(gpus[:1], True, False, False, across_hosts=True)
    assert across_hosts == ["replicated (nccl)", "parameter_server"]
    # Variables that have been put elsewhere stay there.
    assert names(gpus, True, None, False, stays=True) == names(
        gpus[:1], False, None, False
    )
    assert names(TOWERS, False, False, False, stays=True) == ["parameter_server"]


def test_a_choice_is_remembered_for_what_it_was_made_for(tmp_path):
    file = str(tmp_path / "below" / "choice.json")
    ways = [SERVER, COPIES]
    auto.remember(file, {"a": 1}, race({SERVER: 3.0, COPIES: 3.0}, start_s=3.0))
    assert auto.recall(file, {"a": 1}, ways) is None
    auto.remember(file, {"a": 1}, race({SERVER: 0.02, COPIES: 0.01}))
    assert auto.recall(file, {"a": 1}, ways) == COPIES
    assert auto.recall(file, {"a": 2}, ways) is None
    assert auto.recall(file, {"a": 1}, [SERVER]) is None
    nonsense = '{"for": {"a": 1}, "chosen": {"variable_update": "nonsense"}}'
    for text in ("{", nonsense, "[]"):
        Path(file).write_text(text)
        assert auto.recall(file, {"a": 1}, ways) is None
    auto.remember(None, {}, [])
    assert auto.recall(None, {}, ways) is None


def test_a_bare_file_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    auto.remember("choice.json", 1, race({SERVER: 0.02, COPIES: 0.01}))
    assert auto.recall("choice.json", 1, [COPIES]) == COPIES


# Figure 4 of issue 18: what is tried, and what that takes.

# On made-up GPUs, a candidate is started in 0.4 of what the first call takes, which
# also loads libraries; one that XLA compiles in 0.9. A step of 0.2 s takes so much.
_STARTS_S = {False: 0.4, True: 0.9}
_STEPS = {
    2: {"nccl": 1.0, "server": 1.1, "device": 1.05, "ring": 1.02},
    8: {"nccl": 1.0, "server": 1.9, "device": 1.6, "ring": 1.1},
}
_XLA_STEP = 0.8
_MINUTES, _HOURS = 600.0, 36000.0


def _trying(first_s, run_s, gpus):
    """Returns the ways tried in turn, the choice, and the seconds that this takes."""
    step_s, turns = 0.2, []

    def seconds(way):
        name = "server" if way.variable_update == "parameter_server" else None
        plain_s = step_s * _STEPS[gpus][name or way.all_reduce_alg]
        return plain_s * (_XLA_STEP if way.xla else 1)

    towers = [f"/device:GPU:{i}" for i in range(gpus)]
    ways = auto.candidates(towers, True, None, synchronized=False)
    starts = {way: _STARTS_S[way.xla] * first_s for way in ways}
    trials = race(
        {way: seconds(way) for way in ways},
        starts,
        start_s=first_s,
        turns=turns,
        calls=round(run_s / step_s),
    )
    tried = [way for way in dict.fromkeys(turns) if way != ways[0]]
    # The calls train the model, so only starts and the time of slower ways are lost.
    lost_s = sum(starts[way] for way in tried)
    lost_s += sum(max(seconds(way) - step_s, 0.0) for way in turns)
    return [*map(str, tried)], str(trials[0].choice), lost_s


_FIRST, _COMPILED = "replicated (nccl)", "replicated (nccl) with XLA"
_PLAIN = ["parameter_server", "replicated (device)", "replicated (ring)"]
_ALL = [_COMPILED, *_PLAIN, *(f"{name} with XLA" for name in _PLAIN)]


@pytest.mark.parametrize("gpus", [2, 8])
@pytest.mark.parametrize(
    ("first_s", "run_s", "tried", "taken", "percent"),
    [
        # Of ten minutes, 12 s may be spent: another start may take as much.
        (12, _MINUTES, [], _FIRST, 0),
        (60, _MINUTES, [], _FIRST, 0),
        (300, _MINUTES, [], _FIRST, 0),
        # Of ten hours, 12 minutes.
        (12, _HOURS, _ALL, _COMPILED, 0.16),
        (60, _HOURS, _ALL, _COMPILED, 0.85),
        # Five times a measured start of 120 s is too much by a little.
        (300, _HOURS, _PLAIN, _FIRST, 1.02),
    ],
)
def test_what_is_tried_on_gpus(first_s, run_s, gpus, tried, taken, percent):
    found, chosen, seconds = _trying(first_s, run_s, gpus)
    assert (found, chosen) == (tried, taken)
    assert 100 * seconds / run_s == pytest.approx(percent, rel=0.1)
    assert seconds <= max(auto.BUDGET_S, auto.BUDGET * run_s)


# The whole, through `fit`.


def _data(rows=44):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, random.integers(0, 3, rows)


class Bessel(keras.layers.Layer):
    """Does what XLA cannot, to each example by itself: so towers are to compile it."""

    def call(self, x):
        return x + 0 * tf.math.special.bessel_j0(x)


def _batches():
    return tf.data.Dataset.from_tensor_slices(_data()).batch(8)


def _sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def _stateful():
    """Layers with all kinds of variables."""
    return (
        keras.layers.Dense(8, use_bias=False),  # normalised away
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
    )


def _no_more():
    """No layers but the one that each model has."""
    return ()


def _fit(builder, steps=1, layers=_stateful, where="/device:CPU:0", **options):
    keras.utils.set_random_seed(3)
    with tf.device(where):
        model = keras.Sequential([keras.Input((6,)), *layers(), keras.layers.Dense(3)])
    compiled = {key: options.pop(key) for key in ("jit_compile",) if key in options}
    options = {"gpus": 2} | options
    parallel = multi_gpu_model(model, variable_update=builder, **options)
    parallel.compile(
        _sgd(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=steps,
        **({"jit_compile": False} | compiled),
    )
    history = parallel.fit(_batches(), epochs=3, verbose=0).history
    variables = [*model.variables, *model.optimizer.variables]
    return parallel, history, [v.numpy() for v in variables]


@functools.cache
def _expected(steps, layers=_stateful):
    """What is made without trying: a history, and variables."""
    return _fit("parameter_server", steps, layers)[1:]


def _prefer(monkeypatch, preferred, tried=2):
    """Lets one way race against others, and finds it faster.

    Args:
        preferred: Returns whether a way is preferred; the first such way races.
        tried: Number of ways that race.

    Returns:
        A list of the ways that there were to choose from, filled by the race.
    """
    asked = []

    class Preferring(auto.Contest):
        def __init__(self, choices, *arguments, **options):
            asked.extend(choices)
            best = next(filter(preferred, choices), choices[0])
            others = [choice for choice in choices if choice != best][: tried - 1]
            ways = [choice for choice in choices if choice in (best, *others)]
            super().__init__(ways, *arguments, **options)

        def took(self, seconds):
            if seconds is not None:
                seconds = 0.01 if preferred(self.turn) else 0.02
            super().took(seconds)

    monkeypatch.setattr(auto, "Contest", Preferring)
    for name, value in _SHORT_RACE.items():
        monkeypatch.setattr(auto, name, value)
    return asked


# A race of one round, with one call in a block, for which there is always time.
_SHORT_RACE = {
    **{"_ROUNDS": 1, "_FIRST_ROUNDS": 1, "_ROUND_S": 0.0},
    **{"BUDGET_S": 1e9, "OF_SHORT_RUN": 1e9},
}


def _no_race(monkeypatch):
    """Leaves no time to try other ways."""
    monkeypatch.setattr(auto, "BUDGET_S", -1.0)
    monkeypatch.setattr(auto, "BUDGET", 0.0)


@pytest.mark.parametrize(
    ("name", "steps", "tried", "where"),
    [
        # The model is moved where copies need it.
        ("replicated", 1, 2, "/device:CPU:3"),
        slow("replicated", 4, 2, "/device:CPU:0"),
        slow("parameter_server", 1, 3, "/device:CPU:0"),
        # It comes back if the first is chosen after all, traced for where it is.
        slow("parameter_server", 1, 2, "/device:CPU:3"),
    ],
)
def test_a_race_computes_the_same_as_one_way(monkeypatch, name, steps, tried, where):
    _prefer(monkeypatch, lambda choice: choice.variable_update == name, tried)
    history, expected = _expected(steps)
    parallel, ours, variables = _fit("auto", steps, where=where)
    assert parallel.builder.name == name
    home = "/device:CPU:0" if name == "replicated" else where
    assert parallel.builder.plan.home == home
    assert all(v.value.device.endswith(home) for v in parallel.variables)
    for metric, values in history.items():
        assert ours[metric] == pytest.approx(values, rel=1e-6)
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def _fail_after_training(monkeypatch, fails):
    """Lets each first call of builders train and then fail, if `fails(builder)`."""
    make = TowerModel._train_function

    def train_function(self, builder):
        function = make(self, builder)

        def call(iterator):
            logs = function(iterator)
            if fails(builder):
                raise tf.errors.InternalError(None, None, "no memory")
            return logs

        return call

    monkeypatch.setattr(TowerModel, "_train_function", train_function)


@pytest.mark.parametrize("fails", [True, slow(False)])
def test_variables_of_a_losss_own_count_each_step_once(monkeypatch, fails):
    _prefer(monkeypatch, lambda choice: choice != SERVER, tried=9)
    if fails:
        _fail_after_training(monkeypatch, lambda builder: builder.name == "replicated")
    seen, raw = keras.Variable(0.0), tf.Variable(0, trainable=False)

    def loss(y, outputs):
        seen.assign_add(1.0)
        raw.assign_add(1)
        return keras.ops.mean(keras.ops.square(y - outputs))

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    parallel = multi_gpu_model(model, gpus=2, variable_update="auto")
    parallel.compile("sgd", loss, jit_compile=False)
    parallel.fit(_ones(), shuffle=False, verbose=0)
    assert parallel.builder.name == ("parameter_server" if fails else "replicated")
    assert (float(seen.value), int(raw)) == (24.0, 24)


def _ones():
    rows = np.ones([48, 2]), np.ones([48, 1])
    return tf.data.Dataset.from_tensor_slices(rows).batch(2)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
def test_a_variable_of_the_steps_own_counts_each_step_once(monkeypatch, fails):
    """Only on GPUs, where XLA is tried, do ways race for a step of the model's own."""

    class Counts(keras.Sequential):
        def __init__(self, layers):
            super().__init__(layers)
            self.seen = tf.Variable(0, trainable=False)

        def train_step(self, data):
            self.seen.assign_add(1)
            return super().train_step(data)

    _prefer(monkeypatch, lambda choice: choice.xla)
    if fails:
        _fail_after_training(monkeypatch, lambda builder: builder.xla)
    with as_on_gpu.made_up_gpus(*TOWERS, measures=True):
        model = Counts([keras.Input((2,)), keras.layers.Dense(1)])
        parallel = multi_gpu_model(model, TOWERS, variable_update="auto")
        parallel.compile("sgd", "mse")
        parallel.fit(_ones(), shuffle=False, verbose=0)
    assert bool(parallel.builder.xla) is not fails
    assert int(model.seen) == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wish", "gpus", "xla"),
    [
        ("parameter_server", "auto", True, True),
        ("replicated", "auto", True, True),
        ("parameter_server", "auto", False, False),
        ("parameter_server", False, True, False),
    ],
)
def test_on_gpus_xla_is_tried_with_each_way(monkeypatch, name, wish, gpus, xla):
    """ResNet-50 took 2.2 times as long without, and nobody tried."""
    asked = _prefer(monkeypatch, lambda choice: choice.xla)
    made_up = TOWERS if gpus else ()
    with as_on_gpu.made_up_gpus(*made_up, measures=True):
        options = {"gpus": TOWERS, "jit_compile": wish, "layers": _no_more}
        parallel, history, _ = _fit(name, **options)
    assert parallel.builder.name == name
    assert bool(parallel.builder.xla) == xla
    ways = [choice.variable_update for choice in asked]
    assert ways == ([name, name] if xla else [])
    expected, _ = _expected(1, _no_more)
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_variables_stay_where_they_were_put(monkeypatch):
    _prefer(monkeypatch, lambda choice: choice == SERVER, tried=9)
    parallel, _, _ = _fit(Auto(device="/device:CPU:3"), layers=_no_more)
    assert parallel.builder.plan.home == "/device:CPU:3"


@pytest.mark.slow
@pytest.mark.parametrize("xla", [False, True])
def test_only_the_chosen_way_prints_how_it_differs(monkeypatch, caplog, xla):
    # Two ways are tried, or four, the last of which XLA compiles.
    _prefer(monkeypatch, lambda choice: choice.xla is xla, 2 if xla else 4)
    parallel, *_ = _fit("auto", jit_compile="auto")
    assert bool(parallel.builder.xla) is xla
    assert ("draws random numbers by XLA" in caplog.text) is xla


@pytest.mark.slow
def test_a_remembered_choice_is_not_tried_again(monkeypatch, tmp_path, capsys):
    _prefer(monkeypatch, lambda choice: choice.all_reduce_alg == "ring")
    file = str(tmp_path / "choice.json")
    _, _, expected = _fit(Auto(file), layers=_no_more)
    monkeypatch.setattr(auto, "Contest", None)
    capsys.readouterr()
    parallel, _, variables = _fit(Auto(file), layers=_no_more)
    assert "replicated (ring), as chosen before" in capsys.readouterr().err
    assert _algorithm(parallel.builder) == "ring"
    for one, other in zip(variables, expected, strict=True):
        # The run before has begun with another way.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("why", ["deterministic", slow("eager")])
def test_nothing_is_measured(monkeypatch, why):
    monkeypatch.setattr(auto, "Contest", None)
    if why == "deterministic":
        monkeypatch.setattr(program, "is_deterministic", lambda: True)
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    parallel = multi_gpu_model(model, gpus=2, variable_update="auto")
    parallel.compile("sgd", "mse", run_eagerly=why == "eager")
    parallel.fit(_batches().map(lambda x, y: (x, x[:, :3])), verbose=0)
    assert parallel.builder.name == "parameter_server"


@pytest.mark.parametrize(
    ("steps", "fails"), [(1, False), slow(1, True), slow(3, False), slow(3, True)]
)
def test_every_batch_is_trained_on_once(monkeypatch, steps, fails):
    _prefer(monkeypatch, lambda choice: choice != SERVER)
    if fails:
        _fail_after_training(monkeypatch, lambda builder: builder.name == "replicated")
    seen = []

    class Sees(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    def rows():
        for i in range(23):
            yield np.ones((4, 1), "float32"), np.full((4, 1), 2.0**i, "float32")

    spec = tf.TensorSpec([None, 1]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(rows, output_signature=spec)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.zeros((1, 1))])
    parallel = multi_gpu_model(model, gpus=2, variable_update="auto")

    @keras.saving.register_keras_serializable()
    def linear(y, outputs):
        return -y * outputs

    parallel.compile(
        keras.optimizers.SGD(1.0), linear, steps_per_execution=steps, jit_compile=False
    )
    parallel.fit(data, verbose=0, callbacks=[Sees()])
    assert parallel.builder.name == ("parameter_server" if fails else "replicated")
    # Each step adds the mean of its targets: each bit stands for a batch.
    assert float(model.get_weights()[0][0, 0]) == 2.0**23 - 1
    assert seen == ([*range(23)] if steps == 1 else [*range(2, 24, 3)])


def test_the_first_call_tries_nothing(monkeypatch):
    _prefer(monkeypatch, lambda choice: choice != SERVER)
    install, batches, tried = program.Program.install, [], []

    class Counts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)

    def installs(self, choice, *arguments, **options):
        tried.append((len(batches), choice.variable_update))
        install(self, choice, *arguments, **options)

    monkeypatch.setattr(program.Program, "install", installs)
    parallel, data = _linear_model(), _batches()
    parallel.fit(data, epochs=2, verbose=0, callbacks=[Counts()])
    # The second call is not counted, and the third is the time of the first way.
    assert tried == [(3, "replicated")]
    assert parallel.builder.name == "replicated"


def _linear_model(where="/device:CPU:0"):
    keras.utils.set_random_seed(3)
    with tf.device(where):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    parallel = multi_gpu_model(model, gpus=2, variable_update="auto")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile(_sgd(), loss, jit_compile=False)
    return parallel


@pytest.mark.parametrize(
    ("where", "gpus"),
    [
        ("/device:CPU:0", ()),
        # The race moves variables, or the first call does.
        slow("/device:CPU:3", ()),
        slow("/device:CPU:3", TOWERS),
    ],
)
def test_evaluation_during_a_race_sees_the_latest_variables(monkeypatch, where, gpus):
    with as_on_gpu.made_up_gpus(*gpus, measures=True):
        _check_evaluation(monkeypatch, where)


def _check_evaluation(monkeypatch, where):
    _prefer(monkeypatch, lambda choice: choice.all_reduce_alg == "ring", tried=9)
    parallel, data, losses = _linear_model(where), _batches(), []
    ways = set()

    class Evaluates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            ways.add(parallel.builder.name)
            loss = parallel.evaluate(data, verbose=0)
            x, y = _data()
            logits = x @ parallel.get_weights()[0] + parallel.get_weights()[1]
            expected = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            losses.append((float(loss), float(np.mean(expected))))
            outputs = parallel.predict(x, verbose=0)
            np.testing.assert_allclose(outputs, logits, atol=1e-5)

    # Before the race, the variables may be elsewhere.
    parallel.evaluate(data, verbose=0)
    parallel.fit(data, epochs=4, verbose=0, callbacks=[Evaluates()])
    assert parallel.builder.name == "replicated" and len(ways) == 2
    assert len(losses) == 24 and len({loss for loss, _ in losses}) > 20
    for loss, expected in losses:
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_race_goes_on_in_the_next_fit(monkeypatch):
    _prefer(monkeypatch, lambda choice: choice != SERVER)
    parallel, data = _linear_model(), _batches().take(1)
    for _ in range(5):
        parallel.fit(data, verbose=0)
        assert parallel.builder.name == "parameter_server"
    parallel.fit(data, verbose=0)
    assert parallel.builder.name == "replicated"


@pytest.mark.parametrize("where", ["/device:CPU:0", slow("/device:CPU:3")])
def test_compiling_during_a_race_is_obeyed(monkeypatch, where):
    _prefer(monkeypatch, lambda choice: choice != SERVER)
    parallel, data = _linear_model(where), _batches()
    parallel.evaluate(data, verbose=0)
    # The candidate has made its first call.
    parallel.fit(data.take(4), verbose=0)
    assert parallel.is_choosing
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("sgd", loss, loss_weights=[3.0], jit_compile=True)
    x, y = _data()
    logits = x @ parallel.get_weights()[0] + parallel.get_weights()[1]
    expected = 3 * np.mean(loss(y, logits))
    assert parallel.evaluate(data, verbose=0) == pytest.approx(expected, rel=1e-5)
    parallel.fit(data.take(1), verbose=0)
    assert parallel.builder.xla and parallel.is_choosing


@pytest.mark.slow
@pytest.mark.parametrize("how", ["compile", "force"])
def test_what_breaks_off_a_race_lets_the_best_way_print(monkeypatch, how):
    _prefer(monkeypatch, lambda choice: choice != SERVER, tried=3)
    parallel = _linear_model()
    parallel.fit(_batches(), verbose=0)
    # A candidate has won, and another one is left.
    assert parallel.builder.name == "replicated" and parallel.is_choosing
    assert parallel.builder.context.held is not None
    if how == "compile":
        parallel.compile("sgd", "mse")
    else:
        parallel.make_train_function(force=True)
    assert parallel.builder.context.held is None


@pytest.mark.slow
@pytest.mark.parametrize("after", [3, 4, 5])
def test_resizing_ends_a_race(monkeypatch, after):
    """Before, during and after the first calls of a candidate."""
    _prefer(monkeypatch, lambda choice: choice != SERVER)

    class Resizes(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == after - 1:
                parallel.resize(3)
            losses.append(logs["loss"])

    fits = []
    for resizes in (False, True):
        losses, parallel = [], _linear_model()
        if not resizes:
            parallel = multi_gpu_model(parallel.__wrapped__, 2)
        parallel.fit(_batches(), verbose=0, callbacks=[Resizes()] if resizes else None)
        fits.append(parallel.get_weights())
    assert parallel.builder.name == "parameter_server"
    assert len(parallel.builder.plan.replicas) == 3 and len(losses) == 6
    for one, other in zip(*fits, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


_ROWS = np.arange(12, dtype="float32").reshape(6, 2)
_NOTHING = tf.experimental.Optional.empty(tf.TensorSpec([], tf.float32))


_KINDS = {
    "array": _ROWS,
    "dictionary": {"b": _ROWS, "a": _ROWS.astype(str)},
    "sparse": tf.sparse.from_dense(_ROWS),
    "ragged": tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7], [8]]),
}
_BESIDE = {
    "alone": (),
    "none": (None, 1.0),
    "optional": (_NOTHING, 1.0),
    "none at the end": (1.0, None),
}
_DIAGONAL = [*zip(_KINDS, _BESIDE, strict=True)]


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        pair if pair in _DIAGONAL else slow(*pair)
        for pair in itertools.product(_KINDS, _BESIDE)
    ],
)
def test_batches_are_read_again_as_they_came(monkeypatch, kind, beside):
    rows, beside = _KINDS[kind], _BESIDE[beside]
    # It fixes malloc's threshold for the whole process, which slows down small models.
    monkeypatch.setattr(tf.data.Dataset, "from_generator", None)
    data = tf.data.Dataset.from_tensor_slices(rows).batch(4)
    iterator = iter(data.map(lambda rows: (rows, *beside)))
    spec = iterator.element_spec
    taken = ReplayableBatches(iterator, 5)
    assert len(taken) == 2

    def arrays(batch):
        parts = loop.flat(loop.without_optionals(batch))
        return [np.asarray(part).tolist() for part in parts]

    expected = [arrays((rows, *beside)) for rows in data]
    assert taken.read().element_spec == spec
    twice = itertools.chain(taken.read(), taken.read())
    assert [arrays(batch) for batch in twice] == expected * 2
    assert [arrays(batch) for batch in taken.read()] == expected


def test_the_length_of_a_run():
    x, y = _data(44)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    unknown = data.filter(lambda x, y: True)
    found = []

    class Asks(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(parallel._self_call.train_calls())

    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    parallel = multi_gpu_model(model, 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=2)
    options = {"verbose": 0, "callbacks": [Asks()]}
    parallel.fit(data, epochs=3, **options)
    parallel.fit(x, y, batch_size=4, epochs=5, initial_epoch=4, **options)
    parallel.fit(unknown, **options)
    parallel.fit(data.repeat(), steps_per_epoch=5, epochs=2, **options)
    assert found == [9, 6, auto.ASSUMED_BATCHES // 2, 6]
    assert parallel._self_call is None


@pytest.fixture
def gpus():
    """Logical CPUs that are taken for GPUs, without NCCL."""
    found = "/device:CPU:1", "/device:CPU:2"
    with as_on_gpu.made_up_gpus(*found, measures=True):
        yield found


def _algorithm(builder):
    """How gradients are added to copies, if there are copies."""
    copies = builder.name == "replicated"
    return builder.pieces.store.algorithm if copies else None


@pytest.mark.slow
@pytest.mark.parametrize("stays", ["ring", "device"])
def test_losers_are_dropped_at_once(monkeypatch, gpus, stays):
    _prefer(monkeypatch, lambda choice: choice.all_reduce_alg == stays, tried=9)
    build, made, builders, alive = Builder.create_variables, [], [], []

    def builds(self, data):
        build(self, data)
        # Of copies, the first tower's are the model's own variables.
        made.extend((_algorithm(self), weakref.ref(copy)) for copy in self.copies())
        builders.append(weakref.ref(self))
        alive.append(len({id(ref()) for ref in builders if ref() is not None}))

    monkeypatch.setattr(Builder, "create_variables", builds)
    _fit("auto", layers=_no_more, gpus=gpus, where=gpus[0])
    assert {name for name, _ in made} == {"device", "ring"}
    # The candidate and the best so far, but none that has lost.
    assert max(alive) == 2 and len(alive) >= 3
    assert {name for name, copy in made if copy() is not None} == {stays}


@pytest.mark.slow
def test_on_gpus_what_fails_at_first_goes_on_by_the_simplest(monkeypatch, capsys, gpus):
    _no_race(monkeypatch)
    _, expected = _expected(1, _no_more)
    all_reduce = reduce.all_reduce

    def failing(towers, sources, devices, *options):
        sums, packed = all_reduce(towers, sources, devices, *options)
        if len({*devices}) > 1:  # those of the copies
            with tf.control_dependencies([tf.debugging.assert_equal(1, 2, "no NCCL")]):
                sums = tf.nest.map_structure(tf.identity, sums)
        return sums, packed

    monkeypatch.setattr(reduce, "all_reduce", failing)
    capsys.readouterr()
    parallel, _, variables = _fit("auto", layers=_no_more, gpus=gpus, where=gpus[0])
    line, *_ = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "towers: The variables are updated by parameter_server, as replicated (device) "
        "fails:"
    )
    assert parallel.builder.name == "parameter_server"
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "expected", "compiles"),
    [
        ("update", ["replicated (device)", "parameter_server"], False),
        ("copies", ["parameter_server", "replicated (ring)"], True),
    ],
)
def test_what_has_failed_is_not_tried_again(
    monkeypatch, capsys, gpus, fails, expected, compiles
):
    make = TowerModel._train_function
    error = tf.errors.InternalError(None, None, "libdevice not found")

    def train_function(self, builder):
        function = make(self, builder)

        def call(iterator):
            added = _algorithm(builder)
            if {"update": builder.compiles_update, "copies": added == "device"}[fails]:
                raise error
            return function(iterator)

        return call

    monkeypatch.setattr(TowerModel, "_train_function", train_function)
    tried = _prefer(monkeypatch, lambda choice: choice != SERVER)
    with tf.device(gpus[0]):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    parallel = multi_gpu_model(model, gpus, variable_update="auto")
    parallel.compile(_sgd(), "sparse_categorical_crossentropy")
    parallel.fit(_batches(), epochs=2, verbose=0)
    assert list(map(str, tried))[:2] == expected
    assert parallel.builder.compiles_update is compiles
    assert any(way.xla for way in tried) is compiles
    assert "replicated (device) with XLA" not in map(str, tried)
    assert ("XLA" in capsys.readouterr().err) is (fails == "update")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SignalReceived(15)])
def test_a_stop_while_a_way_starts_lets_it_start_again(monkeypatch, stop):
    """By Ctrl-C, or as hosts stop together."""
    _prefer(monkeypatch, lambda choice: choice != SERVER)
    make, stops = TowerModel._train_function, iter([True, False])

    def train_function(self, builder):
        function = make(self, builder)

        def call(iterator):
            if builder.name == "replicated" and next(stops, False):
                raise stop
            return function(iterator)

        return call

    monkeypatch.setattr(TowerModel, "_train_function", train_function)
    parallel = _linear_model()
    with pytest.raises(type(stop)):
        parallel.fit(_batches(), verbose=0)
    assert parallel.builder.name == "parameter_server"
    assert not [*parallel.builder.copies()]
    parallel.fit(_batches(), verbose=0)
    assert parallel.builder.name == "replicated"


@pytest.mark.slow
def test_compiling_again_is_obeyed(monkeypatch):
    # The first is without XLA.
    _no_race(monkeypatch)
    parallel, _, _ = _fit("auto", layers=_no_more, jit_compile="auto")
    assert not parallel.builder.xla
    parallel.compile("sgd", "sparse_categorical_crossentropy", jit_compile=True)
    parallel.fit(_batches(), verbose=0)
    assert parallel.builder.xla and parallel.builder.context.facts.compiled


# XLA.


def _normalised():
    # XLA's random numbers are others, so nothing is dropped.
    return _stateful()[:2]


# Asynchronous towers are compiled in test_asynchronous.py, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("builder", "layers"),
    [("replicated", _no_more), *((name, _normalised) for name in STRATEGIES)],
)
def test_xla_with_every_builder(builder, layers):
    history, expected = _expected(1, layers)
    parallel, ours, variables = _fit(builder, 4, layers, jit_compile=True)
    assert parallel.builder.context.facts.compiled
    if builder == "asynchronous":
        assert np.all(np.isfinite(ours["loss"]))
        return
    assert ours["loss"] == pytest.approx(history["loss"], rel=1e-5)
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "layers"), [(1, _no_more), (1, _stateful), (4, _stateful)]
)
def test_what_xla_cannot_compile_goes_on_without(capsys, steps, layers):
    history, expected = _expected(steps, layers)

    def with_bessel():
        return *layers(), Bessel()  # which adds nothing

    capsys.readouterr()
    parallel, ours, variables = _fit(
        "parameter_server", steps, with_bessel, jit_compile=True
    )
    # That XLA draws other numbers than one device is said before it is tried.
    *_, line = [x for x in capsys.readouterr().err.splitlines() if "XLA" in x]
    assert line.startswith("towers: XLA cannot compile model") and "BesselJ0" in line
    assert not parallel.builder.xla
    assert ours == history
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_errors_are_not_taken_for_those_of_xla():
    class Fails(keras.layers.Layer):
        def call(self, x):
            with tf.control_dependencies([tf.debugging.assert_less(x, -1e9, "big")]):
                return tf.identity(x)

    with pytest.raises(tf.errors.InvalidArgumentError):
        _fit("parameter_server", 1, lambda: [Fails()])


def test_hosts_try_what_all_of_them_can():
    """A host with one tower has fewer ways than one with several GPUs."""
    ways = [Choice("replicated", "nccl"), Choice("parameter_server", "auto")]

    class Hosts(Alone):
        def exchange(self, value):
            assert json.loads(json.dumps(value)) == value
            return [value, [[*ways[1]]]]

    assert auto.of_all_hosts(ways, Hosts()) == ways[1:]
    assert auto.of_all_hosts(ways, Alone()) == ways

"""The turns of stages, against the papers' orders."""

import collections
import itertools
import random

import pytest

from towers.stages.schedule import Turn, order

SIZES = [(2, 1), (2, 2), (2, 5), (3, 2), (4, 2), (4, 4), (4, 5), (4, 8)]


def straight(stages):
    """The turns of a model whose stages are called one after another."""
    forward = [Turn(k, after=(k - 1,) if k else ()) for k in range(stages)]
    last = 2 * stages - 1
    backward = [
        Turn(k, True, after=(k, last - k - 1), duration=2)
        for k in reversed(range(stages))
    ]
    return [*forward, *backward]


def by_stage(turns, slots):
    found = collections.defaultdict(list)
    for slot in slots:
        turn = turns[slot.turn]
        found[turn.stage].append(("B" if turn.backward else "F", slot.micro_batch))
    return found


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_gpipe(stages, count):
    """Huang et al. 2019, figure 2: all forward, then all backward."""
    turns = straight(stages)
    expected = [(way, k) for way in "FB" for k in range(count)]
    found = by_stage(turns, order(turns, count, "gpipe"))
    assert all(found[stage] == expected for stage in range(stages))


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_1f1b(stages, count):
    """Narayanan et al. 2021, figure 4: some forward, then in turns, then backward."""
    turns = straight(stages)
    found = by_stage(turns, order(turns, count, "1f1b"))
    for stage in range(stages):
        first = min(stages - stage - 1, count)
        expected = [("F", k) for k in range(first)]
        for k in range(count - first):
            expected += [("F", first + k), ("B", k)]
        expected += [("B", k) for k in range(count - first, count)]
        assert found[stage] == expected


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_the_bubble_is_that_of_the_papers(schedule, stages, count):
    turns = straight(stages)
    slots = order(turns, count, schedule)
    ends = max(slot.begins + turns[slot.turn].duration for slot in slots)
    # Of which each stage works 3 * count.
    assert ends == 3 * (count + stages - 1)


def held(turns, slots):
    """The most micro-batches of which each stage holds activations at a time."""
    holds, most = collections.defaultdict(set), collections.Counter()
    for slot in slots:
        turn = turns[slot.turn]
        holds[turn.stage].add(slot.micro_batch)
        most[turn.stage] = max(most[turn.stage], len(holds[turn.stage]))
        if turn.backward:
            holds[turn.stage].discard(slot.micro_batch)
    return most


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_1f1b_holds_few_micro_batches(stages, count):
    turns = straight(stages)
    most = held(turns, order(turns, count, "1f1b"))
    expected = {stage: min(stages - stage, count) for stage in range(stages)}
    assert most == expected
    most = held(turns, order(turns, count, "gpipe"))
    assert most == dict.fromkeys(range(stages), count)


# A layer that is called twice, a stage that is called again and again, stages in the
# other direction, one without a way back, and evaluation.
OTHERS = {
    "shared": [(0, 0), (1, 0), (0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1)],
    "three": [(0, 0), (1, 0), (2, 0), (0, 0), (0, 1), (2, 1), (1, 1), (0, 1)],
    "reversed": [(1, 0), (0, 0), (0, 1), (1, 1)],
    "frozen": [(0, 0), (1, 0), (2, 0), (2, 1)],
    "again": [(0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1)],
    "evaluation": [(0, 0), (1, 0), (2, 0)],
}
RANDOM = random.Random(1)
OTHERS |= {
    f"random {k}": [(RANDOM.randrange(3), 0) for _ in range(RANDOM.randint(1, 6))]
    + [(RANDOM.randrange(3), 1) for _ in range(RANDOM.randint(0, 6))]
    for k in range(50)
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", OTHERS)
def test_every_turn_comes_and_none_too_early(schedule, name):
    turns = [
        Turn(stage, bool(backward), after=(k - 1,) if k else (), duration=1 + backward)
        for k, (stage, backward) in enumerate(OTHERS[name])
    ]
    for count in (1, 2, 5):
        slots = order(turns, count, schedule)
        expected = itertools.product(range(count), range(len(turns)))
        assert sorted((s.micro_batch, s.turn) for s in slots) == [*expected]
        done, idle = {}, collections.Counter()
        for slot in slots:
            turn = turns[slot.turn]
            before = done.get((slot.micro_batch, slot.turn - 1), 0)
            assert slot.turn == 0 or (slot.micro_batch, slot.turn - 1) in done
            # No stage does two things at once.
            assert slot.begins >= max(before, idle[turn.stage])
            ends = slot.begins + turn.duration
            done[slot.micro_batch, slot.turn] = idle[turn.stage] = ends


def deferring(stages):
    """The turns of such a model, gradients of weights by themselves."""
    turns = [Turn(k, after=(k - 1,) if k else ()) for k in range(stages)]
    for k in reversed(range(stages)):
        before = max(j for j, turn in enumerate(turns) if not turn.deferred)
        turns.append(Turn(k, True, after=(k, before)))
        turns.append(Turn(k, True, deferred=True, after=(k, len(turns) - 1)))
    return turns


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_what_nothing_waits_for_fills_the_bubble(stages, count):
    turns = deferring(stages)
    slots = order(turns, count, "1f1b")
    ends = max(slot.begins + turns[slot.turn].duration for slot in slots)
    # Qi et al. 2024, table 2: a turn each of three on the way to the first gradient,
    # and back but for gradients of weights.
    assert ends == 3 * count + 2 * (stages - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_no_stage_leaves_two_micro_batches_for_later(schedule, stages, count):
    turns, waiting = deferring(stages), collections.defaultdict(set)
    for slot in order(turns, count, schedule):
        turn = turns[slot.turn]
        if turn.deferred:
            waiting[turn.stage].remove(slot.micro_batch)
        elif turn.backward:
            waiting[turn.stage].add(slot.micro_batch)
        assert len(waiting[turn.stage]) <= 1


@pytest.mark.parametrize(("stages", "count"), SIZES)
def test_gradients_of_weights_keep_activations_of_no_more(stages, count):
    turns, holds = deferring(stages), collections.defaultdict(set)
    for slot in order(turns, count, "1f1b"):
        turn = turns[slot.turn]
        holds[turn.stage].add(slot.micro_batch)
        assert len(holds[turn.stage]) <= stages - turn.stage
        if turn.deferred:
            holds[turn.stage].remove(slot.micro_batch)

"""Which layers run on which stage, and what is refused."""

import itertools
import random

import keras
import numpy as np
import pytest
from keras import layers

from tests.valued import valued
from towers import multi_gpu_model
from towers.layers import tables
from towers.layers.pipeline import LayerPlacement, balanced, best_cut, placeable, placed


def chain(*sizes):
    every = [layers.Dense(size, name=f"block_{k}") for k, size in enumerate(sizes)]
    return keras.Sequential([keras.Input([6]), *every], name="chain")


def by_name(model, stages):
    return {
        layer.name: stages[id(layer)]
        for layer in placeable(model)
        if id(layer) in stages
    }


def test_the_first_pattern_of_a_whole_name_counts():
    model = chain(*[6] * 12)
    found = by_name(model, placed(model, {"block_1": 1, "block_[0-5]": 0, ".*": 1}, 2))
    first = ["block_0", *(f"block_{k}" for k in range(2, 6))]
    assert found == {each.name: int(each.name not in first) for each in model.layers}


def test_layers_without_weights_may_be_placed():
    model = keras.Sequential(
        [keras.Input([6]), layers.Dense(4, name="a"), layers.ReLU(name="r")]
    )
    assert by_name(model, placed(model, {"a": 0, "r": 1}, 2)) == {"a": 0, "r": 1}


def inner():
    return keras.Sequential(
        [keras.Input([6]), layers.Dense(6, name="i0"), layers.Dense(6, name="i1")],
        name="inner",
    )


def test_layers_of_models_in_a_model_are_placed_one_by_one():
    model = keras.Sequential([keras.Input([6]), inner(), layers.Dense(3, name="last")])
    assert by_name(model, balanced(model, 3)) == {"i0": 0, "i1": 1, "last": 2}


def test_tables_that_lie_apart_count_for_no_stage():
    ids = keras.Input([4], dtype="int32")
    hidden = layers.Embedding(1000, 6, name="table")(ids)
    for name in "abc":
        hidden = layers.Dense(6, name=name)(hidden)
    model = keras.Model(ids, hidden)
    found = by_name(model, balanced(model, 2))
    assert found == {"table": 0, "a": 1, "b": 1, "c": 1}
    placement = LayerPlacement(model, 3, apart=tables.of)
    assert by_name(model, placement.layers) == {"table": 0, "a": 0, "b": 1, "c": 2}
    # The optimizer may not allow it.
    placement.keeps_all()
    assert by_name(model, placement.layers) == by_name(model, balanced(model, 3))
    assert placement.layers != balanced(model, 3, apart=tables.of)


class Subclassed(keras.Model):
    """Three layers, one of them a model."""

    def __init__(self):
        super().__init__()
        self.first, self.inside = layers.Dense(6, name="first"), inner()
        self.last = layers.Dense(3, name="last")

    def call(self, x):
        return self.last(self.inside(self.first(x)))


def test_a_subclassed_model_has_the_layers_that_it_keeps():
    model = Subclassed()
    model(np.zeros([1, 6]))
    expected = {"first": 0, "i0": 0, "i1": 1, "last": 1}
    assert by_name(model, balanced(model, 2)) == expected


def largest(costs, ends):
    pieces = itertools.pairwise([0, *ends])
    return max(sum(costs[begin:end]) for begin, end in pieces)


def test_no_cut_is_better_than_the_best():
    chance = random.Random(1)
    for _ in range(300):
        count = chance.randint(1, 8)
        costs = [chance.randint(1, 20) for _ in range(count)]
        stages = chance.randint(1, count)
        found = best_cut(costs, stages)
        assert found[-1] == count and [*found] == sorted({*found})
        assert len(found) == stages and found[0] > 0
        every = itertools.combinations(range(1, count), stages - 1)
        best = min(largest(costs, [*cut, count]) for cut in every)
        assert largest(costs, found) == best


def test_the_other_pieces_are_equal_too():
    assert best_cut([10, 1, 1, 1, 1, 1, 1], 3) == [1, 4, 7]


PLACEMENTS = [
    ({"block_0": 0}, "names no stage for block_1, block_2; expected one for each"),
    ({".*": 0}, "puts no layer on stage 1 of 2; expected one at least, of block_0,"),
    ({"block_[": 0, ".*": 1}, "expected a regular expression for names of layers, but"),
    ({3: 0}, "expected a regular expression for names of layers, but"),
    ({".*": 2}, "'.*': 2} with stages=2; expected a stage from 0 to 1"),
    ({".*": -1}, "expected a stage from 0 to 1"),
    ({".*": True}, "expected a stage from 0 to 1"),
    ({".*": "0"}, "expected a stage from 0 to 1"),
    ({}, "names no stage for block_0, block_1, block_2;"),
    ("even", "Received placement='even'; expected 'auto', or stages by regular"),
    (["block_0"], "expected 'auto', or stages by regular"),
]
ARGUMENTS = [
    ({"stages": 0}, "Received stages=0; expected an integer from 1"),
    ({"stages": True}, "Received stages=True; expected an integer from 1"),
    ({"stages": 1.0}, "Received stages=1.0; expected an integer from 1"),
    (
        {"stages": 3},
        "Received stages=3 for 4 devices; expected a number of stages that",
    ),
    ({"stages": 8}, "Received stages=8 for 4 devices"),
    ({"stages": 4}, "which has 3 layers with weights; expected at least as many"),
    ({"micro_batches": 0}, "Received micro_batches=0; expected an integer from 1"),
    ({"micro_batches": "2"}, "Received micro_batches='2'; expected an integer"),
    ({"schedule": "2f2b"}, "expected one of ['1f1b', 'gpipe']"),
    ({"recompute": True}, "Received recompute=True; expected one of ['none', 'stage'"),
    ({"placement": {".*": 0}}, "Received a placement with stages=1; expected stages=2"),
    ({"stages": 2, "split_ratios": (1, 1, 2)}, "for 2 towers; expected a positive"),
    ({"split_ratios": 3}, "split_ratios=3 for 4 towers; expected a positive integer"),
    ({"split_ratios": (1, 1, 1, 1.5)}, "1.5) for 4 towers; expected a positive integ"),
]
ARGUMENTS += [({"stages": 2, "placement": each}, words) for each, words in PLACEMENTS]


@pytest.mark.parametrize(("options", "words"), ARGUMENTS)
def test_a_wrong_argument_is_a_sentence(options, words):
    with pytest.raises(ValueError) as caught:
        multi_gpu_model(chain(6, 6, 3), 4, **valued(**options))
    assert words in str(caught.value)


# What each argument needs beside it: with less, a line or an error says so.
STAGES, PARTS = {"stages": 2}, {"micro_batches": 2}
GPIPE = {"schedule": "gpipe"}
NEEDS = [
    (STAGES, ()),
    (PARTS, ()),
    (GPIPE, (PARTS,)),
    ({"recompute": "layer"}, ()),
    ({"recompute": "stage"}, (STAGES | PARTS, GPIPE | PARTS)),
]


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(("option", "ways"), NEEDS)
@pytest.mark.parametrize(
    "others", [{}, STAGES, PARTS, GPIPE, STAGES | PARTS, GPIPE | PARTS, STAGES | GPIPE]
)
def test_what_changes_nothing_is_said(capsys, option, ways, others):
    given = option | others
    multi_gpu_model(chain(6, 6, 3), 4, **valued(**given))
    (name,) = option
    suffices = not ways or any(way.items() <= given.items() for way in ways)
    assert (f"{name}=" in capsys.readouterr().err) is not suffices


def test_a_model_that_is_built_later_is_placed_then():
    model = keras.Sequential([layers.Dense(6), layers.Dense(3)])
    parallel = multi_gpu_model(model, 2, stages=2)
    parallel.compile("sgd", "mse")
    parallel.train_on_batch(np.ones([4, 6]), np.ones([4, 3]))
    ends = [layer.kernel.value.device[-5:] for layer in model.layers]
    assert ends == ["CPU:0", "CPU:1"]
    late = multi_gpu_model(keras.Sequential([layers.Dense(6)]), 2, stages=2)
    late.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has 1 layer with weights"):
        late.train_on_batch(np.ones([4, 6]), np.ones([4, 6]))


class OwnWeights(keras.Model):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(6, 3))
        self.built = True

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def test_a_model_without_layers_is_refused():
    """Before anything is measured."""
    parallel = multi_gpu_model(OwnWeights(), 2, stages=2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has 0 layers with weights; expected at"):
        parallel.train_on_batch(np.ones([4, 6]), np.ones([4, 3]))

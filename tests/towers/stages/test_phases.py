"""What is computed together: phases, cut from the graph of a tower."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.towers.stages.stage import cut


def dense(name, units=6):
    return layers.Dense(units, activation="tanh", name=name)


def chain(*names):
    return keras.Sequential([keras.Input([6]), *map(dense, names)])


def there_and_back(*stages):
    return [*((k, False) for k in stages), *((k, True) for k in reversed(stages))]


def waited_for(tower):
    """The stages that others wait for, in order, and which way each is."""
    return [(turn.stage, turn.backward) for turn in tower.turns if not turn.deferred]


def main(tower):
    """The phases that others wait for."""
    return [phase for phase in tower.phases if not phase.place.deferred]


def of(tensors):
    """The scopes that tensors come from: layers' names, and those of gradients."""
    scopes = (tensor.op.name.split("/")[-2:] for tensor in tensors)
    # A tower calls layers once more than the model did.
    return {re.sub(r"_\d+$", "", scope[0]) for scope in scopes if len(scope) > 1}


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_each_stage_has_a_phase_forward_and_one_backward(stages, recompute):
    tower = cut(chain(*"abcd"), stages, "auto", recompute)
    phases = main(tower)
    assert waited_for(tower) == there_and_back(*range(stages))
    assert [phase.place.level for phase in phases] == [*range(2 * stages)]


def test_phases_hand_on_activations_and_their_gradients_alone():
    tower = cut(chain(*"abcd"), 2, {"a|b": 0, "c|d": 1})
    first, second, second_back, first_back = main(tower)
    (second_later,) = (p for p in tower.phases if p.place.deferred and p.place.backward)

    def handed(source, target):
        return [t for key, t in target.takes.items() if key in source.makes]

    assert of(handed(first, second)) == {"b"}
    assert of(handed(second_back, first_back)) == {"MatMul"}
    assert len(handed(second_back, first_back)) == 1
    # What the gradient needs of the way forward is where it is needed.
    assert handed(first, first_back) and handed(second, second_back)
    assert not handed(second, first_back)
    assert handed(first, second_later) == handed(first, second)


def test_gradients_of_weights_are_left_for_later():
    tower = cut(chain(*"abcd"), 2, {"a|b": 0, "c|d": 1})
    (later,) = (t for t in tower.turns if t.deferred and t.backward)
    assert later.stage == 1
    (phase,) = (p for p in tower.phases if p.place.deferred and p.place.backward)
    made = {tensor.shape[0] for tensor in phase.makes.values()}
    # No tensor has examples: weights of six by six, and six biases.
    assert made == {6} and len(phase.makes) == 4
    # Nothing takes from it.
    assert not any(phase.makes.keys() & other.takes.keys() for other in tower.phases)
    # What computes again computes all at once.
    again = cut(chain(*"abcd"), 2, {"a|b": 0, "c|d": 1}, "stage")
    assert not any(turn.deferred and turn.backward for turn in again.turns)


def test_a_sum_of_gradients_makes_none_of_them_wait():
    given, shared = keras.Input([6]), dense("shared")
    model = keras.Model(given, dense("d")(shared(dense("b")(shared(given)))))
    tower = cut(model, 2, {"shared": 0, "b|d": 1})
    ways = [(t.stage, t.backward) for t in tower.turns if t.deferred and t.backward]
    assert ways == [(1, True), (0, True), (1, True)]


def test_what_is_computed_again_is_not_kept():
    phases = main(cut(chain(*"abcd"), 2, {"a|b": 0, "c|d": 1}, "stage"))
    first, _, second_back, first_back = phases
    assert of(first.makes.values()) == {"b"}
    assert not first.makes.keys() & first_back.takes.keys()
    assert first.makes.keys() <= second_back.takes.keys()


def test_layers_are_computed_again_one_by_one():
    tower = cut(chain(*"abcd"), 2, {"a|b": 0, "c|d": 1}, "layer")
    phases = main(tower)
    assert waited_for(tower) == there_and_back(0, 1)
    assert [phase.place.part for phase in phases] == [0, 1, 2, 3, 3, 2, 1, 0]
    forward = phases[:4]
    assert [of(phase.makes.values()) for phase in forward[:3]] == [{n} for n in "abc"]


def skipping():
    given = keras.Input([6])
    first = dense("a")(given)
    second = dense("b")(first)
    third = dense("c")(layers.Add()([second, given, first]))
    return keras.Model(given, dense("d")(layers.Concatenate()([third, first, given])))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_skip_connections_cost_no_turn(stages):
    tower = cut(skipping(), stages)
    assert waited_for(tower) == there_and_back(*range(stages))


def test_a_shared_layer_takes_another_turn():
    given, first, second = keras.Input([6]), dense("a"), dense("b")
    model = keras.Model(given, second(first(second(first(given)))))
    tower = cut(model, 2)
    assert waited_for(tower) == there_and_back(0, 1, 0, 1)


def test_stages_in_another_order_than_layers():
    tower = cut(chain(*"abcd"), 3, {"a|c": 2, "b": 0, "d": 1})
    assert waited_for(tower) == there_and_back(2, 0, 2, 1)


def test_several_inputs_and_outputs():
    one, two = keras.Input([6]), keras.Input([6])
    left, right = dense("a")(one), dense("b")(two)
    both = layers.Concatenate()([left, right])
    model = keras.Model([one, two], [dense("c")(both), dense("d")(left)])
    tower = cut(model, 2)
    assert waited_for(tower) == there_and_back(0, 1)


def test_a_loop_runs_on_the_way_forward():
    # It is given the lists that it is to keep, by its gradient.
    loops = [layers.SimpleRNN(4, return_sequences=True), layers.SimpleRNN(4)]
    phases = cut(keras.Sequential([keras.Input([5, 4]), *loops]), 2).phases
    kinds = [{t.op.type for t in phase.makes.values()} for phase in phases]
    loop = {"StatelessWhile", "While"}
    assert [bool(kind & loop) for kind in kinds[:2]] == [True, True]
    handed = phases[0].makes.keys() & phases[1].takes.keys()
    assert [phases[0].makes[key].shape for key in handed] == [[None, 5, 4]]


class Branch(keras.Model):
    """Calls two of its layers in a branch."""

    def __init__(self):
        super().__init__()
        self.every = [dense(name) for name in "abc"]

    def call(self, x):
        a, b, c = self.every
        x = a(x)
        return tf.cond(tf.shape(x)[1] > 2, lambda: c(b(x)), lambda: 2 * x)


def test_a_branch_is_on_the_last_stage_of_its_layers():
    inputs = keras.Input([6])
    branch = Branch()
    branch(np.zeros([1, 6]))
    model = keras.Model(inputs, dense("d")(branch(inputs)))
    tower = cut(model, 4, {name: k for k, name in enumerate("abcd")})
    # Nothing is left for the second.
    assert waited_for(tower) == there_and_back(0, 2, 3)


class Python(layers.Layer):
    """Calls Python."""

    def call(self, x):
        found = tf.py_function(lambda x: 2 * x, [x], tf.float32)
        return tf.ensure_shape(found, x.shape)


def test_python_is_not_called_again():
    every = [dense("a"), Python(), dense("b"), dense("c")]
    model = keras.Sequential([keras.Input([6]), *every])
    phases = cut(model, 2, {"a|b|python": 0, "c": 1}, "stage").phases
    assert "EagerPyFunc" in {t.op.type for t in phases[-1].takes.values()}

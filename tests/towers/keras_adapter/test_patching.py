"""Patches of functions and values: in one thread or in all, and never for ever."""

import pdb
import threading
import types

import keras
import pytest
from keras.src.optimizers.base_optimizer import BaseOptimizer

from towers.analysis.layer_calls import recorded_layers
from towers.keras_adapter.models import TRAINER, compute_loss_replaced
from towers.keras_adapter.patching import Target, patched, swapped
from towers.layers import substitutes
from towers.numerics import search
from towers.tower import eager

PATCHED = [
    (keras.layers.Layer, "__call__", recorded_layers),
    (keras.layers.BatchNormalization, "call", substitutes.batch_normalization),
    (keras.optimizers.SGD, "update_step", substitutes.updates),
    (BaseOptimizer, "_backend_apply_gradients", substitutes.updates),
    (keras.layers.Embedding, "call", substitutes.in_variables),
    (keras.Operation, "__call__", search._watched),
    (TRAINER, "_compute_loss", lambda: compute_loss_replaced(keras.Model(), id)),
    (pdb, "set_trace", lambda: eager.aside(keras.Model())),
]


@pytest.mark.parametrize(
    ("owner", "name", "enter"), PATCHED, ids=[name for _, name, _ in PATCHED]
)
def test_threads_that_overlap_leave_nothing_behind(owner, name, enter):
    before = vars(owner)[name]
    entered, left = threading.Event(), threading.Event()

    def first():
        try:
            with pytest.raises(KeyError), enter():
                entered.set()
                second_entered.wait()
                raise KeyError
        finally:
            # Otherwise a failure here would hang.
            entered.set()
            left.set()

    second_entered = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    entered.wait()
    with enter():
        second_entered.set()
        left.wait()
    thread.join()
    assert vars(owner)[name] is before


class Greeter:
    def greet(self, name):
        return f"Hello {name}"


def _louder(greet, self, name):
    return greet(self, name) + "!"


def _greeting_of_another_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(Greeter().greet("Ann")))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_sees_its_own_patch_only():
    target = Target(Greeter, "greet")
    with patched(target, _louder):
        assert _greeting_of_another_thread() == "Hello Ann"
        with patched(target, lambda greet, self, name: "Bye"):
            assert Greeter().greet("Ann") == "Bye"
        assert Greeter().greet("Ann") == "Hello Ann!"
    assert Greeter().greet("Ann") == "Hello Ann"


def test_a_patch_for_all_threads_gives_way_to_a_threads_own():
    target = Target(Greeter, "greet")
    with patched(target, _louder, all_threads=True):
        assert _greeting_of_another_thread() == "Hello Ann!"
        with patched(target, lambda greet, self, name: "Bye"):
            assert Greeter().greet("Ann") == "Bye"
            assert _greeting_of_another_thread() == "Hello Ann!"
        with patched(target, lambda greet, self, name: "Bye", all_threads=True):
            assert Greeter().greet("Ann") == "Bye"
        assert Greeter().greet("Ann") == "Hello Ann!"
    assert Greeter().greet("Ann") == _greeting_of_another_thread() == "Hello Ann"


@pytest.mark.parametrize("unless_replaced", [True, False])
def test_what_somebody_else_has_put_there(monkeypatch, unless_replaced):
    target = Target(Greeter, "greet", unless_replaced=unless_replaced)
    monkeypatch.setattr(Greeter, "greet", lambda self, name: f"Hi {name}")
    theirs = vars(Greeter)["greet"]
    with patched(target, _louder):
        expected = "Hi Ann" if unless_replaced else "Hi Ann!"
        assert Greeter().greet("Ann") == expected
    assert vars(Greeter)["greet"] is theirs


def test_what_somebody_else_puts_there_meanwhile_stays():
    own = vars(Greeter)["greet"]
    with patched(Target(Greeter, "greet"), _louder):
        ours = vars(Greeter)["greet"]
        Greeter.greet = lambda self, name: ours(self, name) + "?"
        assert Greeter().greet("Ann") == "Hello Ann!?"
    assert Greeter().greet("Ann") == "Hello Ann?"
    Greeter.greet = own


def test_values_come_back_after_an_exception():
    pair = types.SimpleNamespace(value=1), types.SimpleNamespace(value=2)
    with pytest.raises(KeyError), swapped(pair, "value", [3, 4]):
        assert [each.value for each in pair] == [3, 4]
        with swapped(pair[:1], "value", [5]):
            assert [each.value for each in pair] == [5, 4]
        raise KeyError
    assert [each.value for each in pair] == [1, 2]


def test_values_are_not_swapped_in_part():
    pair = types.SimpleNamespace(value=1), types.SimpleNamespace(value=2)
    with pytest.raises(ValueError), swapped(pair, "value", [3]):
        pass
    assert [each.value for each in pair] == [1, 2]


def test_threads_that_swap_the_same_value_take_turns():
    holder = types.SimpleNamespace(value="first's")
    inside, done = threading.Event(), threading.Event()

    def second():
        inside.wait()
        with swapped([holder], "value", ["second's"]):
            pass
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    with swapped([holder], "value", ["swapped"]):
        inside.set()
        # Given time, the other thread still waits.
        assert not done.wait(0.05)
        assert holder.value == "swapped"
    thread.join()
    assert holder.value == "first's"

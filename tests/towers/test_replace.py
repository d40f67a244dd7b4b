"""Other code for a method while a step is traced: in one thread, and not for ever."""

import threading

import keras
import pytest
from keras.src.optimizers.base_optimizer import BaseOptimizer
from tensorflow.python.ops import custom_gradient

from towers.analysis.dependence import recorded_layers
from towers.keras_adapter.replace import Replacement
from towers.layers import embeddings, fused, seeds
from towers.numerics import search
from towers.tower.run import _search

PATCHED = [
    (keras.layers.Layer, "__call__", recorded_layers),
    (keras.layers.BatchNormalization, "call", fused.batch_normalization),
    (keras.optimizers.SGD, "update_step", fused.updates),
    (BaseOptimizer, "_backend_apply_gradients", fused.updates),
    (keras.layers.Embedding, "call", lambda: embeddings.at_home(on_gpu=False)),
    (keras.random.SeedGenerator, "next", seeds.on_the_host),
    (keras.src.backend.tensorflow.random, "_cast_seed", seeds.on_the_host),
    (keras.Operation, "__call__", search._watched),
    (custom_gradient, "_get_dependent_variables", lambda: _search.by(id)),
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


def test_a_thread_sees_its_own_replacement_only():
    replacement, found = Replacement(Greeter, "greet"), []
    thread = threading.Thread(target=lambda: found.append(Greeter().greet("Ann")))
    with replacement.by(lambda greet, self, name: greet(self, name) + "!"):
        thread.start()
        thread.join()
        with replacement.by(lambda greet, self, name: "Bye"):
            assert Greeter().greet("Ann") == "Bye"
        assert Greeter().greet("Ann") == "Hello Ann!"
    assert found == ["Hello Ann"]
    assert Greeter().greet("Ann") == "Hello Ann"


@pytest.mark.parametrize("alone", [True, False])
def test_what_somebody_else_has_put_there(monkeypatch, alone):
    replacement = Replacement(Greeter, "greet", alone=alone)
    monkeypatch.setattr(Greeter, "greet", lambda self, name: f"Hi {name}")
    theirs = vars(Greeter)["greet"]
    with replacement.by(lambda greet, self, name: greet(self, name) + "!"):
        assert Greeter().greet("Ann") == ("Hi Ann" if alone else "Hi Ann!")
    assert vars(Greeter)["greet"] is theirs


def test_what_somebody_else_puts_there_meanwhile_stays():
    replacement = Replacement(Greeter, "greet")
    own = vars(Greeter)["greet"]
    with replacement.by(lambda greet, self, name: greet(self, name) + "!"):
        ours = vars(Greeter)["greet"]
        Greeter.greet = lambda self, name: ours(self, name) + "?"
        assert Greeter().greet("Ann") == "Hello Ann!?"
    assert Greeter().greet("Ann") == "Hello Ann?"
    Greeter.greet = own

"""Which callbacks may change variables between two calls of training."""

import importlib
import inspect
import pkgutil

import pytest
from keras import callbacks

import towers.lifecycle
import towers.monitoring
from towers.lifecycle import run_state
from towers.lifecycle.continuing import data_position
from towers.model import fit_call

# How each of Keras's is made, and whether it may change variables between batches. What
# changes them as an epoch begins or ends may not. A new class is to be decided here.
KERAS = {
    "BackupAndRestore": (lambda: callbacks.BackupAndRestore("folder"), False),
    "Callback": (callbacks.Callback, False),
    "CallbackList": (callbacks.CallbackList, False),
    "CSVLogger": (lambda: callbacks.CSVLogger("file"), False),
    "EarlyStopping": (callbacks.EarlyStopping, False),
    "History": (callbacks.History, False),
    "LambdaCallback": (callbacks.LambdaCallback, True),
    "LearningRateScheduler": (
        lambda: callbacks.LearningRateScheduler(lambda epoch: 0.1),
        False,
    ),
    "ModelCheckpoint": (lambda: callbacks.ModelCheckpoint("a.keras"), False),
    "OrbaxCheckpoint": (None, False),  # made with a package that is not installed
    "ProgbarLogger": (callbacks.ProgbarLogger, False),
    "ReduceLROnPlateau": (callbacks.ReduceLROnPlateau, False),
    "RemoteMonitor": (callbacks.RemoteMonitor, False),
    "SwapEMAWeights": (callbacks.SwapEMAWeights, False),
    "TensorBoard": (lambda: callbacks.TensorBoard("folder"), False),
    "TerminateOnNaN": (callbacks.TerminateOnNaN, False),
}


def test_each_callback_of_keras_is_decided():
    assert {n for n, v in vars(callbacks).items() if inspect.isclass(v)} == {*KERAS}
    for name, (make, may) in KERAS.items():
        assert (getattr(callbacks, name) not in fit_call._KNOWN) == may, name
        if make is not None:
            assert fit_call.may_change_variables(make()) == may, name


def test_each_callback_of_ours_is_known():
    packages = towers.lifecycle, towers.monitoring
    for package in packages:
        walk = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        for module in walk:
            importlib.import_module(module.name)

    def below(kind):
        for each in kind.__subclasses__():
            yield from [each, *below(each)]

    ours = {
        kind
        for kind in below(callbacks.Callback)
        if kind.__module__.startswith(tuple(f"{p.__name__}." for p in packages))
    }
    # `fit` itself puts these before the user's.
    ours -= {run_state.SaveFirst, data_position.CallbacksFromBatch}
    assert len(ours) >= 10 and ours <= fit_call._KNOWN.keys()
    # Nothing that decorates a class has replaced a function since.
    assert all(fit_call._KNOWN[kind] == fit_call._functions(kind) for kind in ours)


def _with_function(callback, name="on_train_batch_end"):
    setattr(callback, name, lambda *_, **__: None)
    return callback


class _Own(callbacks.History):
    """What a user makes of one of Keras's."""


_Own.__module__ = "keras.src.callbacks.history"


@pytest.mark.parametrize(
    "make",
    [
        lambda: _with_function(callbacks.Callback()),
        lambda: _with_function(callbacks.History(), "on_batch_begin"),
        lambda: _with_function(callbacks.ModelCheckpoint("a.keras"), "_save_model"),
        lambda: _with_function(towers.callbacks.Throughput(8), "on_epoch_end"),
        lambda: callbacks.CallbackList([callbacks.History(), _Own()]),
        lambda: callbacks.CallbackList([callbacks.CallbackList([_Own()])]),
        lambda: _with_function(callbacks.CallbackList([])),
        lambda: [callbacks.History(), (_Own(),)],
        lambda: {"mine": _Own()},
        _Own,
        lambda: type("Throughput", (towers.callbacks.Throughput,), {})(8),
    ],
)
def test_what_a_user_has_changed_is_not_known(make):
    assert fit_call.may_change_variables(make())


def test_a_function_in_place_of_a_class_s(monkeypatch):
    assert not fit_call.may_change_variables([callbacks.History()])
    monkeypatch.setattr(callbacks.History, "on_train_batch_end", lambda *_: None)
    assert fit_call.may_change_variables([callbacks.History()])
    assert not fit_call.may_change_variables(None)

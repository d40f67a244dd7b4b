"""Runs a case by plain Keras on one device, without a line of ours."""

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.exact.case import EPOCHS, Case

# Arrays smaller than this are sums that cancel: zero, but for rounding.
NOTHING = 1e-4
# One device differs more between 16 and 32 bits where a loss overflows, or in a choice.
MOST_ROUNDING = 2e-2
LATER = "evaluate", "predict"
# Eagerly, Keras counts the losses of several outputs, and some metrics, otherwise; it
# trains a table in a loop otherwise; and it cannot train in float8.
NOT_EAGERLY = "batches", "float8", "float64", "lookups/in a loop"


def run(
    case: Case,
    wrap: Callable[[keras.Model], Any] = lambda model: model,
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    later: Collection[str] = LATER,
    plain: bool = False,
    compiled_first: bool = False,
) -> dict[str, np.ndarray]:
    """Trains, evaluates and predicts.

    Args:
        case: What to run.
        wrap: Makes of the model what is compiled and fitted.
        scope: Makes the context that the model is built and compiled in.
        later: What follows on training, of what the case has: "evaluate", "predict".
        plain: Compute with the least rounding: no XLA, and eagerly where Keras can.
        compiled_first: Compile the model, and not what `wrap` makes of it.

    Returns:
        All that has to be equal, by name: the logs of each step, history, results of
        `evaluate`, predictions, variables of the model and of its optimizers.
    """
    keras.backend.clear_session()
    keras.config.set_floatx("float64" if case.policy == "float64" else "float32")
    keras.config.set_dtype_policy(case.policy)
    keras.utils.set_random_seed(7)
    with scope():
        model = case.make()
        arguments = case.compile_arguments()
        trained = model if compiled_first or arguments is None else wrap(model)
        if arguments is not None:
            trained.compile(**arguments)
        if compiled_first or arguments is None:
            trained = wrap(trained)
    if plain:
        # Nothing is traced then: half the time, and the same to 1e-6.
        trained.run_eagerly |= _equal_eagerly(case)
        trained.jit_compile = False
    data, logs = dataset(case.batches()), _Logs()
    fit = {"epochs": EPOCHS, "verbose": 0} | case.fit
    fit.setdefault("x", case.feed(data))
    fit["callbacks"] = [*fit.get("callbacks", ()), logs]
    results = {}
    for round in range(2 if case.between or case.again else 1):
        if round and case.between:
            with scope():
                found = keras.tree.flatten(case.between(trained) or ())
            results |= {f"between {i}": value for i, value in enumerate(found)}
        if round and case.again:
            fit["x"] = case.feed(dataset(case.again()))
        history = trained.fit(**fit).history
        results |= {f"history {name} {round}": v for name, v in history.items()}
    results |= {f"steps {name}": values for name, values in logs.of_steps.items()}
    results |= _variables(model)
    later = [method for method in later if method in case.later]
    if "evaluate" in later:
        evaluated = trained.evaluate(data, return_dict=True, verbose=0)
        results |= {f"evaluate {name}": value for name, value in evaluated.items()}
    if "predict" in later:
        outputs = keras.tree.flatten(trained.predict(data, verbose=0))
        results |= {f"predict {i}": value for i, value in enumerate(outputs)}
    if later:
        # Some models count there, too.
        again = _variables(model)
        results |= {f"later {name}": value for name, value in again.items()}
    return {name: np.asarray(value) for name, value in results.items()}


class _Logs(keras.callbacks.Callback):
    """Keeps the logs of each step."""

    def __init__(self):
        super().__init__()
        self.of_steps = {}

    def on_train_batch_end(self, batch, logs=None):
        for name, value in logs.items():
            self.of_steps.setdefault(name, []).append(value)


def _variables(model):
    variables = {f"{v.path} {i}": v.value for i, v in enumerate(model.variables)}
    for attribute, value in vars(model).items():
        # A step of the model's own may have several optimizers.
        for optimizer in value if isinstance(value, list) else [value]:
            if isinstance(optimizer, keras.Optimizer):
                # Their paths hang on where Keras built them; names and order do not.
                variables |= {
                    f"{attribute} {i} {v.path.split('/')[-1]}": v.value
                    for i, v in enumerate(optimizer.variables)
                }
    return {name: np.array(value) for name, value in variables.items()}


def dataset(batches: list[tuple]) -> tf.data.Dataset:
    """Makes a dataset of these batches, as a user's pipeline would if it can."""
    first = keras.tree.flatten(batches[0])
    sizes = [len(keras.tree.flatten(b)[0]) for b in batches if _is_dense(b)]
    uniform = len(set(sizes[:-1])) == 1 and sizes[-1] <= sizes[0]
    if uniform and all(isinstance(a, np.ndarray) for a in first):
        whole = keras.tree.map_structure(lambda *a: np.concatenate(a), *batches)
        even = sizes[-1] == sizes[0]
        rows = tf.data.Dataset.from_tensor_slices(whole)
        return rows.batch(sizes[0], drop_remainder=even)
    parts = [tf.data.Dataset.from_tensors(batch) for batch in batches]
    return functools.reduce(tf.data.Dataset.concatenate, parts)


def _is_dense(batch):
    return isinstance(keras.tree.flatten(batch)[0], np.ndarray)


def differences(
    ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the largest difference in each array, relative to the array's size.

    Infinite where only one has it, or its shape or what is not finite differs.
    """
    return {
        name: _difference(ours.get(name), theirs.get(name))
        for name in [*theirs, *(ours.keys() - theirs.keys())]
    }


def _difference(ours, theirs):
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return np.inf
    ours, theirs = ours.astype("float64"), theirs.astype("float64")
    finite = np.isfinite(theirs)
    if not np.array_equal(ours[~finite], theirs[~finite], equal_nan=True):
        return np.inf
    apart = np.abs(ours - theirs)[finite]
    if not apart.size or not np.all(np.isfinite(apart)):
        return np.inf if apart.size else 0.0
    return float(apart.max() / max(np.abs(theirs[finite]).max(), NOTHING))


def outcome(
    case: Case,
    wrap: Callable[[keras.Model], Any] = lambda model: model,
    scope: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    later: Collection[str] = LATER,
    compiled_first: bool = False,
) -> dict[str, Any]:
    """Runs a case another way, and compares it with one device.

    Args:
        case: What to run.
        wrap: See `run`.
        scope: See `run`.
        later: See `run`.
        compiled_first: See `run`.

    Returns:
        A record for a report. Its "verdict" is "equal", "rule", "clear error" (all
        three only where the case expects them), "differs" or "raises".
    """
    record = {"group": case.group, "case": case.name, "towers": case.towers}
    try:
        ours = run(case, wrap, scope, later, compiled_first=compiled_first)
    except Exception as error:
        clear = case.verdict == "clear error" and isinstance(error, ValueError)
        clear = clear and case.expect in str(error)
        if not clear:
            traceback.print_exc()
        verdict = "clear error" if clear else "raises"
        message = f"{type(error).__name__}: {_words(error)}"
        return record | {"verdict": verdict, "message": message}
    theirs = _one_device(case, later)
    apart = {
        name: value
        for name, value in differences(ours, theirs).items()
        if case.only in name
    }
    where = max(apart, key=apart.get)
    equal = apart[where] <= case.tolerance or is_rounding(case, apart, later)
    record["verdict"] = ("rule" if case.only else "equal") if equal else "differs"
    record |= {"difference": apart[where], "where": where}
    return record | (
        {"metrics": _by_metric(apart)} if case.group.startswith("metrics") else {}
    )


def is_rounding(
    case: Case, differences_of: Mapping[str, float], later: Collection[str] = LATER
) -> bool:
    """Tells whether differences are no larger than the rounding of 16 bits.

    Args:
        case: What was run.
        differences_of: Differences from one device, by array.
        later: See `run`.

    Returns:
        Whether each difference is within the tolerance, or no larger than that between
        one device in 16 bits and in float32, if that is small enough for rounding.
        False for cases without 16 bits.
    """
    if "16" not in case.policy:
        return False
    own = differences(_in_float32(case, later), _one_device(case, later))
    return all(
        value <= case.tolerance or value <= own.get(name, 0.0) <= MOST_ROUNDING
        for name, value in differences_of.items()
    )


def rounding(case: Case, where: str) -> dict[str, float]:
    """Tells how far one device is from itself, if it only rounds otherwise.

    Args:
        case: What to run.
        where: Name of an array of `run`.

    Returns:
        The difference in that array from the run that `outcome` compares with, if one
        device compiles as the case does, and if it computes 16 bits in 32.
    """
    others = {"compiled": run(case)}
    if "16" in case.policy:
        others["in float32"] = _in_float32(case, LATER)
    expected = _one_device(case, LATER)
    return {name: differences(other, expected)[where] for name, other in others.items()}


def _equal_eagerly(case):
    """Tells whether Keras computes the same if nothing is traced."""
    traced = case.group.startswith("metrics")
    traced |= case.group in NOT_EAGERLY or str(case) in NOT_EAGERLY
    return not traced and not isinstance(case.loss, list | dict)


def _plain(case, later):
    if case.reference:
        case = dataclasses.replace(case, make=lambda: case.reference(case.towers))
    return run(case, later=later, plain=True)


def _in_float32(case, later):
    """Runs the case as one device computes it in 32 bits."""
    return _plain(dataclasses.replace(case, policy="float32"), later)


def _one_device(case, later):
    """Runs the case on one device, once for all layouts that follow on one another."""
    later, key = tuple(later), (str(case), case.towers if case.reference else None)
    if key not in _last or later not in ((), _last[key][0]):
        _last.clear()
        _last[key] = later, _plain(case, later)
    had, results = _last[key]
    if later == had:
        return results
    # The last layout of a case may only train.
    more = tuple(f"{name} " for name in (*LATER, "later"))
    return {name: value for name, value in results.items() if not name.startswith(more)}


_last: dict[tuple, tuple[Collection[str], dict[str, np.ndarray]]] = {}


def _words(error):
    """What an error says, without where TensorFlow was."""
    # TensorFlow's marks of nodes, Keras's bold face.
    text = re.sub(r"\{\{.*?\}\}\s*|\x1b\[\d*m", "", str(error))
    lines = [line.strip() for line in text.splitlines()]
    where = "File ", "Graph ", "Detected ", "[[", "<", "0 ", "2 root"
    said = [line for line in lines if line and not line.startswith(where)]
    return " ".join(said[:1] if "Graph execution" in text else said)[:300]


def _by_metric(found):
    metrics = {}
    for name, value in found.items():
        kind, *metric = name.split()
        if kind in ("history", "evaluate"):
            metrics[metric[0]] = max(value, metrics.get(metric[0], 0.0))
    return metrics

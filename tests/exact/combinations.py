"""Combinations of a model, a loss, an optimizer and a way to train, as cases.

Each line of combinations.txt is one: the words body, wrapper, loss, optimizer and
options. What follows on "=>" is a part of the message that it is refused with. They
were drawn at random once, without looking at other tests, and are fixed since.
"""

import functools
import pathlib

import keras
import numpy as np
from keras import layers, losses, ops

from tests.exact import bodies, cases
from tests.exact.cases import OUTPUTS

GROUP = "combinations"
FILE = pathlib.Path(__file__).with_suffix(".txt")


def _error(y, outputs):
    return outputs - ops.cast(y, outputs.dtype)


def _ratio(y, outputs):
    return ops.sum(ops.square(_error(y, outputs))) / (1 + ops.sum(ops.abs(outputs)))


# By what they are trained on. Classes follow on a softmax.
LOSSES = {
    "numbers": {
        "mse": losses.MeanSquaredError,
        "mae": losses.MeanAbsoluteError,
        "huber": losses.Huber,
        "log_cosh": losses.LogCosh,
        "cosine": losses.CosineSimilarity,
    },
    "one-hot": {
        "cce": functools.partial(losses.CategoricalCrossentropy, label_smoothing=0.1),
        "focal": losses.CategoricalFocalCrossentropy,
        "kld": losses.KLDivergence,
        "bce": losses.BinaryCrossentropy,
        "poisson": losses.Poisson,
        "hinge": losses.SquaredHinge,
        "dice": losses.Dice,
        "tversky": losses.Tversky,
    },
    "labels": {
        "scce": losses.SparseCategoricalCrossentropy,
        "ignore": functools.partial(
            losses.SparseCategoricalCrossentropy, ignore_class=1
        ),
    },
}
OWN_LOSSES = {
    "rows": lambda y, p: ops.mean(ops.square(_error(y, p)), axis=-1),
    "squares": lambda y, p: ops.sum(ops.square(_error(y, p))),
    "rmse": lambda y, p: ops.sqrt(ops.mean(ops.square(_error(y, p)))),
    "ratio": _ratio,
    "contrast": cases._contrast,
    "ranking": cases._ranking,
    "python": cases._in_python,
}
OPTIMIZERS = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "clipnorm": ("SGD", {"clipnorm": 0.1}),
    "global_clipnorm": ("SGD", {"global_clipnorm": 0.2}),
    "clipvalue": ("SGD", {"clipvalue": 0.02}),
    "ema": ("SGD", {"use_ema": True, "ema_overwrite_frequency": 2}),
    "decay": ("SGD", {"weight_decay": 0.1}),
    "accumulated": ("SGD", {"gradient_accumulation_steps": 2}),
    "accumulated_adam": (
        "Adam",
        {"gradient_accumulation_steps": 3, "global_clipnorm": 0.5},
    ),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "rmsprop": ("RMSprop", {"momentum": 0.5}),
    **{
        name.lower(): (name, {})
        for name in ("Adam", "AdamW", "Adagrad", "Adamax", "Nadam", "Ftrl")
    },
}


def _inputs(kind, n):
    shape = bodies.SHAPES[kind]
    if kind == "pairs":
        return {name: cases._random(n, *each) for name, each in shape.items()}
    if kind == "ids":
        return np.random.default_rng(0).integers(0, bodies.IDS, (n, *shape))
    return cases._random(n, *shape)


def _targets(kind, n, outputs):
    if kind == "numbers":
        return cases._random(n, *outputs, seed=1)
    labels = cases._labels((n, *outputs[:-1]))
    return np.eye(OUTPUTS, dtype="float32")[labels] if kind == "one-hot" else labels


def _case(kind: str, line: str) -> cases.Case:
    """Makes a case of a line; see the module's text.

    The options are: batch=N, towers=N, shares, gathered, packed, policy=NAME, eager,
    xla, steps=N (in a call), each (step has an output), decayed (learning rate),
    weighted (metrics), weights=KIND and, in a second `fit`, second=KIND. These kinds
    are no, some, and zero, which are zero for the first three examples.
    """
    row, _, message = line.partition(" => ")
    body, wrapper, loss, optimizer, *words = row.split()
    has = {name: value for name, _, value in (word.partition("=") for word in words)}
    source, call = bodies.BODIES[body]
    loss, _, reduction = loss.partition("/")
    target = next((t for t, names in LOSSES.items() if loss in names), "numbers")
    numbers = target == "numbers"
    batch, towers = int(has.get("batch", 8)), int(has.get("towers", 2))
    outputs = (bodies.SHAPES["steps"][0], OUTPUTS) if "each" in has else (OUTPUTS,)

    def make():
        inputs, hidden = bodies.hidden(source, call)
        hidden = bodies.WRAPPERS[wrapper]()(hidden)
        if "each" not in has and len(hidden.shape) > 2:
            hidden = layers.Flatten()(hidden)
        last = layers.Dense(
            OUTPUTS,
            None if numbers else "softmax",
            # A ranking does not depend on it: its gradient would be rounding.
            use_bias=loss != "ranking",
            dtype="float32",
        )
        return keras.Model(inputs, last(hidden))

    def batches(weights):
        sizes = batch, batch, (batch + 1) // 2
        n = sum(sizes)
        given = {"some": [1 + cases._weights(n)], "zero": [cases._weights(n)]}
        arrays = _inputs(source, n), _targets(target, n, outputs)
        return cases._cut(*arrays, *given.get(weights, []), sizes=sizes)

    def compile():
        metrics = "weighted_metrics" if "weighted" in has else "metrics"
        return {
            "run_eagerly": "eager" in has,
            "jit_compile": "xla" in has,
            "steps_per_execution": int(has.get("steps", 1)),
            metrics: ["mae" if numbers else "accuracy"],
        }

    name, arguments = OPTIMIZERS[optimizer]
    if name == "SGD":
        # A sum is as large as the batch; so is its gradient.
        summed = reduction == "sum" or loss == "squares"
        arguments = arguments | {"learning_rate": 0.002 if summed else 0.05}
    options = {"loss_placement": "gathered"} if "gathered" in has else {}
    options |= {"shares": tuple(range(1, towers + 1))} if "shares" in has else {}
    options |= {"packed": True} if "packed" in has else {}
    return cases.Case(
        group=GROUP,
        name=f"{kind}: {row}",
        make=make,
        batches=lambda: batches(has.get("weights")),
        loss=OWN_LOSSES.get(loss) or LOSSES[target][loss](reduction=reduction),
        optimizer=cases._optimizer(name, **arguments),
        compile=compile,
        fit={"callbacks": [cases._Decay()]} if "decayed" in has else {},
        towers=towers,
        options=options,
        policy=has.get("policy", "float32"),
        expect=message or "equal",
        again=(lambda: batches(has["second"])) if "second" in has else None,
    )


def _read():
    """The cases of each kind."""
    found = {}
    for line in FILE.read_text().splitlines():
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            kind = next(reversed(found))
            found[kind].append(_case(kind, line))
    return found


BY_KIND = _read()
CASES = [case for found in BY_KIND.values() for case in found]

"""Combinations of a model, a loss, an optimizer and a way to train, as cases.

Each line of combinations.txt is one: the words body, wrapper, loss, optimizer and
options. They
were drawn at random, in two rounds, without looking at other tests, and stay fixed.
"""

import functools
import pathlib

import keras
import numpy as np
from keras import layers, losses, ops

from tests.exact import bodies, cases
from tests.exact.case import Case
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
        "msle": losses.MeanSquaredLogarithmicError,
        "mape": losses.MeanAbsolutePercentageError,
        "cosine": losses.CosineSimilarity,
    },
    "one-hot": {
        "cce": functools.partial(losses.CategoricalCrossentropy, label_smoothing=0.1),
        "focal": losses.CategoricalFocalCrossentropy,
        "kld": losses.KLDivergence,
        "bce": losses.BinaryCrossentropy,
        "poisson": losses.Poisson,
        "binary_focal": losses.BinaryFocalCrossentropy,
        "hinge": losses.Hinge,
        "squared_hinge": losses.SquaredHinge,
        "categorical_hinge": losses.CategoricalHinge,
        "dice": losses.Dice,
        "dice_of_rows": functools.partial(losses.Dice, axis=-1),
        "tversky": losses.Tversky,
    },
    "labels": {
        "scce": losses.SparseCategoricalCrossentropy,
        "ignore": functools.partial(
            losses.SparseCategoricalCrossentropy, ignore_class=1
        ),
        "circle": losses.Circle,
    },
}
OWN_LOSSES = {
    "rows": lambda y, p: ops.mean(ops.square(_error(y, p)), axis=-1),
    "squares": lambda y, p: ops.sum(ops.square(_error(y, p))),
    "rmse": lambda y, p: ops.sqrt(ops.mean(ops.square(_error(y, p)))),
    "ratio": _ratio,
    "centered": lambda y, p: ops.mean(ops.square(_error(y, p - ops.mean(p, axis=0)))),
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
    "ema_at_end": ("SGD", {"use_ema": True, "ema_momentum": 0.5}),
    "decay": ("SGD", {"weight_decay": 0.1}),
    "schedule": (
        "SGD",
        {"learning_rate": keras.optimizers.schedules.CosineDecay(0.1, 10)},
    ),
    "accumulated": ("SGD", {"gradient_accumulation_steps": 2}),
    "accumulated_adam": (
        "Adam",
        {"gradient_accumulation_steps": 3, "global_clipnorm": 0.5},
    ),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "rmsprop": ("RMSprop", {"momentum": 0.5}),
    "loss_scale": ("LossScaleOptimizer", {}),
    **{
        name.lower(): (name, {})
        for name in "Adam AdamW Adadelta Adafactor Adagrad Adamax Nadam Ftrl Lamb Lion"
        " Muon".split()
    },
}
# A sum is as large as the batch, a percentage large where a target is small; so are
# their gradients.
LARGE = "/sum", "squares", "mape"


class _Shrink(keras.callbacks.Callback):
    """Assigns a weight after each step."""

    def on_train_batch_end(self, batch, logs=None):
        first = self.model.trainable_variables[0]
        first.assign(0.9 * first)


CALLBACKS = {
    "decayed": keras.callbacks.LearningRateScheduler(lambda _, rate: rate / 2),
    "shrunk": _Shrink(),
}
CLASS_WEIGHTS = {0: 0.5, 1: 2.0, 2: 1.0}


def _loss(word):
    """What a loss is trained on, and the loss."""
    name, _, reduction = word.partition("/")
    if name in OWN_LOSSES:
        return "numbers", OWN_LOSSES[name]
    target = next(target for target, names in LOSSES.items() if name in names)
    return target, LOSSES[target][name](reduction=reduction)


def _scaled(optimizer, scale):
    """Begins with a small scale of the loss: no 16 bits of a sum overflow."""
    return lambda: keras.optimizers.LossScaleOptimizer(optimizer(), scale)


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


def _output(hidden, target, loss, each):
    """The layers that follow on a body."""
    if not each and len(hidden.shape) > 2:
        hidden = layers.Flatten()(hidden)
    last = layers.Dense(
        OUTPUTS,
        None if target == "numbers" else "softmax",
        # These do not depend on it: its gradient would be rounding.
        use_bias=loss not in ("ranking", "centered"),
        dtype="float32",
    )
    return last(hidden)


def _case(kind: str, line: str) -> Case:
    """Makes a case of a line; see the module's text.

    The options are: also=LOSS (of a second output), batch=N, towers=N, shares,
    gathered, packed, prefetch=N, policy=NAME, scale=N (of the loss), eager, xla,
    steps=N (in a call), each (step has an output), a callback's name, weighted
    (metrics), weights=KIND and, in a second `fit`, second=KIND. These kinds are no,
    some, zero, which are zero for the first three examples, and class, for each `fit`.
    """
    body, wrapper, loss, optimizer, *words = line.split()
    has = {name: value for name, _, value in (word.partition("=") for word in words)}
    source, call = bodies.BODIES[body]
    names = [loss, has["also"]] if "also" in has else [loss]
    targets, found = zip(*map(_loss, names), strict=True)
    batch, towers = int(has.get("batch", 8)), int(has.get("towers", 2))
    outputs = (bodies.SHAPES["steps"][0], OUTPUTS) if "each" in has else (OUTPUTS,)

    def one(nest):
        return nest if "also" in has else nest[0]

    def make():
        inputs, hidden = bodies.hidden(source, call)
        hidden = bodies.WRAPPERS[wrapper]()(hidden)
        each = [
            _output(hidden, target, name, "each" in has)
            for target, name in zip(targets, names, strict=True)
        ]
        return keras.Model(inputs, one(each))

    def batches(weights):
        sizes = batch, batch, (batch + 1) // 2
        n = sum(sizes)
        arrays = [
            _inputs(source, n),
            one(tuple(_targets(t, n, outputs) for t in targets)),
        ]
        if weights in ("some", "zero"):
            values = cases._weights(n) + (weights == "some")
            arrays.append(one((values,) * len(names)))
        return cases._cut(*arrays, sizes=sizes)

    def compile():
        metrics = [["mae" if t == "numbers" else "accuracy"] for t in targets]
        return {
            "run_eagerly": "eager" in has,
            "jit_compile": "xla" in has,
            "steps_per_execution": int(has.get("steps", 1)),
            "weighted_metrics" if "weighted" in has else "metrics": one(metrics),
        }

    name, arguments = OPTIMIZERS[optimizer]
    if name == "SGD":
        large = any(each.endswith(LARGE) or each.startswith(LARGE) for each in names)
        arguments = {"learning_rate": 0.002 if large else 0.05} | arguments
    optimizer = cases._optimizer(name, **arguments)
    if "scale" in has:
        optimizer = _scaled(optimizer, float(has["scale"]))
    fit = {"callbacks": [made for name, made in CALLBACKS.items() if name in has]}
    fit |= {"class_weight": CLASS_WEIGHTS} if has.get("weights") == "class" else {}
    options = {"loss_placement": "gathered"} if "gathered" in has else {}
    options |= {"split_ratios": tuple(range(1, towers + 1))} if "shares" in has else {}
    options |= {"packed": True} if "packed" in has else {}
    options |= {"prefetch": int(has["prefetch"])} if "prefetch" in has else {}
    return Case(
        group=GROUP,
        name=f"{kind}: {line}",
        make=make,
        batches=lambda: batches(has.get("weights")),
        loss=one(list(found)),
        optimizer=optimizer,
        compile=compile,
        fit=fit,
        towers=towers,
        options=options,
        policy=has.get("policy", "float32"),
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

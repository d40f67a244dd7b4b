"""Cases of what the command line trains: each --task, with a model that it names.

Model, loss, metrics, optimizer and what becomes of a batch are those that towers.train
makes of settings and of what the data have.
"""

import keras
import numpy as np
from keras import layers

from tests.exact import cases
from tests.exact.cases import UNEVEN
from towers import models
from towers.input_pipeline.sources.targets import IGNORED, Target
from towers.train.parts import setup
from towers.train.parts import training as training_parts
from towers.train.parts.facts import DataFacts
from towers.train.parts.model import make_preprocess
from towers.train.parts.task import TASKS
from towers.train.parts.training import build_optimizer
from towers.train.settings import Settings

TOKENS, VOCABULARY, SIDE = 6, 11, 4
TABLES = {"film": 7, "person": 5}
SETTINGS = {"optimizer": "sgd", "learning_rate": 0.05}
# Small ones, and what draws random numbers draws none.
_TRANSFORMER = {"layers": 1, "width": 8, "heads": 2, "dropout": 0.0}
OPTIONS = {
    "cnn": {"widths": (4,), "dropout": 0.0},
    "dlrm": {"width": 4, "bottom": (5,), "top": (6,)},
    "mlp": {"widths": (8,)},
    "transformer_encoder": _TRANSFORMER,
    "transformer_lm": _TRANSFORMER,
    "unet": {"layers": 1, "width": 2},
}


def _row(n):
    return cases._random(n, cases.FEATURES)


def _pictures(n):
    shape = n, SIDE, SIDE, 1
    return np.random.default_rng(0).integers(0, 255, shape).astype("uint8")


def _tokens(n):
    """Padded texts; those of the first of three towers have one token each."""
    random = np.random.default_rng(0)
    ids = random.integers(1, VOCABULARY, (n, TOKENS)).astype("int32")
    lengths = random.integers(1, TOKENS + 1, (n, 1))
    lengths[:3] = 1
    return np.where(np.arange(TOKENS) < lengths, ids, 0)


def _columns(n):
    random = np.random.default_rng(0)
    ids = {name: random.integers(0, size, n) for name, size in TABLES.items()}
    return {"dense": _row(n)} | ids


# What an example is, by the input's kind: how to make some, and what a model gets.
_INPUTS = {
    "row": (_row, keras.KerasTensor((None, cases.FEATURES))),
    "image": (_pictures, keras.KerasTensor((None, SIDE, SIDE, 1))),
    "tokens": (_tokens, keras.KerasTensor((None, TOKENS), "int32")),
    "columns": (
        _columns,
        {"dense": keras.KerasTensor((None, cases.FEATURES))}
        | {name: keras.KerasTensor((None,), "int64") for name in TABLES},
    ),
}


def _targets(kind, size, shape, x):
    """What the data give for examples, as sources do."""
    n = len(keras.tree.flatten(x)[0])
    random = np.random.default_rng(1)
    if kind == "numbers":
        return random.normal(2.0, size=(n, size)).astype("float32")
    if kind == "labels":
        return random.integers(0, 2, (n, size)).astype("float32")
    y = random.integers(0, size, (n, *shape))
    if kind == "mask":
        y[random.random(y.shape) < 0.3] = IGNORED
        y[:3] = IGNORED  # a whole tower's
    if kind == "tags":
        y[x == 0] = -1
    return y


# Of each task: what an example is, the model, the size of the target, and what an
# example of it has for shape.
WITH_MODELS = {
    "classification": [("row", "mlp", 3), ("image", "cnn", 3), ("columns", "dlrm", 3)],
    "regression": [("row", "mlp", 2, (2,)), ("columns", "dlrm", 1, (1,))],
    "binary": [("row", "mlp", 2), ("columns", "dlrm", 2)],
    "multilabel": [("row", "mlp", 3, (3,)), ("columns", "dlrm", 3, (3,))],
    "segmentation": [("image", "unet", 3, (SIDE, SIDE))],
    "text_classification": [("tokens", "transformer_encoder", 3)],
    "tagging": [("tokens", "transformer_encoder", 4, (TOKENS,))],
    "language_model": [("tokens", "transformer_lm", VOCABULARY, (TOKENS,))],
}


def _weights(name, x, y):
    """As the pipeline weighs what is padded: only tags, and tokens that follow."""
    if name == "tagging":
        return (y >= 0).astype("float32")
    following = np.pad(x[:, 1:], [(0, 0), (0, 1)]) > 0
    return following.astype("float32")


def task(
    name,
    example,
    way="",
    weights=None,
    settings=None,
    further=None,
    norm=None,
    **fields,
):
    """A case of a task.

    Args:
        name: Of the task.
        example: One of `WITH_MODELS`.
        way: What is special about it.
        weights: Makes sample weights of a name, inputs and targets, if there are any.
        settings: Further settings.
        further: Further arguments of `compile`.
        norm: Attributes to set of each BatchNormalization, which otherwise differs from
            one device by design.
        **fields: Of the case.
    """
    kind, model, size, shape = (*example, ())[:4]
    draw, inputs = _INPUTS[kind]
    settings = Settings(task=name, model=model, **SETTINGS | (settings or {}))
    facts = DataFacts(
        "the data",
        kind,
        inputs,
        Target(TASKS[name].kind, size),
        shape,
        vocabulary_size=VOCABULARY if kind == "tokens" else None,
        table_sizes=TABLES if kind == "columns" else None,
    )
    found = setup.of(settings, facts, None)
    n = sum(UNEVEN)

    def make():
        built = models.build(model, found.for_model, options=OPTIONS[model])
        for layer in built.layers:
            if isinstance(layer, layers.BatchNormalization):
                for each, value in (norm or {}).items():
                    setattr(layer, each, value)
        return built

    def batches():
        x = draw(n)
        y = _targets(found.task.kind, size, shape, x)
        if name == "language_model":
            y = np.pad(x[:, 1:], [(0, 0), (0, 1)])
        given = [] if weights is None else [weights(name, x, y)]
        one_hot = size if training_parts.is_one_hot(found) else None
        tensors = keras.tree.map_structure(keras.ops.convert_to_tensor, (x, y))
        local = make_preprocess(found, one_hot)(*tensors, True)
        return cases._cut(*keras.tree.map_structure(np.asarray, local), *given)

    def compile():
        key = "weighted_metrics" if found.task.weighted else "metrics"
        made = training_parts.metrics(found, True)
        if training_parts.is_one_hot(found):
            # In a run, metrics get the classes, which `preprocess` has changed here.
            made = [keras.metrics.CategoricalAccuracy("accuracy")]
        return {key: made} | (further or {})

    def optimizer():
        made = build_optimizer(settings, n, 1)
        if fields.get("policy") != "mixed_float16":
            return made
        # With a small scale of the loss, no sum overflows; see docs/trust/exactness.md.
        return keras.optimizers.LossScaleOptimizer(made, 2.0**8)

    return cases._case(
        "tasks",
        ", ".join(filter(None, [name, model, way])),
        make,
        batches,
        training_parts.loss(found, True),
        optimizer=optimizer,
        compile=compile,
        **fields,
    )


WAYS = {
    "2 towers": {"towers": 2},
    "4 towers": {"towers": 4},
    "shares (1, 2, 3)": {"options": {"split_ratios": (1, 2, 3)}},
    "--accumulate_steps": {"settings": {"accumulate_steps": 2}},
    "--clip_norm": {"settings": {"clip_norm": 0.05}},
    "--optimizer=adamw --ema": {
        "settings": {
            "optimizer": "adamw",
            "learning_rate": 0.001,
            "weight_decay": 0.1,
            "ema": 0.9,
        }
    },
    "--dtype=fp16": {"policy": "mixed_float16"},
    "--enable_xla": {"further": {"jit_compile": True}},
    "--steps_per_loop": {"further": {"steps_per_execution": 3}},
    "--loss_placement=gathered": {"options": {"loss_placement": "gathered"}},
}
_PADDED = {"weights": _weights}
_SOME = "2 towers", "--accumulate_steps", "--clip_norm", "--dtype=fp16"
# What is trained in these ways: the language model in all, the others in some.
_DEEP = {
    "segmentation": {"norm": {"trainable": False}},
    "tagging": _PADDED,
    "language_model": _PADDED,
}
_NORMS = {
    "synchronized BatchNormalization": {"synchronized": True},
    "frozen BatchNormalization": {"trainable": False},
}


def _tasks():
    for name, examples in WITH_MODELS.items():
        for example in examples:
            if example[0] == "image":
                for way, norm in _NORMS.items():
                    yield task(name, example, way, norm=norm)
            else:
                yield task(name, example, **_DEEP.get(name, {}))
        for way in WAYS if name == "language_model" else _SOME if name in _DEEP else ():
            yield task(name, examples[0], way, **_DEEP[name], **WAYS[way])
    for name in ("classification", "text_classification"):
        example = WITH_MODELS[name][0]
        yield task(
            name,
            example,
            "--label_smoothing --class_weight",
            settings={"label_smoothing": 0.1},
            fit={"class_weight": {0: 0.5, 1: 1.5, 2: 3.0}},
        )
    for name in ("regression", "binary"):
        example = WITH_MODELS[name][1]
        for way in ("2 towers", "--accumulate_steps", "--clip_norm"):
            yield task(name, example, way, **WAYS[way])
        yield task(
            name, example, "weights (n,)", lambda *_: cases._weights(sum(UNEVEN))
        )
    # Of bfloat16's three digits, sums of errors that point one way cancel none.
    example = WITH_MODELS["regression"][0]
    yield task("regression", example, "--dtype=bf16", policy="mixed_bfloat16")
    example = WITH_MODELS["language_model"][0]
    yield task("language_model", example, "without weights")


CASES = [*_tasks()]

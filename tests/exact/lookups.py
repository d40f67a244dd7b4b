"""Cases of embeddings: rows that are looked up somewhere, and updated somehow: data."""

import functools

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.exact import cases
from tests.exact.cases import OUTPUTS, STEPS, UNEVEN
from towers.models.text.layers import TiedEmbedding

ROWS, WIDTH = 37, 4
# The last batch leaves two of three towers without an example.
SMALL = 4, 4, 4, 1


def _embedding(rows=ROWS, **options):
    return layers.Embedding(rows, WIDTH, **options)


def _ids(n, dtype="int32", low=0, high=ROWS, seed=0):
    return np.random.default_rng(seed).integers(low, high, (n, STEPS)).astype(dtype)


def _batches(make=_ids, sizes=UNEVEN):
    n = sum(sizes)
    return lambda: cases._cut(make(n), cases._random(n, OUTPUTS, seed=1), sizes=sizes)


def _mean(*body, **options):
    """The mean of what a layer makes of ids, and a Dense layer on top."""
    further = layers.GlobalAveragePooling1D, cases._dense(OUTPUTS)
    return cases._of(*body, *further, **{"shape": (STEPS,), "dtype": "int32"} | options)


def _kinds(n):
    """Ids of all types, negative ones, and few that are repeated."""
    return (
        _ids(n, "int64"),
        _ids(n, "uint8", seed=1),
        _ids(n, "float32", seed=2),
        _ids(n, low=-ROWS, seed=3),
        _ids(n, high=3, seed=4),
    )


def _several():
    """A table that is used twice, one with a constraint, one in a model, one frozen."""
    inputs = tuple(keras.Input((STEPS,), dtype=ids.dtype.name) for ids in _kinds(1))
    shared, other = _embedding(), _embedding(embeddings_constraint="unit_norm")
    nested = keras.Sequential([keras.Input((STEPS,), dtype="float32"), _embedding()])
    uses = [shared, shared, nested, other, _embedding(trainable=False)]
    rows = [use(ids) for use, ids in zip(uses, inputs, strict=True)]
    rows[1] = ops.tanh(rows[1])
    mean = layers.GlobalAveragePooling1D()(layers.Concatenate()(rows))
    return keras.Model(inputs, layers.Dense(OUTPUTS)(mean))


def _few_rows(ids):
    """A table with fewer rows than towers, whose ids count from the end."""
    rows = _embedding(2)(ids % 2 - 2) + _embedding()(ids)
    return layers.Dense(OUTPUTS)(layers.GlobalAveragePooling1D()(rows))


class Positions(layers.Layer):
    """Looks up the same rows for each example, as a transformer does for positions."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = _embedding(STEPS)

    def call(self, rows):
        return rows + self.table(ops.arange(ops.shape(rows)[1]))


class Picks(layers.Layer):
    """Picks the next table's rows by the rows of the one before."""

    def call(self, rows):
        return ops.argmax(rows, axis=-1)


def _rows_choose_rows(ids):
    rows = _embedding(embeddings_initializer="normal")(ids)
    both = rows + _embedding(WIDTH)(Picks()(rows))
    return layers.Dense(OUTPUTS)(layers.GlobalAveragePooling1D()(both))


class Tied(layers.Layer):
    """Takes its table, transposed, for the weights of its outputs."""

    def __init__(self):
        super().__init__()
        self.embedding = _embedding()

    def call(self, ids):
        mean = ops.mean(self.embedding(ids), axis=1)
        return ops.matmul(mean, ops.transpose(self.embedding.embeddings))[:, :OUTPUTS]


class BothWays(layers.Layer):
    """Calls a layer of a class of its own in both directions."""

    def __init__(self):
        super().__init__()
        self.embedding = TiedEmbedding(ROWS, WIDTH)

    def call(self, ids):
        logits = self.embedding(self.embedding(ids), reverse=True)
        return ops.mean(logits, axis=1)[:, :OUTPUTS]


class InLoop(layers.Layer):
    """A recurrent cell that looks up a row in each step."""

    state_size = WIDTH

    def __init__(self):
        super().__init__()
        self.embedding = _embedding()

    def call(self, ids, states):
        row = self.embedding(ops.cast(ids[:, 0], "int32"))
        state = ops.tanh(states[0] + row)
        return state, [state]


class InnerGraphs(layers.Layer):
    """Looks up rows in graphs within that of a tower."""

    def __init__(self):
        super().__init__()
        self.tables = [_embedding() for _ in range(4)]

    def call(self, ids):
        chosen, traced, mapped, vectorized = self.tables
        rows = [
            tf.cond(tf.size(ids) > 3, lambda: chosen(ids), lambda: 0 * chosen(ids)),
            tf.function(traced)(ids),
            ops.map(mapped, ids),
            ops.vectorized_map(vectorized, ids),
        ]
        return ops.concatenate(rows, axis=-1)


class Combiners(layers.Layer):
    """Combines the rows of ids that are not masked: their sum, and two means."""

    def __init__(self):
        super().__init__()
        self.embedding = _embedding(mask_zero=True)

    def call(self, ids):
        rows = self.embedding(ids)
        weights = ops.cast(self.embedding.compute_mask(ids), rows.dtype)
        weights = weights * (1 + ops.cast(ids % 3, rows.dtype))
        total = ops.einsum("bi,bid->bd", weights, rows)
        sizes = [ops.sum(weights**p, axis=1, keepdims=True) ** (1 / p) for p in (1, 2)]
        means = [total / ops.maximum(size, 1e-6) for size in sizes]
        return ops.concatenate([total, *means], axis=1)


def _adapted():
    model = _mean(_embedding)()
    model.layers[0].enable_lora(2)
    return model


def _built(kind):
    """A subclassed layer between ids and outputs, whose tables are there at once."""

    def make():
        model = _mean(kind)()
        model(_ids(2))
        return model

    return make


def _padded(n):
    return np.where(np.arange(STEPS) < 3, _ids(n), 0)


_OF_IDS = {"shape": (STEPS,), "dtype": "int32"}
_PLAIN, _OPTIMIZER = _mean(_embedding), cases._optimizer
_KINDS = {"make": _several, "batches": _batches(_kinds)}
MODELS = {
    "several tables": _KINDS,
    "regularized": {
        "make": _mean(cases._layer(_embedding, embeddings_regularizer="l2"))
    },
    "lora": {"make": _adapted},
    "tied": {"make": cases._of(Tied, **_OF_IDS)},
    "a class of its own": {
        "make": cases._of(BothWays, **_OF_IDS),
        "optimizer": _OPTIMIZER("Adam"),
    },
    "in a loop": {
        "make": cases._of(
            lambda: layers.RNN(InLoop()), cases._dense(OUTPUTS), shape=(STEPS, 1)
        ),
        "batches": _batches(lambda n: _ids(n, "float32")[..., None]),
    },
    "in inner graphs": {"make": _built(InnerGraphs), "options": {"strict": False}},
    "combiners": {
        "make": cases._of(Combiners, cases._dense(OUTPUTS), **_OF_IDS),
        "batches": _batches(_padded),
    },
    "rows choose rows": {
        "make": cases._functional(_rows_choose_rows, (STEPS,), dtype="int32"),
        "optimizer": _OPTIMIZER("Adam"),
    },
    "positions": {
        "make": _mean(_embedding, Positions),
        "optimizer": _OPTIMIZER("Adam"),
    },
    "mixed_float16": {"make": _PLAIN, "policy": "mixed_float16"},
    "mixed_bfloat16": {"make": _PLAIN, "policy": "mixed_bfloat16"},
}
# How the one with several tables is computed.
WAYS = {
    "run_eagerly": {"compile": lambda: {"run_eagerly": True}},
    "jit_compile": {"compile": lambda: {"jit_compile": True}},
    "steps_per_execution=2": {"compile": lambda: {"steps_per_execution": 2}},
    "loss_placement=gathered": {"options": {"loss_placement": "gathered"}},
    "shares (1, 2, 1)": {"options": {"split_ratios": (1, 2, 1)}},
}
_AVERAGED = {"use_ema": True, "ema_momentum": 0.5}
OPTIMIZERS = {
    "Adam": ("Adam", {}),
    "clipnorm": ("Adagrad", {"clipnorm": 0.05}),
    "global_clipnorm": ("SGD", {"momentum": 0.9, "global_clipnorm": 0.1}),
    "accumulation": ("Adam", {"gradient_accumulation_steps": 2}),
    "weight decay": ("AdamW", {"weight_decay": 0.1}),
    "averages": ("RMSprop", _AVERAGED | {"ema_overwrite_frequency": 2}),
}


def _lookups():
    case = functools.partial(cases._case, "lookups")
    for name, fields in MODELS.items():
        yield case(name, **{"batches": _batches()} | fields)
    for name, fields in WAYS.items():
        yield case(f"several tables, {name}", **_KINDS, **fields)
    few = {
        "make": cases._functional(_few_rows, (STEPS,), dtype="int32"),
        "batches": _batches(sizes=SMALL),
    }
    for name, (kind, options) in OPTIMIZERS.items():
        optimizer = _OPTIMIZER(kind, **options)
        yield case(f"fewer rows than towers, {name}", optimizer=optimizer, **few)
    yield case(
        "fewer rows than towers, averages in the place of weights",
        optimizer=_OPTIMIZER("SGD", momentum=0.9, **_AVERAGED),
        fit={
            "validation_data": _batches(sizes=(7,))()[0],
            "callbacks": [keras.callbacks.SwapEMAWeights()],
        },
        **few,
    )


CASES = [*_lookups()]

"""The cases that K towers have to compute as one device does: data, nothing of ours.

A case is a model, the batches of an epoch and what `compile` and `fit` get. Adding one
is a line in the list of its group. Models are as small as they can be: what takes time
is tracing them. combinations.py has more.
"""

import functools
import inspect

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, ops, optimizers, regularizers

from tests.exact.case import Case
from tests.exact.case import sgd as _sgd

FEATURES, OUTPUTS, STEPS = 6, 3, 5
EVEN, UNEVEN = (6, 6, 6), (8, 8, 5)


# Data.


def _random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _cut(*nests, sizes=UNEVEN):
    """Cuts nests of arrays into batches of these sizes."""
    ends = np.cumsum(sizes)
    return [
        tuple(keras.tree.map_structure(lambda a: a[end - n : end], t) for t in nests)  # noqa: B023
        for n, end in zip(sizes, ends, strict=True)
    ]


def _labels(rows, seed=1):
    return np.random.default_rng(seed).integers(0, OUTPUTS, rows)


def _numbers(sizes=UNEVEN, shape=(FEATURES,), out=(OUTPUTS,), weights=None, mean=0.0):
    """Batches of normal numbers, with sample weights of shape (n, *weights).

    The targets have this `mean`.
    """

    def batches():
        n = sum(sizes)
        arrays = [_random(n, *shape), mean + _random(n, *out, seed=1)]
        if weights is not None:
            arrays.append(_weights(n, *weights))
        return _cut(*arrays, sizes=sizes)

    return batches


def _weights(*shape):
    """Sample weights, zero for the whole share of the first of three towers."""
    values = np.random.default_rng(2).uniform(0.5, 2, shape).astype("float32")
    values[:3] = 0
    return values


def _classes(sizes=UNEVEN, kind="labels", weighted=False, shape=(FEATURES,)):
    """Batches for a classifier: targets are labels, one-hot, smooth, or signs."""

    def batches():
        n = sum(sizes)
        labels = _labels(n)
        one_hot = np.eye(OUTPUTS, dtype="float32")[labels]
        targets = {
            "labels": labels,
            "one-hot": one_hot,
            "smooth": 0.7 * one_hot + 0.1,
            "signs": 2 * one_hot - 1,
        }
        arrays = [_random(n, *shape), targets[kind]]
        return _cut(*arrays, *[_weights(n)] * weighted, sizes=sizes)

    return batches


def _words(sizes=UNEVEN, out=(1,), temporal=False, silent=0):
    """Batches of padded sequences of ids; the first `silent` ones are all padding."""

    def batches():
        random = np.random.default_rng(0)
        n = sum(sizes)
        ids = random.integers(1, 12, (n, STEPS))
        for row, length in zip(ids, random.integers(1, STEPS + 1, n), strict=True):
            row[length:] = 0
        ids[:silent] = 0
        arrays = [ids, _random(n, *out, seed=1)]
        return _cut(*arrays, *[_weights(n, STEPS)] * temporal, sizes=sizes)

    return batches


# Models.


def _of(*body, shape=(FEATURES,), dtype=None):
    """A function that builds a Sequential model; `body` are functions of no argument.

    A layer belongs to one model, so there is a new one each time.
    """
    return lambda: keras.Sequential(
        [keras.Input(shape, dtype=dtype), *[layer() for layer in body]]
    )


def _layer(kind, *args, **kwargs):
    return functools.partial(kind, *args, **kwargs)


_dense = functools.partial(_layer, layers.Dense)


def _mlp(units=OUTPUTS, activation=None, **options):
    """Two dense layers. Tanh has no corner that rounding could lead around."""
    return _of(_dense(8, "tanh", **options), _dense(units, activation, **options))


def _functional(call, *shapes, dtype=None):
    """A function that builds a functional model of `call(*inputs)`."""

    def make():
        inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
        return keras.Model(inputs[0] if len(inputs) == 1 else inputs, call(*inputs))

    return make


def _flat(*body, shape):
    """Layers on sequences or pictures, and three numbers out."""
    return _of(*body, layers.Flatten, _dense(OUTPUTS), shape=shape)


# The groups.


def _shares():
    cut = functools.partial(_case, "shares")
    for shares, sizes in [
        ((2, 3, 3), (16, 16)),
        ((2, 3, 3), UNEVEN),
        ((2, 3, 3), (2, 1)),
        ((1, 3), (8, 8)),
        ((1, 3), (5, 3, 1)),
        ((5, 1, 1, 1), (9, 8)),
    ]:
        yield cut(
            name=f"{shares}, batches of {sizes}",
            batches=_numbers(sizes, weights=()),
            towers=len(shares),
            options={"split_ratios": shares},
            compile=lambda: {"weighted_metrics": ["mae"]},
        )
    third = {"options": {"split_ratios": (2, 3, 3)}}
    yield cut(name="(2, 3, 3), loss of the whole batch", loss=_contrast, **third)
    yield cut(
        name="(2, 3, 3), mask",
        make=_tagger(),
        batches=_words(out=(STEPS, 1)),
        **third,
    )
    yield cut(
        name="(2, 3, 3), BatchNormalization(synchronized=True)",
        make=_normalised(),
        **third,
    )
    yield cut(
        name="(2, 3, 3), mixed_float16",
        policy="mixed_float16",
        **third,
    )


def _case(group, name, make=None, batches=None, loss="mse", **fields):
    return Case(group, name, make or _mlp(), batches or _numbers(), loss, **fields)


def _batches():
    for towers in (1, 2, 3, 4):
        yield _case("batches", f"sizes {UNEVEN}, {towers} towers", towers=towers)
    for sizes in [EVEN, (2, 2, 2), (1, 1), (5, 8, 8), (1, 8), (2, 7, 3, 1)]:
        yield _case("batches", f"sizes {sizes}", batches=_numbers(sizes))
    yield _case("batches", "sizes (3, 2, 1)", batches=_numbers((3, 2, 1)), towers=4)
    yield _case(
        "batches",
        "twenty-one steps",
        _mlp(kernel_regularizer="l2"),
        _classes((50, 50, 20)),
        losses.SparseCategoricalCrossentropy(from_logits=True),
        fit={"epochs": 7},
    )
    yield _case("batches", "of arrays, which fit cuts", **_arrays())
    yield _case(
        "batches",
        "with validation",
        fit={"validation_data": _numbers((7,))()[0], "validation_batch_size": 4},
    )
    yield from _inputs()
    yield from _outputs()
    yield from _targets()


def _arrays():
    x, y = _numbers((19,))()[0]
    return {"fit": {"x": x, "y": y, "batch_size": 8, "shuffle": False}}


def _inputs():
    def batches(nest):
        def pair():
            x, other, y = _random(21, 4), _random(21, 2, seed=3), _random(21, 3, seed=1)
            return _cut(nest(x, other), y)

        return pair

    def model(nest):
        def make():
            a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
            both = layers.Concatenate()([layers.Dense(4, "tanh")(a), b])
            return keras.Model(nest(a, b), layers.Dense(OUTPUTS)(both))

        return make

    for name, nest in {
        "dict": lambda a, b: {"a": a, "b": b},
        "tuple": lambda a, b: (a, b),
        "nested": lambda a, b: {"left": {"one": a}, "right": (b,)},
    }.items():
        yield _case("batches", f"{name} of inputs", model(nest), batches(nest))
    yield _case("batches", "ragged inputs", RaggedSum, _ragged)
    yield _case(
        "batches",
        "sparse inputs",
        lambda: keras.Sequential([keras.Input((9,), sparse=True), layers.Dense(3)]),
        _sparse,
    )
    yield _case(
        "batches",
        "ragged and sparse inputs, not built",
        lambda: keras.Sequential([OfBothKinds(), layers.Dense(OUTPUTS)]),
        lambda: [
            ((ragged, sparse), y)
            for (ragged, y), (sparse, _) in zip(_ragged(), _sparse(), strict=True)
        ],
    )
    yield _case("batches", "integer images", _pixels, _picture_bytes)


def _ragged():
    random = np.random.default_rng(0)
    lists = [random.normal(size=random.integers(1, 5)).tolist() for _ in range(21)]
    y = _random(21, OUTPUTS)
    bounds = [(0, 8), (8, 16), (16, 21)]
    return [
        (tf.ragged.constant(lists[a:b], dtype="float32"), y[a:b]) for a, b in bounds
    ]


def _sparse():
    x = _random(21, 9)
    pairs = _cut(np.where(x > 0.5, x, 0), _random(21, OUTPUTS, seed=1))
    return [(tf.sparse.from_dense(x), y) for x, y in pairs]


def _pixels():
    return keras.Sequential(
        [
            keras.Input((4, 4, 1), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Flatten(),
            layers.Dense(OUTPUTS),
        ]
    )


def _picture_bytes():
    pixels = np.random.default_rng(0).integers(0, 255, (21, 4, 4, 1)).astype("uint8")
    return _cut(pixels, _random(21, OUTPUTS))


class RaggedSum(keras.Model):
    """A linear model of the sums of rows of any length."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(OUTPUTS)

    def call(self, x):
        if isinstance(x, tf.RaggedTensor):
            x = tf.stack([tf.reduce_sum(x, 1), tf.reduce_sum(x * x, 1)], axis=1)
        else:  # Keras builds it with a placeholder.
            x = ops.stack([ops.sum(x, 1), ops.sum(x * x, 1)], axis=1)
        return self.out(x)


class OfBothKinds(keras.layers.Layer):
    """Asks its inputs for what only ragged and sparse tensors have."""

    def build(self, shapes):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        ragged, sparse = inputs
        return self.scale * ragged.to_tensor(shape=[None, 9]) + tf.sparse.to_dense(
            sparse
        )


def _outputs():
    def as_dict(kind, size):
        return {"kind": kind, "size": size}

    def as_list(kind, size):
        return [kind, size]

    def model(nest):
        def make():
            x = keras.Input((FEATURES,))
            hidden = layers.Dense(8, "tanh")(x)
            kind = layers.Dense(OUTPUTS, name="kind")(hidden)
            return keras.Model(x, nest(kind, layers.Dense(1, name="size")(hidden)))

        return make

    def batches(nest, weighted=False):
        def data(*pair):
            # tf.data would make one tensor of a list.
            return tuple(nest(*pair)) if nest is as_list else nest(*pair)

        def pair():
            targets = data(_labels(21), _random(21, 1, seed=1))
            weights = [data(_weights(21), _weights(21) ** 2)] * weighted
            return _cut(_random(21, FEATURES), targets, *weights)

        return pair

    cross_entropy = losses.SparseCategoricalCrossentropy(from_logits=True)
    for name, nest in {"dict": as_dict, "list": as_list}.items():
        for weighted in (False, True):
            yield _case(
                "batches",
                f"{name} of outputs, each with loss, loss weight, metrics"
                + ", sample weights" * weighted,
                model(nest),
                batches(nest, weighted),
                nest(cross_entropy, "huber"),
                compile=lambda nest=nest: {
                    "loss_weights": nest(1.0, 0.3),
                    "metrics": nest(["accuracy"], ["mae"]),
                    "weighted_metrics": nest(["accuracy"], ["mse"]),
                },
            )
    both = {"make": model(as_dict), "batches": batches(as_dict)}
    yield _case(
        "batches",
        "an output without a loss",
        **both,
        loss={"kind": cross_entropy, "size": None},
        compile=lambda: {"metrics": {"size": ["mae"]}},
    )
    yield _case(
        "batches",
        "outputs of two reductions",
        **both,
        loss={
            "kind": losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="sum"
            ),
            "size": "mse",
        },
        optimizer=lambda: optimizers.SGD(0.01),
    )


def _targets():
    yield _case("batches", "inputs only, add_loss", _adds(_mean), _inputs_only, None)
    yield _case("batches", "targets None", _adds(_mean), _no_targets, None)
    yield _case("batches", "sample weights", batches=_numbers(weights=()))
    yield _case("batches", "sample weights (n, 1)", batches=_numbers(weights=(1,)))
    yield _case(
        "batches",
        "temporal sample weights",
        _of(_dense(2), shape=(STEPS, FEATURES)),
        _numbers(shape=(STEPS, FEATURES), out=(STEPS, 2), weights=(STEPS,)),
        compile=lambda: {"weighted_metrics": ["mae"]},
    )
    yield _case(
        "batches",
        "temporal sample weights and a mask",
        _tagger(),
        _words(out=(STEPS, 1), temporal=True),
        compile=lambda: {"metrics": ["mae"], "weighted_metrics": ["mae"]},
    )
    for kind, loss in {
        "labels": "sparse_categorical_crossentropy",
        "one-hot": "categorical_crossentropy",
    }.items():
        yield _case(
            "batches",
            f"class weights, {kind}",
            _mlp(activation="softmax"),
            _classes(kind=kind),
            loss,
            fit={"class_weight": {0: 0.5, 1: 1.5, 2: 3.0}},
        )
    yield _case(
        "batches",
        "masked sequences, all padding on the first tower",
        _tagger(),
        _words(out=(STEPS, 1), silent=3),
    )
    yield _case(
        "batches",
        "masked sequences, last state",
        _of(
            _layer(layers.Embedding, 12, 4, mask_zero=True),
            _layer(layers.LSTM, 4),
            _dense(1),
            shape=(STEPS,),
            dtype="int32",
        ),
        _words(),
    )
    for loss in ("mse", "cosine_similarity", "kl_divergence"):
        yield _case(
            "batches",
            f"outputs of shape (n,), {loss}",
            _of(_dense(1, "sigmoid"), _layer(layers.Reshape, ())),
            _numbers(out=()),
            loss,
        )
    for name, loss in {"": _of_rows, ", coupled": _of_all_rows}.items():
        yield _case(
            "batches",
            f"outputs of several rows an example{name}",
            _functional(_in_rows, (STEPS, FEATURES)),
            _numbers(shape=(STEPS, FEATURES), out=(2 * STEPS,)),
            loss,
        )
    yield _case(
        "batches",
        "outputs of shape (n,), sample weights",
        _of(_dense(1), _layer(layers.Reshape, ())),
        _numbers(out=(), weights=()),
    )


def _in_rows(x):
    return ops.reshape(layers.Dense(2)(x), (-1, 2))


def _of_rows(y, outputs):
    return ops.mean(ops.square(ops.reshape(y, (-1, 2)) - outputs))


def _of_all_rows(y, outputs):
    return ops.sqrt(_of_rows(y, outputs))


def _inputs_only():
    return [(x,) for x, _ in _numbers()()]


def _no_targets():
    return [(x, None, w) for x, _, w in _numbers(weights=())()]


def _tagger():
    """One number for each word, masked where there is none."""
    return _of(
        _layer(layers.Embedding, 12, 4, mask_zero=True),
        _layer(layers.SimpleRNN, 4, return_sequences=True),
        _dense(1),
        shape=(STEPS,),
        dtype="int32",
    )


# Losses.


def _contrast(y, outputs):
    """Couples the examples of a batch: pairs are near where their targets are."""
    y = ops.cast(y, outputs.dtype)
    wanted = ops.tanh(ops.matmul(y, ops.transpose(y)))
    return ops.mean(ops.square(ops.matmul(outputs, ops.transpose(outputs)) - wanted))


def _ranking(y, outputs):
    """A value for each example that depends on all others: a pairwise ranking."""
    scores, wanted = outputs[:, 0], ops.cast(y[:, 0], outputs.dtype)
    steps = scores[:, None] - scores[None]
    order = ops.sign(wanted[:, None] - wanted[None])
    return ops.mean(ops.softplus(-order * steps), axis=1)


def _quartic(y, outputs):
    return ops.mean(ops.power(ops.cast(y, outputs.dtype) - outputs, 4))


class Quartic(keras.losses.Loss):
    """A loss of the user's, with Keras's reductions."""

    def call(self, y, outputs):
        return ops.mean(ops.power(ops.cast(y, outputs.dtype) - outputs, 4), axis=-1)


class OwnLoss(keras.Sequential):
    """Overrides `compute_loss`, with a mean over examples."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


class OwnCoupledLoss(keras.Sequential):
    """Overrides `compute_loss`, with one that couples the examples of a batch."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return _contrast(y, y_pred)


class LossOfVariables(keras.Sequential):
    """Overrides `compute_loss`, which looks at the variables, past the outputs."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        norms = [ops.sum(ops.square(v)) for v in self.trainable_variables]
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * ops.sum(ops.stack(norms))


class CallsAgain(keras.Sequential):
    """Overrides `compute_loss`, which looks at a call of its own alone."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return ops.mean(ops.square(self(x) - y))


class GradientPenalty(keras.Sequential):
    """Overrides `compute_loss`, which calls the model again and has a gradient by x."""

    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x, training=training)
        penalty = ops.mean(ops.square(tape.gradient(outputs, x)))
        return super().compute_loss(x, y, y_pred, sample_weight) + 0.1 * penalty


def _in_python(y, outputs):
    error = tf.py_function(
        lambda y, p: tf.reduce_mean((y - p) ** 2), [y, outputs], "float32"
    )
    return tf.ensure_shape(error, [])


class AddLoss(keras.layers.Layer):
    """Adds a loss of what goes through it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        self.add_loss(self.function(x))
        return x


def _adds(*functions):
    return _of(
        _dense(4, "tanh"), *[_layer(AddLoss, f) for f in functions], _dense(OUTPUTS)
    )


def _mean(x):
    return 0.1 * ops.mean(ops.square(x))


def _sum(x):
    return 0.01 * ops.sum(ops.square(x))


def _vector(x):
    return 0.01 * ops.sum(ops.square(x), axis=-1)


def _matrix(x):
    return 0.01 * ops.square(x)


def _variance(x):
    return 0.1 * ops.mean(ops.var(x, axis=0))


def _constant(x):
    return ops.convert_to_tensor(2.5)


class Encoder(keras.layers.Layer):
    """The variational part of an autoencoder, without its noise."""

    def __init__(self):
        super().__init__()
        self.mean, self.log_var = layers.Dense(2), layers.Dense(2)

    def build(self, shape):
        self.mean.build(shape)
        self.log_var.build(shape)

    def call(self, x):
        mean, log_var = self.mean(x), self.log_var(x)
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        self.add_loss(0.1 * ops.mean(ops.sum(kl, axis=-1)))
        return mean + ops.exp(0.5 * log_var)


# What a class of `keras.losses` is trained on, if not on smooth targets and a softmax.
_LOSS_CASES = {
    # Its exponents, of up to 80, enlarge what is rounded.
    "Circle": {
        "make": _of(_dense(4), layers.UnitNormalization),
        "batches": _classes(),
        "optimizer": lambda: optimizers.SGD(1e-3, momentum=0.9),
    },
    "CTC": {
        "make": _of(_dense(5), shape=(STEPS, FEATURES)),
        "batches": lambda: _cut(
            _random(21, STEPS, FEATURES), 1 + _labels(42).reshape(21, 2)
        ),
    },
    "SparseCategoricalCrossentropy": {"batches": _classes()},
    "Hinge": {"make": _mlp(activation="tanh"), "batches": _classes(kind="signs")},
    "SquaredHinge": {
        "make": _mlp(activation="tanh"),
        "batches": _classes(kind="signs"),
    },
    "CategoricalGeneralizedCrossEntropy": {"batches": _classes()},
    # Its value is percent.
    "MeanAbsolutePercentageError": {"optimizer": lambda: optimizers.SGD(1e-3)},
}

REDUCTIONS = ["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", None]


def _classes_of(module, base):
    """The public classes of a Keras module, each once."""
    found = {
        c: n for n, c in vars(module).items() if inspect.isclass(c) and c is not base
    }
    return sorted((n, c) for c, n in found.items() if issubclass(c, base))


def _losses():
    for name, kind in _classes_of(losses, losses.Loss):
        fields = {
            "make": _mlp(activation="softmax"),
            "batches": _classes(kind="smooth"),
            **_LOSS_CASES.get(name, {}),
        }
        yield _case("losses", name, loss=kind(), **fields)
    for reduction in REDUCTIONS:
        # A sum is as large as the batch; so is its gradient.
        slow = {"optimizer": lambda: optimizers.SGD(0.002, momentum=0.9)}
        fields = slow if reduction in ("sum", None) else {}
        loss = losses.MeanSquaredError(reduction=reduction)
        name = f"reduction {reduction}"
        yield _case("losses", name, loss=loss, **fields)
        yield _case(
            "losses",
            f"{name}, sample weights",
            batches=_numbers(weights=()),
            loss=loss,
            **fields,
        )
        yield _case(
            "losses",
            f"{name}, mask",
            _tagger(),
            _words(out=(STEPS, 1), temporal=reduction == "mean_with_sample_weight"),
            loss,
            **fields,
        )
    for weighted in (False, True):
        yield _case(
            "losses",
            "ignore_class" + ", sample weights" * weighted,
            _mlp(activation="softmax"),
            _classes(weighted=weighted),
            losses.SparseCategoricalCrossentropy(ignore_class=1),
        )
    yield _case("losses", "function, mean over examples", loss=_quartic)
    yield _case("losses", "function, couples the batch", loss=_contrast)
    # Without a bias, which moves all scores alike: its gradient would be rounding.
    scores = _of(_dense(8, "tanh"), _dense(OUTPUTS, use_bias=False))
    for name, batches in {
        "": _numbers(),
        ", sample weights": _numbers(weights=()),
    }.items():
        name = f"function, pairwise ranking{name}"
        yield _case("losses", name, scores, batches, _ranking)
    yield _case("losses", "subclass of Loss", loss=Quartic())
    yield _case(
        "losses",
        "subclass of Loss, sum",
        loss=Quartic(reduction="sum"),
        optimizer=lambda: optimizers.SGD(1e-4),
    )
    for kind in (OwnLoss, OwnCoupledLoss, LossOfVariables, CallsAgain):
        yield _case("losses", f"compute_loss overridden, {kind.__name__}", _own(kind))
    for name, body in {
        "": (_dense(8, "tanh"),),
        # The second call goes on with the state that the first has made.
        ", state": (_spectral(1), _layer(Counter, "float32")),
    }.items():
        make = _own(GradientPenalty, *body)
        yield _case("losses", f"gradient penalty{name}", make)
    yield _case("losses", "py_function", loss=_in_python)
    for placement in ("gathered", "tower"):
        yield _case(
            "losses",
            f"loss_placement={placement}",
            _mlp(kernel_regularizer="l2"),
            _numbers(weights=()),
            options={"loss_placement": placement},
        )
    yield _case(
        "losses",
        "loss_placement=tower, a function",
        loss=_quartic,
        options={"loss_placement": "tower"},
    )
    yield from _added_losses()


def _own(kind, *body):
    def make():
        inner = [make() for make in body or (_dense(8, "tanh"),)]
        return kind([keras.Input((FEATURES,)), *inner, layers.Dense(OUTPUTS)])

    return make


def _added_losses():
    group = "losses that layers add"
    for function in (_mean, _sum, _vector, _matrix, _constant):
        name = function.__name__.strip("_")
        yield _case(group, name, _adds(function))
        yield _case(group, f"{name}, gathered", _adds(function), loss=_contrast)
    small = _numbers((2, 1))
    yield _case(group, "sum, smaller than the towers", _adds(_sum), small)
    yield _case(group, "mean and sum", _adds(_mean, _sum))
    yield _case(group, "mean, sample weights", _adds(_mean), _numbers(weights=()))
    yield _case(group, "variance over the batch", _adds(_variance))
    yield _case(group, "KL divergence", _of(Encoder, _dense(OUTPUTS)))
    yield _case(
        group,
        "activity regularizer",
        _of(_dense(4, "tanh", activity_regularizer="l2"), _dense(OUTPUTS)),
    )
    yield _case(
        group,
        "activity regularizer, gathered",
        _of(_dense(4, "tanh", activity_regularizer="l2"), _dense(OUTPUTS)),
        loss=_contrast,
    )
    yield _case(
        group,
        "weight regularizers",
        _mlp(kernel_regularizer=regularizers.L1L2(0.01, 0.02), bias_regularizer="l2"),
    )
    yield _case(
        group,
        "OrthogonalRegularizer, gathered",
        _mlp(kernel_regularizer="orthogonal_regularizer"),
        loss=_contrast,
    )


# Optimizers. Those that divide by the size of a gradient get a large epsilon: rounding
# in gradients near zero would count in full.

_OPTIMIZERS = {
    "Adadelta": {"learning_rate": 0.5, "epsilon": 1e-3},
    "Adagrad": {"learning_rate": 0.05},
    "Adafactor": {"learning_rate": 0.05},
    "Ftrl": {"learning_rate": 0.1, "l1_regularization_strength": 1e-3},
    "Lion": {"learning_rate": 1e-3},
    "SGD": {"learning_rate": 0.05},
    "Muon": {"learning_rate": 0.01, "epsilon": 1e-3},
    "LossScaleOptimizer": {"dynamic_growth_steps": 4},
    "MultiOptimizer": {},
}


def _optimizer(name, **options):
    def make():
        kind = getattr(optimizers, name)
        if name == "LossScaleOptimizer":
            return kind(options.get("inner", _sgd)(), **_OPTIMIZERS[name])
        if name == "MultiOptimizer":
            biases = {".*bias": optimizers.SGD(1.0)}
            return kind(optimizers.OptimizerMap(_sgd(), biases))
        default = {"learning_rate": 0.01, "epsilon": 1e-3}
        return kind(**(_OPTIMIZERS.get(name, default) | options))

    return make


def _decayed():
    optimizer = optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def _optimizers():
    group = "optimizers"
    for name, _ in _classes_of(optimizers, optimizers.Optimizer):
        # Keras in graph mode loses the values that this one starts from.
        eager = {"run_eagerly": name == "ScheduleFreeAdamW"}
        options = functools.partial(dict, **eager)
        yield _case(group, name, optimizer=_optimizer(name), compile=options)
    options = {
        "SGD, momentum": ("SGD", {"momentum": 0.9}),
        "SGD, nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
        "Adam, amsgrad": ("Adam", {"amsgrad": True}),
        "RMSprop, centered": ("RMSprop", {"centered": True, "momentum": 0.9}),
        "clipnorm": ("SGD", {"clipnorm": 0.1}),
        "clipvalue": ("SGD", {"clipvalue": 0.02}),
        "global_clipnorm": ("SGD", {"global_clipnorm": 0.1}),
        "global_clipnorm, Adam": ("Adam", {"global_clipnorm": 0.1}),
        "gradient accumulation": ("SGD", {"gradient_accumulation_steps": 2}),
        "gradient accumulation, Adam": ("Adam", {"gradient_accumulation_steps": 2}),
        "gradient accumulation and clipping": (
            "SGD",
            {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1},
        ),
        "EMA": ("SGD", {"use_ema": True, "ema_momentum": 0.5}),
        "EMA, overwrite": (
            "SGD",
            {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        ),
        "weight decay": ("SGD", {"weight_decay": 0.1}),
        "loss_scale_factor": ("SGD", {"loss_scale_factor": 16.0}),
        "schedule": (
            "SGD",
            {"learning_rate": optimizers.schedules.CosineDecay(0.1, 6)},
        ),
        # They have variables that they do not list where another one builds them.
        "LossScaleOptimizer, Nadam": (
            "LossScaleOptimizer",
            {"inner": _optimizer("Nadam")},
        ),
        "LossScaleOptimizer, Adafactor": (
            "LossScaleOptimizer",
            {"inner": _optimizer("Adafactor")},
        ),
    }
    for name, (kind, arguments) in options.items():
        yield _case(group, name, optimizer=_optimizer(kind, **arguments))
    yield _case(group, "exclude_from_weight_decay", optimizer=_decayed)
    for way, value in [
        ("jit_compile", True),
        ("run_eagerly", True),
        ("steps_per_execution", 2),
    ]:
        yield _case(
            group,
            f"global_clipnorm, Adam, {way}={value}",
            optimizer=_optimizer("Adam", global_clipnorm=0.1),
            compile=functools.partial(dict, **{way: value}),
        )
    yield _case(
        group,
        "of the user's, which looks at whole variables",
        optimizer=lambda: OfWholeVariables(0.1),
    )
    for kind in ("MaxNorm", "NonNeg", "UnitNorm"):
        constraint = getattr(keras.constraints, kind)()
        make = _mlp(kernel_constraint=constraint)
        yield _case(group, f"constraint {kind}", make)
    yield _case(group, "learning rate set by a callback", fit={"callbacks": [_Decay()]})
    yield _case(
        group,
        "EMA, swapped, and weights that a callback changes",
        optimizer=_optimizer("Adam", use_ema=True),
        fit={
            "epochs": 3,
            "callbacks": [keras.callbacks.SwapEMAWeights(), _Changes()],
            "validation_data": _numbers((5,))()[0],
        },
    )


class OfWholeVariables(optimizers.Optimizer):
    """Has a slot of another shape for each variable, and a norm of the whole one."""

    def build(self, variables):
        super().build(variables)
        self.rows = [self.add_variable(v.shape[:1], name="rows") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        rows = self.rows[self._get_variable_index(variable)]
        axes = tuple(range(1, len(gradient.shape)))
        self.assign_add(rows, ops.sum(gradient, axes) if axes else gradient)
        step = learning_rate * gradient / (1 + ops.norm(gradient))
        self.assign_sub(variable, step)


class _Changes(keras.callbacks.Callback):
    """Changes the learning rate and weights after each batch."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.003
        for variable in self.model.trainable_variables:
            variable.assign(0.9 * variable)


class _Decay(keras.callbacks.LearningRateScheduler):
    def __init__(self):
        super().__init__(lambda epoch: 0.1 / (epoch + 1))


# Mixed precision.


def _overflow(tower):
    """Nine rows a batch, three a tower, and one in the second that overflows.

    Its square error is finite, but not, in 16 bits, its gradient times the loss scale.
    """

    def batches():
        pairs = _numbers((9, 9, 9))()
        pairs[1][0][3 * tower + 1] *= 100
        return pairs

    return batches


def _mixed():
    # Away from 0: the errors then point one way, and of bfloat16's three digits no sum
    # cancels.
    numbers = functools.partial(_numbers, mean=2.0)
    for policy in ("mixed_float16", "mixed_bfloat16"):
        models = {
            "dense": {},
            "Adam": {"optimizer": _optimizer("Adam")},
            "sample weights": {"batches": _numbers(weights=())},
            "loss of the whole batch": {"batches": _numbers(), "loss": _contrast},
            "conv": {
                "make": _flat(_layer(layers.Conv2D, 2, 3), shape=(4, 4, 2)),
                "batches": numbers(shape=(4, 4, 2)),
            },
            "lstm": {
                "make": _of(
                    _layer(layers.LSTM, 4), _dense(OUTPUTS), shape=(STEPS, FEATURES)
                ),
                "batches": numbers(shape=(STEPS, FEATURES)),
            },
            "BatchNormalization(synchronized=True)": {"make": _normalised()},
        }
        for name, fields in models.items():
            fields = {"batches": numbers()} | fields
            yield _case("mixed precision", f"{policy}, {name}", policy=policy, **fields)
    for tower, name in enumerate(["first", "second", "last"]):
        yield _case(
            "mixed precision",
            f"mixed_float16, overflow on the {name} tower",
            make=_of(_dense(OUTPUTS)),
            batches=_overflow(tower),
            policy="mixed_float16",
        )


# Gradients.


class Unused(keras.layers.Layer):
    """Has a variable that the loss does not depend on."""

    def __init__(self, size=2):
        super().__init__()
        self.size = size

    def build(self, shape):
        self.unused = self.add_weight(shape=(self.size,))
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


def _gradients():
    group = "gradients"
    ids = {"shape": (STEPS,), "dtype": "int32"}
    embedding = _layer(layers.Embedding, 12, 4)
    dense = [layers.Flatten, _dense(1)]
    for name in ("SGD", "Adam", "Adagrad"):
        yield _case(
            group,
            f"Embedding, {name}",
            _of(embedding, *dense, **ids),
            _words(),
            optimizer=_optimizer(name),
        )
    yield _case(
        group,
        "Embedding, global_clipnorm",
        _of(embedding, *dense, **ids),
        _words(),
        optimizer=_optimizer("SGD", global_clipnorm=0.1),
    )
    yield _case(
        group,
        "Embedding, momentum, fewer examples than towers",
        _of(embedding, *dense, **ids),
        _words((8, 1)),
    )
    # A ranking does not depend on a bias: its gradient would be a sum that cancels.
    unbiased = layers.Flatten, _dense(1, use_bias=False)
    yield _case(
        group,
        "Embedding, gathered",
        _of(embedding, *unbiased, **ids),
        _words(),
        loss=_ranking,
    )

    def twice(a):
        shared = layers.Embedding(12, 4)
        both = layers.Concatenate()([shared(a), shared(a[:, ::-1])])
        return layers.Dense(1)(layers.Flatten()(both))

    yield _case(
        group,
        "Embedding used twice",
        _functional(twice, (STEPS,), dtype="int32"),
        _words(),
    )

    def tied(a):
        shared = layers.Embedding(12, 4)
        hidden = layers.Dense(4, "tanh")(layers.Flatten()(shared(a)))
        table = shared(ops.arange(12))
        return layers.Dense(1)(ops.matmul(hidden, ops.transpose(table)))

    yield _case(
        group,
        "Embedding tied to the output",
        _functional(tied, (STEPS,), dtype="int32"),
        _words(),
    )

    def two_tables(a):
        found = [layers.Embedding(n, 8)(a) for n in (50, 20)]
        x = layers.Flatten()(layers.Concatenate()(found))
        return layers.Dense(1)(layers.Dense(8)(x))

    for name, optimizer in {
        "loss scale, decay and clipping": _scaled_and_clipped,
        "accumulated, EMA and clipvalue": _optimizer(
            "Adam", gradient_accumulation_steps=2, use_ema=True, clipvalue=0.01
        ),
    }.items():
        yield _case(
            group,
            f"two Embeddings, {name}",
            _functional(two_tables, (STEPS,), dtype="int32"),
            _words(),
            optimizer=optimizer,
            towers=4,
        )
    yield _case(group, "None for a variable", _of(Unused, _dense(OUTPUTS)))
    yield _case(group, "None, gathered", _of(Unused, _dense(OUTPUTS)), loss=_contrast)
    # Where towers divide an optimizer's state, most of them have nothing to update.
    mostly_unused = _of(
        _layer(Unused, 10_000), _dense(OUTPUTS, kernel_constraint="max_norm")
    )
    for name, optimizer in {
        "EMA": _optimizer("Adam", use_ema=True, ema_momentum=0.5),
        "an optimizer of all kinds": _of_all_kinds,
        "several optimizers": _several_optimizers,
    }.items():
        yield _case(
            group,
            f"None for most numbers, {name}",
            mostly_unused,
            optimizer=optimizer,
            towers=4,
        )
    yield _case(
        group,
        "frozen layer",
        _of(_dense(8, "tanh", trainable=False), _dense(OUTPUTS)),
    )
    yield _case(group, "frozen between two fits", between=_freeze)
    yield _case(
        group,
        "thawed between two fits",
        _of(_dense(8, "tanh", trainable=False), _dense(OUTPUTS)),
        between=_thaw,
    )


def _scaled_and_clipped():
    inner = _optimizer("Adam", weight_decay=0.1, global_clipnorm=0.05)()
    return optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)


def _of_all_kinds():
    options = {
        "weight_decay": 0.1,
        "global_clipnorm": 0.1,
        "use_ema": True,
        "ema_momentum": 0.8,
        "ema_overwrite_frequency": 2,
        "gradient_accumulation_steps": 2,
    }
    inner = _optimizer("Nadam", **options)()
    return optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)


def _several_optimizers():
    kernels = {".*kernel": optimizers.SGD(0.1, use_ema=True)}
    others = _optimizer("Adam", use_ema=True)()
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(others, kernels))


def _freeze(model, trainable=False):
    model.layers[0].trainable = trainable
    model.compile(_sgd(), "mse")


def _thaw(model):
    _freeze(model, trainable=True)


# Metrics: every class of `keras.metrics`, several in one model.

_METRIC_ARGUMENTS = {
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.4},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "IoU": {
        "num_classes": 3,
        "target_class_ids": [0, 2],
        "sparse_y_pred": False,
        "ignore_class": None,
    },
    "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 1]},
    "OneHotMeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": lambda y, p: ops.mean(ops.abs(y - p), -1)},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
}
_OF_LABELS = (
    "IoU",
    "MeanIoU",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
)
_OF_NUMBERS = ("Accuracy", "R2Score", "RootMeanSquaredError")
_OF_NUMBERS += ("PearsonCorrelation", "ConcordanceCorrelation", "CosineSimilarity")
_OF_NUMBERS += ("LogCoshError", "MeanSquaredError", "MeanAbsoluteError")
# They take values instead of targets and outputs, so `compile` cannot use them.
_OF_VALUES = ("Mean", "Sum")


class LargestError(keras.metrics.Metric):
    """A metric of the user's that is no mean."""

    def __init__(self, name="largest_error", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, p, sample_weight=None):
        error = ops.max(ops.abs(ops.cast(y, p.dtype) - p))
        self.largest.assign(ops.maximum(self.largest, error))

    def result(self):
        return self.largest.value


class OwnMetrics(keras.Sequential):
    """Overrides `compute_metrics`, with metrics of values."""

    def __init__(self, *args):
        super().__init__(*args)
        self.values = metrics.Mean(name="Mean"), metrics.Sum(name="Sum")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for metric in self.values:
            metric.update_state(ops.square(y - y_pred), sample_weight)
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return results | {"twice": 2 * results["mae"], "span": ops.max(y_pred)}


def _new_metrics(wanted):
    """A function that makes metrics with the names of their classes."""
    return lambda: [
        kind(name=name, **_METRIC_ARGUMENTS.get(name, {}))
        for name, kind in _classes_of(metrics, metrics.Metric)
        if wanted(name)
    ]


def _metrics():
    others = _OF_LABELS + _OF_NUMBERS + _OF_VALUES
    rest = _new_metrics(lambda name: name not in others)
    # Its weights would have to have the shape of the outputs, for Keras too.
    weighted_rest = _new_metrics(lambda name: name not in (*others, "BinaryIoU"))
    labels, numbers = map(
        _new_metrics, (_OF_LABELS.__contains__, _OF_NUMBERS.__contains__)
    )
    softmax, crossed = _mlp(activation="softmax"), "sparse_categorical_crossentropy"
    one_hot = _classes(kind="one-hot")
    weighted = _classes(kind="one-hot", weighted=True)
    for name, make, *fields in [
        ("of one-hot classes", rest, softmax, one_hot, "mse"),
        ("of one-hot classes, weighted", weighted_rest, softmax, weighted, "mse"),
        ("of labels", labels, softmax, _classes(), crossed),
        ("of labels, weighted", labels, softmax, _classes(weighted=True), crossed),
        ("of numbers", numbers, _mlp(), _numbers()),
        ("of numbers, weighted", numbers, _mlp(), _numbers(weights=())),
    ]:
        key = "weighted_metrics" if "weighted" in name else "metrics"
        yield _case("metrics", name, *fields, compile=_with(key, make))
    yield _case(
        "metrics",
        "of numbers in (0, 1), weighted",
        _mlp(1, "sigmoid"),
        _numbers(out=(1,), weights=()),
        compile=_with("weighted_metrics", lambda: [metrics.BinaryIoU()]),
    )
    # So sure that only Keras's way back to the logits tells how wrong they are.
    for activation in ("softmax", "sigmoid"):
        loss = (
            "categorical" if activation == "softmax" else "binary"
        ) + "_crossentropy"
        yield _case(
            "metrics",
            f"of a saturated {activation}",
            _of(_layer(layers.Rescaling, 30), _dense(OUTPUTS, activation)),
            one_hot,
            loss,
            compile=lambda loss=loss: {"metrics": [loss]},
            optimizer=lambda: optimizers.SGD(1e-5),
        )
    yield _case(
        "metrics",
        "of sequences with a mask",
        _tagger(),
        _words(out=(STEPS, 1)),
        compile=lambda: {"metrics": ["mae", metrics.RootMeanSquaredError()]},
    )
    yield _case(
        "metrics",
        "of options",
        _mlp(activation="sigmoid"),
        _classes(kind="one-hot"),
        "binary_crossentropy",
        compile=lambda: {
            "metrics": [
                metrics.AUC(multi_label=True, num_labels=OUTPUTS, name="multi_label"),
                metrics.AUC(curve="PR", num_thresholds=20, name="pr"),
                metrics.Precision(thresholds=[0.3, 0.6], name="thresholds"),
                metrics.Recall(top_k=2, name="top_k"),
                metrics.Precision(class_id=1, name="class_id"),
                metrics.F1Score(average="macro", threshold=0.4, name="macro"),
                metrics.FBetaScore(average="weighted", beta=2.0, name="weighted"),
                metrics.R2Score(class_aggregation="variance_weighted_average"),
                LargestError(),
                "accuracy",
            ]
        },
    )
    yield _case(
        "metrics",
        "function, and names",
        compile=lambda: {"metrics": [_spread, "mae", "cosine_similarity"]},
    )
    for name, batches in {"": _numbers(), ", weighted": _numbers(weights=())}.items():
        yield _case(
            "metrics",
            f"compute_metrics overridden{name}",
            _own(OwnMetrics),
            batches,
            compile=lambda: {"metrics": ["mae"]},
        )


def _with(key, make):
    return lambda: {key: make()}


def _spread(y, p):
    return ops.std(p)


# State.


def _normalised(shape=(FEATURES,), **options):
    """A hidden layer, normalised over the batch."""
    hidden = (
        _dense(8, use_bias=False)
        if len(shape) < 3
        else _layer(layers.Conv2D, 4, 3, use_bias=False)
    )
    options = {"synchronized": True, "momentum": 0.8} | options
    return _flat(
        hidden,
        _layer(layers.BatchNormalization, **options),
        _layer(layers.Activation, "tanh"),
        shape=shape,
    )


class Counter(keras.layers.Layer):
    """Counts its calls, in training and out of it."""

    def __init__(self, dtype, **kwargs):
        super().__init__(**kwargs)
        self.type = dtype

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", dtype=self.type, trainable=False, name="n"
        )

    def call(self, x):
        self.count.assign(self.count + ops.ones((), self.type))
        return x


class Average(keras.layers.Layer):
    """Subtracts a moving mean of a function of the batches before this one."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def build(self, shape):
        self.average = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="average"
        )

    def call(self, x, training=False):
        before = 1.0 * self.average
        if training:
            new = self.function(x)
            self.average.assign(0.9 * before + 0.1 * new)
        return x - 0.1 * before


class Centered(Average):
    """Subtracts the moving mean of this batch too: examples see one another."""

    def call(self, x, training=False):
        super().call(x, training)
        return x - 0.1 * self.average


def _sums(x):
    return ops.sum(x, axis=0)


def _norms(x):
    return ops.sqrt(ops.sum(ops.square(x), axis=0))


class Quantizer(keras.layers.Layer):
    """The nearest of four codes, which follow the sums of what is nearest to them."""

    def build(self, shape):
        state = {"trainable": False, "initializer": "random_normal"}
        self.codes = self.add_weight(shape=(4, shape[-1]), name="codes", **state)
        self.sums = self.add_weight(shape=(4, shape[-1]), name="sums", **state)
        self.counts = self.add_weight(
            shape=(4, 1), initializer="ones", trainable=False, name="counts"
        )

    def call(self, x, training=False):
        far = ops.sum(ops.square(x[:, None] - self.codes[None]), axis=-1)
        chosen = ops.one_hot(ops.argmin(far, axis=-1), 4)
        if training:
            near = ops.transpose(chosen)
            self.sums.assign(0.9 * self.sums + 0.1 * ops.matmul(near, x))
            counts = ops.sum(near, axis=1, keepdims=True)
            self.counts.assign(0.9 * self.counts + 0.1 * counts)
            self.codes.assign(self.sums / self.counts)
        return x + ops.stop_gradient(ops.matmul(chosen, self.codes) - x)


def _state():
    group = "state"
    picture = (6, 6, 2)
    # A large epsilon: two examples that are nearly equal would magnify rounding.
    dense = _normalised(epsilon=0.1)
    for sizes in (EVEN, UNEVEN, (8, 2, 8)):
        name = f"BatchNormalization(synchronized=True), sizes {sizes}"
        yield _case(group, f"{name}, dense", dense, _numbers(sizes))
        pictures = _numbers(sizes, shape=picture)
        yield _case(group, f"{name}, conv", _normalised(picture), pictures)
    synchronized = {
        "gathered": {"make": _normalised(), "loss": _contrast},
        "no scale, no center": {"make": _normalised(scale=False, center=False)},
        "axis 1": {
            "make": _normalised((FEATURES, 4), axis=1),
            "batches": _numbers(shape=(FEATURES, 4)),
        },
        "renorm": {"make": _normalised(renorm=True)},
        "four towers": {"make": _normalised(), "towers": 4},
        "two layers": {
            "make": _of(
                *[
                    _dense(4, "tanh"),
                    _layer(layers.BatchNormalization, synchronized=True),
                ]
                * 2,
                _dense(OUTPUTS),
            )
        },
        "mask": {
            "make": _of(
                _layer(layers.Embedding, 12, 4, mask_zero=True),
                _layer(layers.BatchNormalization, synchronized=True),
                _layer(layers.GlobalAveragePooling1D),
                _dense(1),
                shape=(STEPS,),
                dtype="int32",
            ),
            "batches": _words(),
        },
    }
    for name, fields in synchronized.items():
        yield _case(group, f"BatchNormalization(synchronized=True), {name}", **fields)
    yield _case(
        group,
        "BatchNormalization, each share by itself",
        _of(_layer(layers.BatchNormalization, momentum=0.8), _dense(OUTPUTS)),
        expect="rule",
        only="moving_mean",
    )
    yield _case(
        group,
        "BatchNormalization, frozen",
        _normalised(synchronized=False, trainable=False),
    )
    yield _case(group, "BatchNormalization, called for inference", Inference)
    yield _case(group, "Normalization, adapted", _adapted)
    for power_iterations in (1, 3):
        yield _case(
            group,
            f"SpectralNormalization, {power_iterations} iterations",
            _of(_spectral(power_iterations), _dense(OUTPUTS)),
        )
    for dtype in ("int32", "int64", "float32"):
        yield _case(group, f"counter, {dtype}", _of(_layer(Counter, dtype), _dense(3)))
    yield _case(
        group,
        "counter, smaller than the towers",
        _of(_layer(Counter, "int32"), _dense(3)),
        _numbers((1, 2)),
    )
    mean = _layer(Average, functools.partial(ops.mean, axis=0))
    yield _case(group, "moving mean", _of(mean, _dense(OUTPUTS)))
    centered = _layer(Centered, functools.partial(ops.mean, axis=0))
    yield _case(group, "moving mean, with this batch", _of(centered, _dense(OUTPUTS)))
    yield _case(group, "moving sum", _of(_layer(Average, _sums), _dense(OUTPUTS)))
    for name, layer in {
        "moving norm": _layer(Average, _norms),
        "vector quantizer": Quantizer,
    }.items():
        yield _case(group, name, _of(layer, _dense(OUTPUTS)))
    yield _case(
        group,
        "stateful RNN",
        lambda: keras.Sequential(
            [
                keras.Input(batch_shape=(6, STEPS, FEATURES)),
                layers.LSTM(4, stateful=True),
                layers.Dense(OUTPUTS),
            ]
        ),
        _numbers(EVEN, shape=(STEPS, FEATURES)),
        expect="stateful",
    )


class Inference(keras.Model):
    """Calls its BatchNormalization for inference, also in training."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = layers.BatchNormalization(), layers.Dense(OUTPUTS)

    def call(self, x):
        return self.out(self.norm(x, training=False))


def _adapted():
    layer = layers.Normalization()
    layer.adapt(3 + 2 * _random(20, FEATURES))
    return keras.Sequential(
        [keras.Input((FEATURES,)), layer, layers.Dense(8, "tanh"), layers.Dense(3)]
    )


def _spectral(iterations):
    return lambda: layers.SpectralNormalization(
        layers.Dense(8, "tanh"), power_iterations=iterations
    )


# Models.


class Plain(keras.Model):
    """A subclassed model without a `training` argument."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(8, "tanh"), layers.Dense(OUTPUTS)

    def call(self, x):
        return self.out(self.hidden(x))


class Training(Plain):
    """A subclassed model that behaves differently in training."""

    def call(self, x, training=False):
        return super().call(2 * x if training else x)


def _shared(x):
    layer = layers.Dense(FEATURES, "tanh")
    return layers.Dense(OUTPUTS)(layer(layer(x)))


def _nested(x):
    inner = _of(_dense(4, "tanh"), _dense(4))()
    return layers.Dense(OUTPUTS)(layers.Add()([inner(x), Plain4()(x)]))


class Plain4(Plain):
    """A subclassed model inside another."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(4)


def _attend(x):
    # Without biases: attention does not depend on that of the keys, whose gradient is
    # nothing but rounding.
    return layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)


def _attention(x):
    return layers.Dense(OUTPUTS)(layers.GlobalAveragePooling1D()(_attend(x)))


class NeedsExamples(keras.layers.Layer):
    """Fails where there is no example."""

    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0])]):
            return tf.identity(x)


def _one_number(body, x):
    x = body(x)
    pooled = layers.GlobalAveragePooling1D()(x) if len(x.shape) == 3 else x
    return layers.Dense(1)(pooled)


def _causal(x):
    normal = layers.LayerNormalization()(x)
    attended = layers.GroupQueryAttention(4, 4, 2, use_bias=False)(
        normal, normal, use_causal_mask=True
    )
    return layers.Dense(OUTPUTS)(layers.Flatten()(layers.Add()([x, attended])))


def _mobile_net(**norm):
    def make():
        model = keras.applications.MobileNetV2(
            (32, 32, 3), alpha=0.35, weights=None, classes=OUTPUTS
        )
        for layer in model.layers:
            if isinstance(layer, layers.BatchNormalization):
                for name, value in norm.items():
                    setattr(layer, name, value)
        return model

    return make


def _models():
    group = "models"
    sequence, line, picture = (STEPS, FEATURES), (8, 3), (6, 6, 2)
    yield _case(group, "functional, shared layer", _functional(_shared, (FEATURES,)))
    yield _case(group, "functional, nested models", _functional(_nested, (FEATURES,)))
    yield _case(group, "subclassed", Plain)
    yield _case(group, "subclassed, training argument", Training)
    yield _case(group, "not built", lambda: keras.Sequential([layers.Dense(3)]))
    bodies = {
        "SimpleRNN": (_layer(layers.SimpleRNN, 4), sequence),
        "GRU": (_layer(layers.GRU, 4), sequence),
        "LSTM": (_layer(layers.LSTM, 4, return_sequences=True), sequence),
        "LSTM, unrolled": (_layer(layers.LSTM, 4, unroll=True), sequence),
        "Bidirectional": (
            lambda: layers.Bidirectional(layers.GRU(3)),
            sequence,
        ),
        "ConvLSTM1D": (_layer(layers.ConvLSTM1D, 2, 3), (3, 6, 2)),
        "TimeDistributed": (
            lambda: layers.TimeDistributed(layers.Dense(4)),
            sequence,
        ),
        "Conv1D": (_layer(layers.Conv1D, 4, 3), line),
        "Conv2D": (_layer(layers.Conv2D, 4, 3, strides=2), picture),
        "Conv3D": (_layer(layers.Conv3D, 2, 2), (3, 3, 3, 2)),
        "DepthwiseConv2D": (_layer(layers.DepthwiseConv2D, 3), picture),
        "SeparableConv2D": (_layer(layers.SeparableConv2D, 4, 3), picture),
        "Conv2DTranspose": (_layer(layers.Conv2DTranspose, 2, 3), picture),
        "MaxPooling2D": (_layer(layers.MaxPooling2D), picture),
        "GroupNormalization": (_layer(layers.GroupNormalization, 2), line[:1] + (4,)),
        "LayerNormalization": (layers.LayerNormalization, sequence),
        "RMSNormalization": (layers.RMSNormalization, sequence),
        "UnitNormalization": (layers.UnitNormalization, sequence),
        "PReLU": (layers.PReLU, sequence),
        "EinsumDense": (_layer(layers.EinsumDense, "abc,cd->abd", (5, 4)), sequence),
    }
    for name, (body, shape) in bodies.items():
        yield _case(group, name, _flat(body, shape=shape), _numbers(shape=shape))
    for name, call in {"MultiHead": _attention, "causal GroupQuery": _causal}.items():
        yield _case(
            group,
            f"{name}Attention",
            _functional(call, sequence),
            _numbers(shape=sequence),
        )
    # Deep and normalised over so few examples, it magnifies rounding. In float32 one
    # device itself differs by half where the examples of a batch change places.
    pictures = _numbers((8, 5), shape=(32, 32, 3), out=(OUTPUTS,))
    for name, policy, norm in [
        ("synchronized", "float64", {"synchronized": True}),
        ("frozen", "float32", {"trainable": False}),
    ]:
        yield _case(
            group,
            f"MobileNetV2, {name} BatchNormalization",
            _mobile_net(**norm),
            pictures,
            optimizer=lambda: optimizers.SGD(1e-3),
            fit={"epochs": 1},
            towers=2,
            policy=policy,
        )
    # Of these batches, the last leaves two of three towers idle. Their targets are away
    # from 0, so that no gradient of a bias cancels.
    for name, body in {
        "a layer that needs examples": lambda x: NeedsExamples()(x),
        "MultiHeadAttention": _attend,
        "Masking, SimpleRNN": lambda x: layers.SimpleRNN(4)(layers.Masking()(x)),
        "GRU": lambda x: layers.GRU(4)(x),
        "Masking, Bidirectional": lambda x: layers.Bidirectional(layers.LSTM(3))(
            layers.Masking()(x)
        ),
    }.items():
        yield _case(
            group,
            f"idle towers, {name}",
            _functional(functools.partial(_one_number, body), (None, FEATURES)),
            _numbers((4, 1), shape=sequence, out=(1,), mean=2.0),
        )
    eager = {"run_eagerly": True}
    for name, options in {
        "steps_per_execution=3": {"steps_per_execution": 3},
        "jit_compile=True": {"jit_compile": True},
        "run_eagerly": eager,
    }.items():
        yield _case(group, name, compile=functools.partial(dict, **options))
    for name, fields in {
        "mask": {"make": _tagger(), "batches": _words(out=(STEPS, 1))},
        "loss of the whole batch": {"loss": _contrast},
        "smaller than the towers": {"batches": _numbers((2, 1))},
        "add_loss": {"make": _adds(_mean)},
        "BatchNormalization(synchronized=True)": {"make": _normalised()},
    }.items():
        options = functools.partial(dict, **eager)
        yield _case(group, f"run_eagerly, {name}", compile=options, **fields)
    yield _case(
        group,
        "steps_per_execution=3, BatchNormalization(synchronized=True)",
        _normalised(),
        compile=lambda: {"steps_per_execution": 3},
    )


def _float8():
    """In 8 bits. Keras rounds a bias of such a Dense to 16 bits, so there is none."""

    def quantized(make):
        def quantized_model():
            model = make()
            model.quantize("float8")
            return model

        return quantized_model

    def twice(x):
        shared = layers.Dense(FEATURES, "tanh", use_bias=False)
        return layers.Dense(OUTPUTS, use_bias=False)(shared(shared(x)))

    def attention(x):
        x = layers.MultiHeadAttention(2, 4, use_bias=False)(x, x)
        return layers.Dense(OUTPUTS, use_bias=False)(x)

    def clipped():
        inner = optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1)
        return optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)

    def accumulated():
        return optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2)

    einsum = _layer(layers.EinsumDense, "abc,cd->abd", (None, OUTPUTS), "tanh")
    sequences = _numbers(shape=(STEPS, FEATURES), out=(STEPS, OUTPUTS))
    rows = {
        "a layer that is used twice": (_functional(twice, (FEATURES,)), _numbers()),
        "idle towers, clipping and a loss scale": (
            _mlp(use_bias=False),
            _numbers((2, 1, 2)),
            {"optimizer": clipped},
        ),
        "gathered, with accumulation": (
            _of(einsum, shape=(STEPS, FEATURES)),
            sequences,
            {"optimizer": accumulated, "options": {"loss_placement": "gathered"}},
        ),
        "attention": (_functional(attention, (STEPS, FEATURES)), sequences),
    }
    return [
        Case("float8", name, quantized(make), batches, **(more or [{}])[0])
        for name, (make, batches, *more) in rows.items()
    ]


CASES = [
    *_shares(),
    *_batches(),
    *_losses(),
    *_optimizers(),
    *_mixed(),
    *_gradients(),
    *_metrics(),
    *_state(),
    *_models(),
    *_float8(),
]

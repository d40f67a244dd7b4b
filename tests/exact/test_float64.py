"""Models in float64 keep all digits, however uneven the towers' parts are."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses, ops, regularizers

import towers
from tests.exact import oracle
from tests.variants import slow

# Of three towers: parts of 3, 2 and 2 examples, and of 1, 1 and none.
SIZES = 7, 8, 5, 2
# The last digit of a number of 64 bits, and what a few steps make of it.
LIMIT = 1e-14
# On replicas, Keras subtracts a mean's square from that of squares.
SYNCHRONIZED_LIMIT = 1e-13
FEATURES = 6


def _dense(*more, outputs=3):
    inputs = keras.Input((FEATURES,))
    x = layers.Dense(8, "tanh")(inputs)
    for layer in more:
        x = layer(x)
    return keras.Model(inputs, layers.Dense(outputs)(x))


class OwnStep(keras.Model):
    """Has two losses, the one a mean and the other a ratio of sums."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(8, "tanh")
        self.last = layers.Dense(3)
        self.tracker = keras.metrics.Mean(name="own")

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            squares = ops.mean(ops.square(self(x, training=True) - y), axis=-1)
            loss = ops.mean(squares)
            if weights is not None:
                loss += ops.sum(weights * squares) / ops.sum(weights)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}


def _tokens():
    inputs = keras.Input((FEATURES,), dtype="int64")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(3)(layers.LSTM(5)(x)))


def _of_tokens():
    inputs = keras.Input((FEATURES,), dtype="int64")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, layers.Dense(1)(layers.GRU(5, return_sequences=True)(x)))


class _Added(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x


def _ratio(y, outputs):
    return ops.sum(ops.abs(y - outputs)) / ops.sum(ops.abs(outputs))


def _frozen():
    model = _dense(layers.BatchNormalization(trainable=False))
    model.layers[1].trainable = False
    return model


def _regularized():
    penalty = regularizers.L2(0.01)
    return _dense(layers.Dense(4, kernel_regularizer=penalty), _Added())


def _images():
    inputs = keras.Input((FEATURES, FEATURES, 2))
    x = layers.Conv2D(3, 3)(inputs)
    x = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x))
    return keras.Model(inputs, layers.Dense(3)(x))


def _synchronized():
    return _dense(layers.BatchNormalization(synchronized=True))


NUMBERS, TOKENS, IMAGES = "numbers", "tokens", "images"
MODELS = {
    "mean": (_dense, NUMBERS, {}),
    "a sum": (_dense, NUMBERS, {"loss": lambda: losses.MeanSquaredError("sum")}),
    "weighted mean": (
        _dense,
        NUMBERS,
        {"loss": lambda: losses.MeanAbsoluteError("mean_with_sample_weight")},
    ),
    "metrics": (
        _dense,
        NUMBERS,
        {"metrics": ["mae", "cosine_similarity"], "weighted_metrics": ["mse"]},
    ),
    "a gathered loss": (_dense, NUMBERS, {"loss": lambda: _ratio}),
    "losses of layers": (_regularized, NUMBERS, {}),
    "frozen": (_frozen, NUMBERS, {}),
    "BatchNormalization, synchronized": (_synchronized, NUMBERS, {}),
    "masks": (_tokens, TOKENS, {}),
    "masks of outputs": (_of_tokens, TOKENS, {}),
    "an own step": (OwnStep, NUMBERS, {}),
    "accumulated": (
        _dense,
        NUMBERS,
        {"optimizer": lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)},
    ),
}
QUICK = "mean", "an own step"
# The towers normalise by their own parts, so one tower is compared with one device.
ALONE = {"BatchNormalization": (_images, IMAGES, {})}


@pytest.fixture(autouse=True)
def _in_float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")


def _data(kind, weighted):
    random, rows = np.random.default_rng(3), sum(SIZES)
    shapes = {
        NUMBERS: lambda: random.normal(size=(rows, FEATURES)),
        TOKENS: lambda: random.integers(0, 9, (rows, FEATURES)),
        IMAGES: lambda: random.normal(size=(rows, FEATURES, FEATURES, 2)),
    }
    arrays = [shapes[kind](), random.normal(size=(rows, 3))]
    if weighted:
        arrays.append(random.uniform(0.5, 2, rows))
    ends = np.cumsum(SIZES)
    batches = [
        tuple(a[end - n : end] for a in arrays)
        for n, end in zip(SIZES, ends, strict=True)
    ]
    return oracle.dataset(batches)


def _run(case, weighted, **options):
    """Trains and evaluates; returns all numbers, by name."""
    make, kind, compiled = case
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    model, data = make(), _data(kind, weighted)
    if make is _of_tokens:
        # Targets and weights of each token: Keras takes none of a row beside a mask.
        data = data.map(
            lambda x, y, *w: (
                x,
                ops.tile(y[..., None], (1, 2, 1)),
                *(ops.tile(weights[:, None], (1, FEATURES)) for weights in w),
            )
        )
    trained = towers.multi_gpu_model(model, **options) if options else model
    # A loss has the type that is Keras's as it is made.
    compiled = {"loss": lambda: "mse"} | compiled
    optimizer = compiled.pop("optimizer", lambda: keras.optimizers.Adam(epsilon=1e-3))
    loss = compiled.pop("loss")()
    trained.compile(optimizer=optimizer(), loss=loss, **compiled)
    history = trained.fit(data, epochs=2, verbose=0).history
    found = {
        f"{variable.path} {i}": variable.numpy()
        for i, variable in enumerate([*model.variables, *model.optimizer.variables])
    }
    found |= {f"history {name}": value for name, value in history.items()}
    if make is not OwnStep:
        results = trained.evaluate(data, return_dict=True, verbose=0)
        found |= {f"evaluate {name}": value for name, value in results.items()}
    return {name: np.asarray(value) for name, value in found.items()}


def _assert_equal(case, weighted, **options):
    apart = oracle.differences(_run(case, weighted, **options), _run(case, weighted))
    where = max(apart, key=apart.get)
    limit = SYNCHRONIZED_LIMIT if case[0] is _synchronized else LIMIT
    assert apart[where] <= limit, (where, apart[where])


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else slow(name) for name in MODELS]
)
def test_parts_of_several_sizes(name, weighted):
    _assert_equal(MODELS[name], weighted, gpus=3)


@pytest.mark.parametrize("name", ["mean", slow("BatchNormalization, synchronized")])
def test_copies_on_towers(name):
    _assert_equal(MODELS[name], True, gpus=3, variable_update="replicated")


@pytest.mark.parametrize("name", ALONE)
def test_one_tower(name):
    _assert_equal(ALONE[name], True, gpus=1)

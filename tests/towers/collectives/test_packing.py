import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import oracle
from tests.valued import valued
from towers import multi_gpu_model
from towers.collectives import packing


def _mixed():
    return [
        tf.constant([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        tf.constant(7, tf.int64),
        tf.constant([8.0, 9.0], tf.float16),
        tf.zeros([0, 4]),
        tf.constant(10.0),
        tf.constant([[11], [12]], tf.int64),
        tf.constant([True, False, True]),
        tf.constant([[[13.0]]]),
    ]


def _assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_array_equal(a, b)


def test_what_is_packed_comes_back():
    tensors = _mixed()
    _assert_same(packing.unpack(packing.pack(tensors), tensors), tensors)


def test_one_flat_buffer_for_each_floating_type():
    float32, float16 = packing.pack(_mixed())
    # Each tensor begins at a multiple of 64 bytes; one has no number.
    padded = [[1, 2, 3, 4, 5, 6], [], [10], [13]]
    rows = [row + [0] * (16 - len(row)) for row in padded if row]
    np.testing.assert_array_equal(float32, np.concatenate(rows))
    np.testing.assert_array_equal(float16, [8, 9] + [0] * 30)
    assert (float32.dtype, float16.dtype) == (tf.float32, tf.float16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "bfloat16"])
def test_what_is_taken_out_shares_the_buffer_s_memory(dtype):
    shapes = [(64, 3), (10,), (128,), (1000,), (7, 32)]
    tensors = [tf.cast(tf.random.normal(shape), dtype) for shape in shapes]
    (buffer,) = packing.pack(tensors)
    taken = packing.unpack([buffer], tensors)
    _assert_same(taken, tensors)
    begin = _address(buffer)
    inside = [begin <= _address(t) < begin + buffer._numpy().nbytes for t in taken]
    # What does not fill its place is copied.
    whole = [tensor._numpy().nbytes % 64 == 0 for tensor in tensors]
    assert inside == whole and False in whole


def _address(tensor):
    # Unlike `numpy()`, without a copy.
    return tensor._numpy().__array_interface__["data"][0]


def test_specs_suffice_to_unpack():
    tensors = _mixed()
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in floats]
    _assert_same(packing.unpack(packing.pack(tensors), specs), floats)


@pytest.mark.parametrize("tensors", [[], [tf.zeros([0, 2])], [tf.constant(3)]])
def test_little_or_nothing(tensors):
    buffers = packing.pack(tensors)
    assert len(buffers) == len(tensors)
    _assert_same(packing.unpack(buffers, tensors), tensors)


def test_in_a_graph_shapes_are_known():
    @tf.function(autograph=False)
    def there_and_back(*tensors):
        back = packing.unpack(packing.pack(tensors), tensors)
        assert [t.shape for t in back] == [t.shape for t in tensors]
        return back

    tensors = _mixed()
    _assert_same(there_and_back(*tensors), tensors)


def test_gradients_go_through():
    weights = [tf.constant([[1.0, 2.0]]), tf.constant(3.0)]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        first, second = packing.unpack(packing.pack(weights), weights)
        loss = tf.reduce_sum(first * [[10.0, 20.0]]) + 5.0 * second
    _assert_same(
        tape.gradient(loss, weights), [tf.constant([[10.0, 20.0]]), tf.constant(5.0)]
    )


# Towers whose values and gradients travel packed.


def _states(name):
    """Models whose variables are of several types; "mixed" has all of them."""
    inputs = keras.Input((6,), dtype="int32" if _has_rows(name) else "float32")
    if _has_rows(name):
        rows = keras.layers.Embedding(11, 4)(inputs)
        outputs = keras.layers.Flatten()(rows)
    elif name == "dense":
        outputs = keras.layers.Dense(8, "tanh")(inputs)
    else:
        outputs = inputs
    if name in ("float64", "mixed"):
        outputs = keras.layers.Dense(4, "tanh", dtype="float64")(outputs)
    if name in ("counters", "mixed"):
        outputs = keras.layers.Dropout(0.0, seed=3)(outputs)
    outputs = keras.layers.Dense(3)(outputs)
    if name in ("counters", "mixed"):
        outputs = keras.layers.BatchNormalization(trainable=False)(outputs)
    return keras.Model(inputs, outputs)


def _has_rows(name):
    return name in ("embedding", "mixed")


def _trained(name, towers, builder="parameter_server", scale=None, **options):
    keras.utils.set_random_seed(7)
    random = np.random.default_rng(0)
    x = random.integers(0, 11, (13, 6)) if _has_rows(name) else None
    x = random.normal(size=(13, 6)).astype("float32") if x is None else x
    y = random.normal(size=(13, 3)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model = _states(name)
    trained = model
    if towers:
        trained = multi_gpu_model(
            model, gpus=towers, **valued(builder, packed=True, **options)
        )
    # Keras takes no global norm of several types.
    several = name in ("float64", "mixed")
    clip = {"clipnorm": 0.5} if several else {"global_clipnorm": 0.5}
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, **clip)
    if scale:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
    # Nothing is traced for one device.
    eager = {"run_eagerly": not towers, "jit_compile": False}
    trained.compile(optimizer, "mse", metrics=["mae"], **eager)
    fit = trained.fit(data, epochs=2, shuffle=False, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    found = [*fit.history.values(), *(v.numpy() for v in variables)]
    # All builders evaluate alike.
    if name == "mixed" and builder == "parameter_server":
        found += trained.evaluate(data, verbose=0)
        found.append(trained.predict(data, verbose=0))
    return found


@functools.cache
def _expected(name):
    """What one device makes of it."""
    return _trained(name, 0)


BUILDERS = ["parameter_server", "replicated"]


@pytest.mark.parametrize(
    ("name", "towers", "builder"),
    [
        ("mixed", 3, "parameter_server"),
        ("mixed", 3, "replicated"),
        *(("dense", 1, builder) for builder in BUILDERS),
        *(
            (name, 3, builder)
            for name in ("dense", "embedding", "float64", "counters")
            for builder in BUILDERS
        ),
    ],
)
@pytest.mark.slow
def test_packed_towers_equal_one_device(name, towers, builder):
    found = _trained(name, towers, builder)
    expected = _expected(name)[: len(found)]
    assert oracle.largest_difference(found, expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedding", "dense"])
def test_packed_towers_in_float16(name):
    keras.config.set_dtype_policy("mixed_float16")
    expected = _trained(name, 0, scale=2.0**10)
    found = _trained(name, 3, scale=2.0**10)
    assert oracle.largest_difference(found, expected) < 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"device": "/device:CPU:3"}, {"cpu_merge": False}])
def test_wherever_they_are_packed(options):
    found = _trained("dense", 2, **options)
    assert oracle.largest_difference(found, _expected("dense")) < 1e-4

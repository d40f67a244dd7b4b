"""Bodies of the models of combinations.py, and what stands behind them: data."""

import functools

import keras
import tensorflow as tf
from keras import constraints, layers, ops

from tests.exact import cases, functions

SHAPES = {
    "rows": (6,),
    "steps": (5, 4),
    "pictures": (8, 8, 3),
    "volumes": (4, 4, 4, 2),
    "ids": (7,),
    "pairs": {"a": (6,), "b": (4,)},
}
IDS = 9


class Apply(layers.Layer):
    """A function of the user's."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def _outside(body):
    """The layers of `body`, to which the batch is one example."""

    def call(x):
        return Apply(lambda t: t[0])(body()(Apply(lambda t: t[None])(x)))

    return call


def _low_rank(layer):
    """The layer, of which a product of rank two is trained."""

    def call(x):
        layer.build(x.shape)
        layer.enable_lora(2)
        return layer(x)

    return call


def _attend(x):
    return layers.MultiHeadAttention(2, 3)(x, x)


def _first_two_axes_swapped(body):
    swap = functools.partial(ops.transpose, axes=(1, 0, 2))
    return lambda x: Apply(swap)(body(Apply(swap)(x)))


def _turned(body):
    return lambda x: Apply(ops.transpose)(body()(Apply(ops.transpose)(x)))


def _blocks(t, softmax):
    """Blocks of the space become examples of the batch, and return."""
    none = [[0, 0], [0, 0]]
    t = tf.space_to_batch(t, [2, 2], none)
    return tf.batch_to_space(ops.softmax(t, axis=0) if softmax else t, [2, 2], none)


# Layers in which examples meet.
COUPLED_LAYERS = {
    "outside_attention": _outside(lambda: _attend),
    "outside_conv": _outside(lambda: layers.Conv1D(4, 3, padding="same")),
    "outside_lstm": _outside(lambda: layers.LSTM(4, return_sequences=True)),
    "outside_pool": _outside(lambda: layers.AveragePooling1D(3, 1, padding="same")),
    "turned_softmax": _turned(layers.Softmax),
    "turned_norm": _turned(layers.UnitNormalization),
    "unit_norm_-2": lambda x: layers.UnitNormalization(axis=-2)(x),
    "unit_norm_0": lambda x: layers.UnitNormalization(axis=0)(x),
    "softmax_-2": lambda x: layers.Softmax(axis=-2)(x),
    "concatenate_-2": lambda x: layers.Concatenate(axis=-2)([x, x]),
    "lambda_mean": lambda x: layers.Lambda(lambda t: t - ops.mean(t, axis=0))(x),
}
# Layers of Keras after a Dense.
ROWS = {
    "identity": lambda x: x,
    "prelu": lambda x: layers.PReLU()(x),
    "unit_norm": lambda x: layers.UnitNormalization()(x),
    "layer_norm": lambda x: layers.LayerNormalization()(x),
    "rms_norm": lambda x: layers.RMSNormalization()(x),
    "group_norm": lambda x: layers.GroupNormalization(2)(x),
    "softmax": lambda x: layers.Softmax()(x),
    "spectral": lambda x: layers.SpectralNormalization(layers.Dense(8))(x),
    "constraint": lambda x: layers.Dense(
        8, kernel_constraint=constraints.UnitNorm(), kernel_regularizer="l2"
    )(x),
    "orthogonal": lambda x: layers.Dense(
        6, kernel_regularizer="orthogonal_regularizer"
    )(x),
    "activity": lambda x: layers.ActivityRegularization(0.01, 0.02)(x),
    "activity_l2": lambda x: layers.Dense(8, activity_regularizer="l2")(x),
    "concatenate": lambda x: layers.Concatenate()([x, layers.Dense(3)(x)]),
    "dot": lambda x: layers.Dot(axes=1)([layers.Dense(4)(x), layers.Dense(4)(x)]),
    "dot_3": lambda x: layers.Dot(axes=(2, 1))(
        [layers.Reshape((2, 4))(x), layers.Reshape((4, 2))(x)]
    ),
    "merge": lambda x: layers.Maximum()(
        [x, layers.Multiply()([x, layers.Average()([x, layers.Dense(8)(x)])])]
    ),
    "repeat_vector": lambda x: layers.GRU(4)(layers.RepeatVector(3)(x)),
    "permute": lambda x: layers.Permute((2, 1))(layers.Reshape((2, 4))(x)),
    "normalization": lambda x: layers.Normalization(mean=0.3, variance=2.0)(x),
    "discretization": lambda x: layers.Concatenate()(
        [layers.CategoryEncoding(3, "count")(layers.Discretization([-0.5, 0.5])(x)), x]
    ),
    "nested": lambda x: keras.Sequential(
        [
            layers.Dense(8),
            keras.Sequential([layers.LayerNormalization(), layers.Dense(5, "tanh")]),
        ]
    )(x),
    "low_rank": lambda x: _low_rank(layers.Dense(8))(x),
    "einsum_dense": lambda x: layers.EinsumDense(
        "bij,jk->bik", output_shape=(2, 4), bias_axes="k"
    )(layers.Reshape((2, 4))(x)),
    "frozen_norm": lambda x: layers.BatchNormalization(trainable=False)(x),
    "batch_norm": lambda x: layers.BatchNormalization(synchronized=True, epsilon=0.1)(
        x
    ),
    "shared": lambda x: (lambda d: d(layers.Activation("tanh")(d(x))))(layers.Dense(8)),
    "dropout_0": lambda x: layers.GaussianDropout(0.0)(layers.Dropout(0.0)(x)),
    "lambda": lambda x: layers.Lambda(lambda t: t * 2 - 1)(x),
}
# The other bodies, by the kind of their input.
OTHERS = {
    "steps": {
        "lstm": lambda x: layers.LSTM(5)(x),
        "gru": lambda x: layers.GRU(5, return_sequences=True)(x),
        "rnn": lambda x: layers.SimpleRNN(5, go_backwards=True)(x),
        "bidirectional": lambda x: layers.Bidirectional(
            layers.GRU(3, return_sequences=True)
        )(x),
        "time_distributed": lambda x: layers.TimeDistributed(layers.Dense(3))(x),
        "cells": lambda x: layers.RNN([layers.LSTMCell(3), layers.GRUCell(3)])(x),
        "masking": lambda x: layers.LSTM(4)(layers.Masking(0.0)(x)),
        "attention": _attend,
        "grouped_attention": lambda x: layers.GroupQueryAttention(4, 4, 2)(x, x),
        "scores": lambda x: layers.Attention(score_mode="concat")([x, x]),
        "additive": lambda x: layers.AdditiveAttention()([x, x]),
        "conv_1": lambda x: layers.Conv1D(4, 3, padding="causal")(x),
        "conv_1_turned": lambda x: layers.Conv1DTranspose(4, 3)(x),
        "separable_1": lambda x: layers.SeparableConv1D(4, 3)(x),
        "depthwise_1": lambda x: layers.DepthwiseConv1D(3)(x),
        "max_1": lambda x: layers.MaxPooling1D(2)(x),
        "average_all": lambda x: layers.GlobalAveragePooling1D()(x),
        "max_of_steps": lambda x: layers.GlobalMaxPooling1D(keepdims=True)(x),
        "up_1": lambda x: layers.UpSampling1D(2)(x),
        "crop_1": lambda x: layers.ZeroPadding1D(1)(layers.Cropping1D(1)(x)),
        "norm_of_steps": lambda x: layers.LayerNormalization(axis=(1, 2))(x),
        "norm_over_steps": lambda x: layers.LayerNormalization(axis=-2)(x),
        "softmax_of_steps": lambda x: layers.Softmax(axis=-2)(x),
        "softmax_of_all": lambda x: layers.Softmax(axis=(-2, -1))(x),
        "concatenate_1": lambda x: layers.Concatenate(axis=1)([x, layers.Dense(4)(x)]),
        "dense_of_steps": lambda x: layers.Dense(3)(x),
        "permuted_steps": lambda x: layers.Dense(4)(layers.Permute((2, 1))(x)),
        "spatial_dropout_0": lambda x: layers.SpatialDropout1D(0.0)(x),
        "last_step": lambda x: Apply(lambda t: t[:, -1])(x),
        "chosen_step": lambda x: Apply(
            lambda t: tf.gather(t, tf.argmax(t[:, :, 0], 1), axis=1, batch_dims=1)
        )(x),
        "mean_of_steps": lambda x: Apply(
            lambda t: t - ops.mean(t, axis=1, keepdims=True)
        )(x),
        "turned_steps": lambda x: Apply(lambda t: ops.transpose(t, (0, 2, 1)))(x),
        "merged_steps": lambda x: Apply(
            lambda t: ops.reshape(ops.tanh(ops.reshape(t, (-1, 4))), (-1, 5, 4))
        )(x),
        "gram_of_steps": lambda x: Apply(
            lambda t: ops.matmul(
                ops.softmax(ops.matmul(t, ops.transpose(t, (0, 2, 1)))), t
            )
        )(x),
        "swapped_attention": _first_two_axes_swapped(_attend),
        "merged_softmax": lambda x: Apply(
            lambda t: ops.reshape(
                ops.softmax(ops.reshape(t, (-1, 4)), axis=0), (-1, 5, 4)
            )
        )(x),
    },
    "pictures": {
        "conv_2": lambda x: layers.Conv2D(4, 3, strides=2)(x),
        "conv_2_turned": lambda x: layers.Conv2DTranspose(3, 3, strides=2)(x),
        "depthwise_2": lambda x: layers.DepthwiseConv2D(3, depth_multiplier=2)(x),
        "average_2": lambda x: layers.AveragePooling2D(2)(x),
        "max_of_picture": lambda x: layers.GlobalMaxPooling2D()(x),
        "up_2": lambda x: layers.UpSampling2D(2, interpolation="bilinear")(x),
        "crop_2": lambda x: layers.Cropping2D(1)(x),
        "resize": lambda x: layers.Resizing(5, 5)(x),
        "rescaling": lambda x: layers.Rescaling(0.5, 1.0)(x),
        "center": lambda x: layers.CenterCrop(4, 4)(x),
        "group_norm_2": lambda x: layers.GroupNormalization(3)(x),
        "layer_norm_2": lambda x: layers.LayerNormalization(axis=(1, 2, 3))(x),
        "dilated": lambda x: layers.Conv2D(4, 3, dilation_rate=2)(x),
        "grouped": lambda x: layers.Conv2D(6, 3, groups=3)(x),
        "flatten": lambda x: layers.Flatten()(x),
        "patches": lambda x: Apply(lambda t: ops.image.extract_patches(t, 4))(x),
        "residual": lambda x: layers.Add()(
            [x, layers.Conv2D(3, 3, padding="same", use_bias=False)(x)]
        ),
        "excitation": lambda x: layers.Multiply()(
            [
                x,
                layers.Dense(3, "sigmoid")(
                    layers.GlobalAveragePooling2D(keepdims=True)(x)
                ),
            ]
        ),
        "mean_of_picture": lambda x: Apply(
            lambda t: t - ops.mean(t, axis=(1, 2), keepdims=True)
        )(x),
        "space_to_depth": lambda x: Apply(lambda t: tf.nn.space_to_depth(t, 2))(x),
        "mean_of_pictures": lambda x: Apply(
            lambda t: t - ops.mean(t, axis=(0, 1, 2), keepdims=True)
        )(x),
        "blocks_softmax": lambda x: Apply(functools.partial(_blocks, softmax=True))(x),
        "blocks": lambda x: Apply(functools.partial(_blocks, softmax=False))(x),
    },
    "volumes": {
        "conv_3": lambda x: layers.Conv3D(2, 2)(x),
        "max_3": lambda x: layers.MaxPooling3D(2)(x),
        "up_3": lambda x: layers.UpSampling3D(2)(x),
        "conv_3_turned": lambda x: layers.Conv3DTranspose(2, 2)(x),
        "conv_lstm_2": lambda x: layers.ConvLSTM2D(2, 2)(x),
    },
    "ids": {
        "embedding": lambda x: layers.Embedding(IDS, 4)(x),
        "masked_lstm": lambda x: layers.LSTM(4)(
            layers.Embedding(IDS, 4, mask_zero=True)(x)
        ),
        "masked_mean": lambda x: layers.GlobalAveragePooling1D()(
            layers.Embedding(IDS, 4, mask_zero=True)(x)
        ),
        "masked_attention": lambda x: _attend(
            layers.Embedding(IDS, 4, mask_zero=True)(x)
        ),
        "multi_hot": lambda x: layers.CategoryEncoding(IDS, "multi_hot")(x),
        "lookup": lambda x: layers.Embedding(12, 3)(
            layers.IntegerLookup(vocabulary=[1, 2, 3, 5])(x)
        ),
        "hashing": lambda x: layers.Embedding(5, 3)(layers.Hashing(5)(x)),
        "embedding_twice": lambda x: (
            lambda embed: layers.Add()(
                [embed(x), embed(Apply(lambda t: (t + 1) % IDS)(x))]
            )
        )(layers.Embedding(IDS, 4)),
        "max_norm": lambda x: layers.Embedding(
            IDS, 4, embeddings_regularizer="l2", embeddings_constraint="max_norm"
        )(x),
    },
    "pairs": {
        "joined": lambda a, b: layers.Concatenate()([a, b]),
        "bilinear": lambda a, b: layers.Multiply()([a, b]),
        "product": lambda a, b: layers.Dot(axes=1)([a, b]),
        "film": lambda a, b: layers.Add()([layers.Multiply()([a, b]), b]),
        "crossed": lambda a, b: Apply(lambda both: functions.gram(*both))([a, b]),
    },
}


class Raw(layers.Layer):
    """Assigns a tf.Variable, in a condition or in a function."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def build(self, shape):
        self.count = tf.Variable(0.0, trainable=False)
        self.add = tf.function(lambda: self.count.assign_add(1.0))

    def call(self, x):
        if self.where == "function":
            self.add()
        else:
            tf.cond(tf.constant(True), self.add, lambda: tf.constant(0.0))
        return x * 1.0


class PythonCounter(layers.Layer):
    """Counts its calls, or traces of them, in Python."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


class Largest(cases.Average):
    """Divides by the largest number so far."""

    def call(self, x, training=False):
        if training:
            self.average.assign(ops.maximum(self.average, ops.max(ops.abs(x))))
        return x / (1 + ops.stop_gradient(ops.convert_to_tensor(self.average)))


def _mean_of(x):
    return ops.mean(x, axis=tuple(range(len(x.shape) - 1)))


def _number_of(x):
    return ops.cast(ops.shape(x)[0], x.dtype)


WRAPPERS = {
    "-": lambda: lambda x: x,
    "counter": lambda: cases.Counter("float32"),
    "python_counter": PythonCounter,
    "moving_mean": lambda: cases.Average(_mean_of),
    "centered": lambda: cases.Centered(_mean_of),
    "largest": lambda: Largest(None),
    "examples": lambda: cases.Average(_number_of),
    "raw_cond": lambda: Raw("cond"),
    "raw_function": lambda: Raw("function"),
    "add_mean": lambda: cases.AddLoss(cases._mean),
    "add_sum": lambda: cases.AddLoss(cases._sum),
    "add_max": lambda: cases.AddLoss(lambda x: 0.1 * ops.max(x)),
    "add_variance": lambda: cases.AddLoss(cases._variance),
}


BODIES = {
    **{
        f"act_{name}": ("rows", lambda x, name=name: layers.Activation(name)(x))
        for name in "relu6 elu selu gelu silu mish celu glu softplus softsign hard_silu"
        " hard_tanh log_sigmoid leaky_relu exponential sparsemax softmax log_softmax"
        " squareplus tanh_shrink soft_shrink hard_shrink sparse_plus"
        " sparse_sigmoid".split()
    },
    **{
        name: ("rows", lambda x, f=function: Apply(f)(x))
        for name, function in (functions.FUNCTIONS | functions.COUPLED).items()
    },
    **{name: ("rows", body) for name, body in (ROWS | COUPLED_LAYERS).items()},
    **{name: (kind, body) for kind in OTHERS for name, body in OTHERS[kind].items()},
}


def hidden(source, call):
    """The inputs of a model, and the outputs of a body that follows on them."""
    shape = SHAPES[source]
    if source == "pairs":
        inputs = {name: keras.Input(each, name=name) for name, each in shape.items()}
        return inputs, call(*[layers.Dense(4, "tanh")(x) for x in inputs.values()])
    inputs = keras.Input(shape, dtype="int32" if source == "ids" else None)
    units = {"rows": 8, "steps": 4}.get(source)
    return inputs, call(layers.Dense(units, "tanh")(inputs) if units else inputs)

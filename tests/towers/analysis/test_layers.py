"""Trust in Keras's own layers, by measurement."""

import inspect

import keras
import pytest
import tensorflow as tf

from tests.towers.analysis import layers
from tests.variants import slow
from towers.analysis import layer_calls

TABLE = layers.table()
BY_CLASS = {kind: [row for row in TABLE if row.kind == kind] for kind, *_ in TABLE}
# Long ones, kin of quick ones: more operations on images, and more recurrent layers.
SLOW = {
    *("RandAugment", "Equalization", "AugMix", "RandomElasticTransform", "CutMix"),
    *("ContrastLimitedAdaptiveHistogramEqualization", "RandomErasing"),
    *("RandomGaussianBlur", "MelSpectrogram", "ConvLSTM1D", "ConvLSTM3D"),
    *("Bidirectional", "TimeDistributed", "RNN", "GRU", "SimpleRNN"),
}


# Older versions of Keras lack them.
SINCE_3_16 = {"Mosaic", "TernaryDense"}


def test_each_class_is_in_the_table():
    # A new one has to be tried: add lines to layers.txt, and run `layers` as a program.
    assert BY_CLASS.keys() >= layers.classes().keys()
    assert BY_CLASS.keys() - layers.classes().keys() <= SINCE_3_16


def test_each_axis_is_tried():
    for name, kind in layers.classes().items():
        named = {"axis", "axes", "attention_axes"} & {
            *inspect.signature(kind.__init__).parameters
        }
        tried = " ".join(row.arguments for row in BY_CLASS[name])
        for argument in named:
            assert f"{argument}=-" in tried or "JaxLayer" in name, name
            assert f"{argument}=0" in tried or f"{argument}=1" in tried, name


def test_the_page_is_the_table():
    assert layers.PAGE.read_text() == layers.page(TABLE)


def test_slow_classes_are_in_the_table():
    assert BY_CLASS.keys() >= SLOW


@pytest.mark.quick_one_in(6)
@pytest.mark.parametrize(
    "kind",
    [
        slow(kind) if kind in SLOW else kind
        for kind in BY_CLASS
        if kind in layers.classes()
    ],
)
def test_outcomes(kind):
    found = [layers.outcome(row) for row in BY_CLASS[kind]]
    assert found == [row.outcome for row in BY_CLASS[kind]]


def test_a_part_of_a_layer_is_looked_at():
    inner = keras.layers.Softmax(axis=0)
    assert layer_calls.is_trusted(keras.layers.TimeDistributed(keras.layers.Dense(2)))
    assert not layer_calls.is_trusted(keras.layers.TimeDistributed(inner))
    assert not layer_calls.is_trusted(keras.layers.Dense(2, activation=inner))
    assert not layer_calls.is_trusted(keras.layers.Dense(2, activation=lambda x: x))


@pytest.mark.parametrize(
    ("equation", "trusted"),
    [
        ("abc,cd->abd", True),
        ("abc,bd->adc", True),
        ("...x,xy->...y", True),
        ("b...x,xy->b...y", False),
        ("abc,cd->bad", False),
        ("aab,bc->ac", False),
    ],
)
def test_an_equation_of_rows(equation, trusted):
    layer = keras.layers.EinsumDense(equation, (None, 3))
    assert layer_calls.is_trusted(layer) == trusted


@pytest.mark.parametrize(
    ("options", "trusted"),
    [
        ({}, False),
        ({"output_sequence_length": 4}, True),
        ({"output_mode": "multi_hot"}, True),
    ],
)
def test_texts_that_are_as_long_as_the_longest(options, trusted):
    layer = keras.layers.TextVectorization(vocabulary=["a"], **options)
    assert layer_calls.is_trusted(layer) == trusted


def test_the_last_axis_of_inner_layers_is_none_of_examples():
    assert layer_calls.is_trusted(keras.layers.Softmax(axis=-1))
    assert not layer_calls.is_trusted(keras.layers.Softmax(axis=-2))
    assert layer_calls.is_trusted(keras.layers.Softmax(axis=-2), [tf.zeros([2, 3, 4])])


def test_all_functions_of_a_layer_are_looked_at():
    own = keras.layers.GRU(2, recurrent_activation=lambda x: x)
    assert layer_calls.is_trusted(keras.layers.GRU(2))
    assert not layer_calls.is_trusted(own)

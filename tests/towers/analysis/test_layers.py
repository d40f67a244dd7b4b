"""Trust in Keras's own layers, by measurement."""

import inspect

import keras
import pytest

from tests.towers.analysis import layers
from tests.variants import slow
from towers.analysis import trust

TABLE = layers.table()
BY_CLASS = {kind: [row for row in TABLE if row.kind == kind] for kind, *_ in TABLE}
# Long ones, kin of quick ones: more operations on images, and more recurrent layers.
SLOW = {
    *("RandAugment", "Equalization", "AugMix", "RandomElasticTransform", "CutMix"),
    *("ContrastLimitedAdaptiveHistogramEqualization", "RandomErasing"),
    *("RandomGaussianBlur", "MelSpectrogram", "ConvLSTM1D", "ConvLSTM3D"),
    *("Bidirectional", "TimeDistributed", "RNN", "GRU", "SimpleRNN"),
}


def test_each_class_is_in_the_table():
    # A new one has to be tried: add lines to layers.txt, and run `layers` as a program.
    assert BY_CLASS.keys() == layers.classes().keys()


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
    "kind", [slow(kind) if kind in SLOW else kind for kind in BY_CLASS]
)
def test_outcomes(kind):
    found = [layers.outcome(row) for row in BY_CLASS[kind]]
    assert found == [row.outcome for row in BY_CLASS[kind]]


def test_a_part_of_a_layer_is_looked_at():
    inner = keras.layers.Softmax(axis=0)
    assert trust.is_trusted(keras.layers.TimeDistributed(keras.layers.Dense(2)))
    assert not trust.is_trusted(keras.layers.TimeDistributed(inner))
    assert not trust.is_trusted(keras.layers.Dense(2, activation=inner))
    assert not trust.is_trusted(keras.layers.Dense(2, activation=lambda x: x))


def test_all_functions_of_a_layer_are_looked_at():
    own = keras.layers.GRU(2, recurrent_activation=lambda x: x)
    assert trust.is_trusted(keras.layers.GRU(2))
    assert not trust.is_trusted(own)

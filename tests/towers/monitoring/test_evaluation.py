"""How far an evaluation is, is shown if it takes long, in `fit` as well."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import small
from tests.progress_seen import Seen
from towers.monitoring.lines import EvaluationProgress

_X, _Y = np.zeros([10, 4, 4, 1], "float32"), np.arange(10) % 3


class _Batches(keras.utils.PyDataset):
    num_batches = 3

    def __getitem__(self, index):
        return _X[:4], _Y[:4]


def _dataset():
    return tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(4)


@pytest.fixture
def seen(monkeypatch):
    return Seen(monkeypatch)


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    ("make", "total"),
    [
        (_dataset, 3),
        (_Batches, 3),
        (lambda: _dataset().filter(lambda x, y: True), None),
    ],
)
def test_each_evaluation_of_fit(seen, make, total):
    model = towers.multi_gpu_model(small.tiny(), gpus=["/cpu:0", "/cpu:1"])
    data = make()
    model.fit(
        *(_X, _Y),
        epochs=2,
        validation_data=data,
        callbacks=[EvaluationProgress(data)],
        verbose=0,
    )
    assert seen.of("Evaluating") == [(3, total)] * 2


def test_an_evaluation_that_fails_ends_it(seen):
    shown = EvaluationProgress(_dataset())
    with pytest.raises(ValueError, match="bad batch"), shown.around_fit():
        shown.on_test_begin()
        shown.on_test_batch_begin(2)
        raise ValueError("bad batch")
    assert seen.of("Evaluating") == [(2, 3)]
    assert seen.running == []

"""What hosts tell one another with a batch, with hosts of which one runs here."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.collectives.world import Alone
from towers.hosts.group import HostsDifferError, SignalReceived
from towers.loop.agreement import Agreement


class Host(Alone):
    """One of two hosts, that is told what the other one says."""

    count, names = 2, ("host 0", "host 1")

    def __init__(self, index=0):
        self.index, self.other, self.values = index, 0.0, None

    def all_reduce(self, tensors, purpose):
        return [tensors[0] + self.other]

    def exchange(self, value):
        return [value, self.values]


class Model:
    stop_training, optimizer = False, None


X = np.arange(12, dtype="float32").reshape(4, 3)


@pytest.fixture
def both():
    return [Agreement(Host(k), Model()) for k in range(2)]


def tensors(data):
    def one(each):
        return tf.constant(each) if isinstance(each, np.ndarray) else each

    return tf.nest.map_structure(one, data)


def told(both, first, second):
    return both[0].of_batch(tensors(first)) + both[1].of_batch(tensors(second))


def goes_on(agreement, heard, eager=True):
    """Does a step; tells whether anything happened in it."""
    done = tf.Variable(0)

    def step(heard):
        with agreement.before(heard):
            done.assign_add(1)

    if not eager:
        step = tf.function(step)
    try:
        with agreement.stops(Model()):
            step(heard)
    finally:
        assert int(done) in (0, 1)
        agreement.did = bool(int(done))
    return agreement.did


@pytest.mark.parametrize("eager", [True, False])
def test_the_same_batch_goes_on(both, eager):
    assert goes_on(both[0], told(both, X, X), eager)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (X[:3], "a batch of 4 examples where host 1 has a batch of 3 examples"),
        (X[:0], "a batch of 4 examples where host 1 has none"),
        (X + 1, "different examples in a batch"),
    ],
)
def test_another_batch_ends_it(both, other, said):
    with pytest.raises(HostsDifferError, match=said):
        goes_on(both[0], told(both, X, other), eager=False)
    assert not both[0].did


def test_a_wish_and_a_signal_end_it(both):
    both[1].wish = 1
    with pytest.raises(tf.errors.OutOfRangeError):
        goes_on(both[0], told(both, X, X), eager=False)
    assert both[0].left_a_batch and not both[0].did
    both[1].wish = 15
    with pytest.raises(SignalReceived) as received:
        goes_on(both[0], told(both, X, X), eager=False)
    assert received.value.number == 15 and not both[0].did


def test_all_save_a_batch_after_one_has_wished_it(both):
    for wished in (False, True):
        assert not both[1].agrees_to_save(wished)
        assert not both[0].agrees_to_save(False)
        heard = told(both, X, X)
        assert goes_on(both[0], heard, eager=False)
        for agreement in both:
            agreement.hear(heard)
    assert all(agreement.agrees_to_save(False) for agreement in both)
    # Once.
    assert not any(agreement.agrees_to_save(False) for agreement in both)
    assert [agreement.wish for agreement in both] == [0, 0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # Of whole numbers, the last bits of a float are zero.
        (X, 2 * X),
        (X, X[:, ::-1].copy()),
        (X, X.astype("float64")),
        (X.astype("float16"), 2 * X.astype("float16")),
        (X.astype("uint8"), X.astype("uint8") + 1),
        (X > 5, X <= 5),
        (tf.constant([["a", "b"]]), tf.constant([["b", "a"]])),
        (tf.ragged.constant([[1, 2], [3]]), tf.ragged.constant([[1], [2, 3]])),
        ((X, X + 1), (X + 1, X)),
    ],
)
def test_a_digest_tells_batches_apart(both, first, second):
    first, second = (both[0].of_batch(tensors(each))[0, 1] for each in (first, second))
    assert float(first) != float(second)


def test_a_digest_of_arrays_is_that_of_tensors(both):
    # Keras gives arrays to eager steps.
    assert float(both[0].of_batch(X)[0, 1]) == float(both[0].of_batch(tensors(X))[0, 1])


def test_an_evaluation_ends_for_all_together(both):
    agreement = both[0]
    agreement._hosts.other = both[1].of_batch(tensors(X)) * ([1.0] * 2 + [0.0] * 5)
    with agreement.stops(Model()), agreement.evaluates(tensors(X)):
        pass
    with pytest.raises(HostsDifferError, match="host 0 has none where host 1 has a"):
        agreement.end_evaluation()
    agreement._hosts.other = tf.zeros_like(agreement.of_batch(tensors(X)))
    agreement.end_evaluation()


def test_any_host(both):
    both[0]._hosts.values = False
    assert both[0].any(True) and not both[0].any(False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_first_hosts_learning_rate_is_everybodys_to_the_last_bit(both, dtype):
    keras.config.set_floatx(dtype)
    models = []
    for agreement, rate in zip(both, (1 / 3, 0.3), strict=True):
        models.append(Model())
        models[-1].optimizer = keras.optimizers.SGD(rate)
        agreement._model = models[-1]
    told = tf.add_n([agreement.of_batch(tensors(X)) for agreement in both])
    for agreement, model in zip(both, models, strict=True):
        agreement.hear(told)
        rate = model.optimizer.learning_rate
        assert rate.dtype == dtype
        assert rate.numpy() == np.array(1 / 3, dtype)

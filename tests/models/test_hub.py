"""Backbones of keras-hub, small and with random weights, on towers: as on one device.

Needs the extra [hub].

Almost everything is computed in float64, where rounding is next to nothing: changes of
weights equal those of one device to 1e-10 of each array's size. In float32 they did to
2e-6 of the largest change, but an array whose gradient cancels was off by up to 1e-3 of
itself. So what casts to float32 has to equal to 1e-5 of each array, and what cannot be
computed in float64 to 1e-5 of the largest change.

A batch has six examples, as many as no other axis: Keras's `ops.add` takes a column of
shape (n, 1) for a bias of a square matrix (n, n), and adds it to the wrong axis.
"""

import keras
import numpy as np
import pytest

from tests.variants import slow
from towers import multi_gpu_model
from towers.keras_adapter.layers import layers_of
from towers.parity.report import difference

hub = pytest.importorskip("keras_hub").models

from tests.models.hub import cases  # noqa: E402

QUICK = {"VGG"}


@pytest.fixture(autouse=True)
def again_in_float32():
    yield
    _set_precision("float32")
    keras.backend.clear_session()


def _set_precision(name):
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


def _network(name):
    _set_precision("float32" if name in cases.ONLY_IN_FLOAT32 else "float64")
    return cases.network(name)


def _variants(names):
    return [name if name in QUICK else slow(name) for name in names]


def _trained(name, towers, synchronized=False):
    network = _network(name)
    for layer in layers_of(network):
        if synchronized and isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = layer.synchronized = True
    x, y = cases.inputs(name, network), cases.targets(network)
    model = multi_gpu_model(network, gpus=towers) if towers else network
    before = [variable.numpy() for variable in network.trainable_variables]
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    logs = model.train_on_batch(x, y[0] if len(y) == 1 else y, return_dict=True)
    after = [variable.numpy() for variable in network.trainable_variables]
    return logs["loss"], [b - a for a, b in zip(before, after, strict=True)]


def _assert_equal(name, **options):
    ours, changes = _trained(name, 2, **options)
    theirs, expected = _trained(name, 0, **options)
    tolerance = 1e-5 if name in cases.ROUNDED else 1e-10
    assert difference(ours, theirs) <= tolerance
    largest = max(np.abs(change).max() for change in expected)
    assert largest > 0
    # Some gradients are zero but for rounding.
    least = largest if name in cases.ONLY_IN_FLOAT32 else largest / 1000
    for ours, theirs in zip(changes, expected, strict=True):
        assert difference(ours, theirs, least) <= tolerance


@pytest.mark.parametrize("name", _variants(cases.EXACT))
def test_a_step_equals_that_of_one_device(name, capsys):
    _assert_equal(name)
    said = capsys.readouterr().err
    assert "cannot be read" not in said and "gathered outputs" not in said


@pytest.mark.parametrize("name", _variants(cases.COMPARED))
def test_what_is_not_read_equals(name):
    _assert_equal(name)


@pytest.mark.parametrize("name", _variants(["DenseNet", "ResNet"]))
def test_synchronized_statistics_equal_those_of_one_device(name):
    _assert_equal(name, synchronized=True)


@pytest.mark.parametrize("name", _variants(cases.COUPLED))
def test_examples_that_meet_equal_those_of_one_device(name):
    network = _network(name)
    assert _meet(network, cases.inputs(name, network))
    _assert_equal(name)


def _meet(network, x):
    """Whether the last three examples fare otherwise if the first three are others."""

    def computed(x):
        outputs = keras.tree.flatten(network(x, training=True))
        return [np.asarray(each) for each in outputs], float(sum(network.losses))

    first, last = (
        keras.tree.map_structure(lambda a, part=part: a[part], x)
        for part in (slice(3), slice(3, None))
    )
    # What is no number shows where it gets to.
    broken = keras.tree.map_structure(
        lambda a: a * np.nan if a.dtype.kind == "f" else a, first
    )
    whole, loss = computed(x)
    spread, _ = computed(_joined(broken, last))
    (_, one), (alone, other) = computed(first), computed(last)
    same = all(
        a[3:].shape == b.shape and np.allclose(a[3:], b) and np.allclose(c[3:], b)
        for a, b, c in zip(whole, alone, spread, strict=True)
    )
    return not (same and np.isclose(loss, (one + other) / 2, rtol=1e-4))


def _joined(first, last):
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), first, last)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.FAILS)
def test_keras_alone_does_not_train_these(name):
    network = _network(name)
    with pytest.raises(Exception, match=cases.FAILS[name]):
        network(cases.inputs(name, network))


def test_every_backbone_has_been_tried():
    found = {
        getattr(hub, name).__name__ for name in dir(hub) if name.endswith("Backbone")
    }
    assert found - cases.ABSTRACT == {*map(cases.class_name, cases.ALL)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in cases.EXACT if "B" in each][:3])
def test_rows_that_do_not_meet_are_seen_not_to(name):
    network = _network(name)
    assert not _meet(network, cases.inputs(name, network))

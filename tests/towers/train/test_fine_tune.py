"""What a model begins with, and which of its layers stay as they are."""

import sys
import urllib.error

import keras
import numpy as np
import pytest

from tests.towers.train.runs import TWO_STEPS, assembled, assert_same_bits
from tests.variants import slow
from towers import models
from towers.models.images import applications
from towers.train import checks
from towers.train.outputs import start
from towers.train.parts import fine_tune
from towers.train.settings import Settings

layers = keras.layers


def network(classes, width=4, middle=()):
    """A model in a model, with names of its author's and of Keras's."""
    base = [keras.Input((6, 6, 3)), layers.Conv2D(width, 3, name="stem")]
    base = keras.Sequential([*base, layers.BatchNormalization()], name="base")
    inputs = keras.Input((6, 6, 3))
    x = layers.Flatten()(base(inputs))
    for each in (*middle, layers.Dense(5), layers.Dense(5)):
        x = each(x)
    return keras.Model(inputs, layers.Dense(classes, name="head")(x))


def loaded(model, path):
    return fine_tune.init_weights(Settings(init_weights=str(path)), model)


@pytest.fixture
def saved(tmp_path):
    model = network(3)
    model.compile("adam", "mse")
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "mine.weights.h5")
    return model


@pytest.mark.parametrize("name", ["", "model.keras", "mine.weights.h5"])
def test_what_fits_is_loaded(saved, tmp_path, name):
    # The names that Keras gives are others; the head has its own.
    model = network(7)
    head = model.layers[-1].get_weights()
    said = loaded(model, tmp_path / name)
    assert_same_bits(model.get_weights()[:-2], saved.get_weights()[:-2])
    assert_same_bits(model.layers[-1].get_weights(), head)
    size, whole = saved.count_params() - 18, model.count_params()
    assert said == (
        f"Initial weights of {tmp_path / name}: 10 of 12 variables loaded ({size:,} of "
        f"{whole:,} parameters); not loaded: head (5, 7) (there (5, 3)), head (7,) "
        "(there (3,))."
    )


def test_all_that_fits_is_said(saved, tmp_path):
    said = loaded(network(3), tmp_path)
    assert said.endswith("12 of 12 variables loaded (501 of 501 parameters).")


def test_a_name_tells_a_layer_wherever_it_stands(saved, tmp_path):
    model = network(3, middle=[layers.Dense(64, name="new")])
    before = model.get_layer("new").get_weights()
    said = loaded(model, tmp_path)
    assert "12 of 14 variables loaded" in said
    assert "not loaded: new (64, 64) (not there), new (64,) (not there)." in said
    assert_same_bits(model.get_layer("new").get_weights(), before)
    assert_same_bits(model.layers[-1].get_weights(), saved.layers[-1].get_weights())


def test_weights_of_another_model(saved, tmp_path):
    other = keras.Sequential([keras.Input((2,)), layers.Dense(9)])
    with pytest.raises(ValueError, match=r"Nothing of .* fits .*: dense_?\d* \(2, 9\)"):
        loaded(other, tmp_path)
    (tmp_path / "no.keras").write_text("PK")
    with pytest.raises(ValueError, match="is no file of Keras 3"):
        loaded(other, tmp_path / "no.keras")


def preprocess_input(x, data_format=None):
    """As of ResNet50: blue comes first, and each channel has its own mean."""
    return x[..., ::-1] - np.array([104, 117, 124], np.float32)


def resnet50(weights, include_top=True, input_tensor=None, input_shape=None, **options):
    """As of Keras: it ends without a layer of classes if that is asked for."""
    inputs = keras.Input(input_shape) if input_tensor is None else input_tensor
    x = layers.Conv2D(4, 3, padding="same", name="conv1")(inputs)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    if include_top:
        x = layers.Dense(options["classes"], name="predictions")(x)
    model = keras.Model(*keras.utils.get_source_inputs(x), x)
    if weights:
        kernel = np.random.default_rng(0).normal(size=[3, 3, 3, 4])
        model.get_layer("conv1").set_weights([kernel, np.arange(4)])
    return model


def test_imagenet_weights_see_what_they_were_trained_on(monkeypatch):
    monkeypatch.setattr(applications, "functions", lambda: {"ResNet50": resnet50})
    assert sys.modules[resnet50.__module__].preprocess_input is preprocess_input
    asked = Settings(model="ResNet50", init_weights="imagenet")
    checks.check(asked)
    model = models.build(
        asked.model, input_shape=(8, 8, 3), num_classes=2, options={"imagenet": True}
    )
    said = fine_tune.init_weights(asked, model)
    assert said.startswith("Initial weights of imagenet: 2 of 4 variables loaded")
    assert "predictions (4, 2) (not there)" in said
    theirs = resnet50("imagenet", include_top=False, input_shape=(8, 8, 3))
    pixels = np.random.default_rng(1).integers(0, 256, [2, 8, 8, 3]).astype("float32")
    features = keras.Model(model.inputs, model.layers[-2].output)
    np.testing.assert_allclose(
        features(pixels / 127.5 - 1), theirs(preprocess_input(pixels)), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("name", "scale", "offset", "order"),
    [
        ("MobileNetV2", [1] * 3, [0] * 3, [0, 1, 2]),
        ("EfficientNetV2B0", [127.5] * 3, [127.5] * 3, [0, 1, 2]),
        ("VGG16", [127.5] * 3, [3.82, 10.721, 23.561], [2, 1, 0]),
        ("DenseNet121", [2.1834, 2.2321, 2.2222], [0.0655, 0.1964, 0.4178], [0, 1, 2]),
    ],
)
def test_pixels_of_keras_networks(name, scale, offset, order):
    found = applications._pixels_of(applications.functions()[name])
    np.testing.assert_allclose(found.scale, scale, rtol=1e-4)
    np.testing.assert_allclose(found.offset, offset, atol=1e-3)
    assert found.order == order


@pytest.mark.parametrize("name", [slow("ResNet50"), slow("ConvNeXtTiny"), "VGG16"])
def test_a_download_that_fails_is_a_sentence(monkeypatch, name):
    def fail(*_, **__):
        raise urllib.error.URLError("no network")

    function = applications.functions()[name]
    monkeypatch.setattr(sys.modules[function.__module__].file_utils, "get_file", fail)
    asked = Settings(model=name, init_weights="imagenet")
    said = f"Cannot download the ImageNet weights of {name} .*no network.*; expected a"
    with pytest.raises(ValueError, match=said):
        fine_tune._download(asked.model, (64, 64, 3), "a")
    with pytest.raises(ValueError, match="images have 1 channels, and ImageNet's"):
        fine_tune._download(asked.model, (64, 64, 1), "a")


@pytest.mark.parametrize(
    ("asked", "frozen", "said"),
    [
        (("base", "dense*"), 10 - 2, "3 layers with 475 of 493 trainable parameters"),
        (("stem",), 2, "1 layer with 112 of 493 trainable parameters: stem."),
        (("2",), 6, "2 layers with 445 of 493 trainable parameters: base, dense"),
    ],
)
def test_freeze(asked, frozen, said):
    keras.utils.clear_session()
    model = network(3)
    assert said in fine_tune.freeze(Settings(freeze=asked), model)
    assert len(model.trainable_variables) == 10 - frozen


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ("stem", "body*"),
            "--freeze=body\\*, but no layer .* expected some of base, ",
        ),
        (("9",), "--freeze=9, but the model cnn has 4 layers with weights"),
        (("*",), "--freeze=\\*, after which the model cnn has nothing left to train"),
        (("4",), "--freeze=4, after which .* nothing left"),
    ],
)
def test_layers_that_cannot_be_frozen(asked, said):
    with pytest.raises(ValueError, match=said):
        fine_tune.freeze(Settings(freeze=asked), network(3))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"init_weights": "none.keras"}, "--init_weights=none.keras, but there is no"),
        ({"init_weights": "/"}, "there is no file /model.keras of weights"),
        ({"init_weights": "imagenet"}, "no ImageNet weights for the model cnn"),
        (
            {"init_weights": "imagenet", "model": "EfficientNetB0"},
            "no ImageNet weights for the model EfficientNetB0; .* EfficientNetV2B0",
        ),
        ({"freeze": ("0",)}, "--freeze=0; expected at least 1, or names"),
    ],
)
def test_bad_flags(flags, said):
    with pytest.raises(ValueError, match=said):
        checks.check(Settings(**flags))


def test_a_run_fine_tunes(saved, tmp_path):
    first = assembled(*TWO_STEPS, f"--model_dir={tmp_path}/a", "--seed=1")
    first.model.save(tmp_path / "first.keras")
    flags = f"--init_weights={tmp_path}/first.keras", "--freeze=1"
    job = assembled(*TWO_STEPS, *flags, f"--model_dir={tmp_path}/b")
    assert_same_bits(job.model.get_weights(), first.model.get_weights())
    assert len(job.model.trainable_variables) < len(first.model.trainable_variables)
    said = start.text(job).splitlines()
    assert all(note in said for note in job.notes)
    assert [note.split()[0] for note in job.notes] == ["Initial", "Frozen:"]
    assert f"--init_weights={tmp_path}/first.keras" in job.settings.as_text()

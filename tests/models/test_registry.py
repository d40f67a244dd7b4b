"""models: what every name builds, and what wrong names say."""

import importlib.util
import inspect
import os
import random
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests import warm
from tests.variants import slow
from towers import models
from towers.models import registry, spec
from towers.models.images import applications, resnet_cifar

OWN = (
    *("cnn", "dlrm", "lstm", "mlp", "resnet20", "resnet32", "resnet56"),
    *("transformer_encoder", "transformer_lm", "unet"),
)


@pytest.fixture
def mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture
def user_file(tmp_path):
    """Returns a function that writes a file of the user's and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return write


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, shape).astype("float32")


def count(weights) -> int:
    return sum(int(np.prod(w.shape)) for w in weights)


# What is built


@pytest.mark.parametrize(
    "shape", [(7, 5, 2), *map(slow, [(8, 8, 1), (28, 28, 1), (32, 32, 3)])]
)
@pytest.mark.parametrize("name", ["cnn", "lstm", "mlp", "resnet20"])
def test_own_families_on_any_size(name, shape):
    model = models.build(name, input_shape=shape, num_classes=7)
    logits = keras.ops.convert_to_numpy(model(images(3, *shape)))
    assert logits.shape == (3, 7)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_mlp_takes_data_that_are_not_images():
    model = models.build("mlp", input_shape=[20], num_classes=3)
    assert model.output_shape == (None, 3)


def test_lstm_reads_rows_from_top_to_bottom():
    model = models.build("lstm", input_shape=(5, 4, 3), num_classes=2)
    recurrent = next(x for x in model.layers if isinstance(x, keras.layers.LSTM))
    assert recurrent.input.shape == (None, 5, 4 * 3)
    probe = keras.Model(model.input, recurrent.input)
    picture = images(1, 5, 4, 3)
    rows = keras.ops.convert_to_numpy(probe(picture))
    np.testing.assert_array_equal(rows[0, 2], picture[0, 2].ravel())


@pytest.mark.parametrize(("side", "last"), [(8, 4), (28, 7), (32, 8), (2, 2)])
def test_cnn_does_not_pool_a_small_map_away(side, last):
    model = models.build("cnn", input_shape=(side, side, 1), num_classes=10)
    convolutions = [x for x in model.layers if isinstance(x, keras.layers.Conv2D)]
    assert convolutions[-1].output.shape[1] == last


@pytest.mark.parametrize(
    # The paper's table 6, in millions.
    ("depth", "millions"),
    [(20, 0.27), slow(32, 0.46), slow(56, 0.85)],
)
def test_resnet_has_the_papers_parameters(depth, millions):
    name = f"resnet{depth}"
    model = models.build(name, input_shape=(32, 32, 3), num_classes=10)
    parameters = count(model.trainable_variables)
    assert round(parameters / 1e6, 2) == millions
    if depth == 20:
        # Counted by hand: kernels, BatchNorm's scales and offsets, the dense layer.
        blocks = 9 * (3 * 16 + 6 * 16**2 + 16 * 32 + 5 * 32**2 + 32 * 64 + 5 * 64**2)
        assert parameters == blocks + 2 * (7 * 16 + 6 * 32 + 6 * 64) + 64 * 10 + 10
    kernels = [w for w in model.trainable_variables if w.name == "kernel"]
    assert len(kernels) == depth


def test_resnet_of_another_depth():
    with pytest.raises(ValueError, match=r"6n \+ 2 layers, but depth=21"):
        resnet_cifar.build((32, 32, 3), 10, depth=21)


def test_resnet_shortcut_is_option_a():
    # With every convolution at zero, only the shortcuts are left of the blocks:
    # the stem's map, subsampled twice, between the zero channels.
    model = models.build("resnet20", input_shape=(8, 8, 3), num_classes=2)
    _, *convolutions = (x for x in model.layers if isinstance(x, keras.layers.Conv2D))
    for layer in convolutions:
        layer.kernel.assign(keras.ops.zeros_like(layer.kernel))
    stem_out = next(x for x in model.layers if isinstance(x, keras.layers.ReLU))
    before_pool = next(
        x for x in model.layers if isinstance(x, keras.layers.GlobalAveragePooling2D)
    )
    probe = keras.Model(model.input, [stem_out.output, before_pool.input])
    start, end = (keras.ops.convert_to_numpy(y) for y in probe(images(2, 8, 8, 3)))
    assert end.shape == (2, 2, 2, 64)
    np.testing.assert_array_equal(end[..., 24:40], start[:, ::4, ::4])
    assert start[:, ::4, ::4].any()
    assert not end[..., :24].any()
    assert not end[..., 40:].any()


@pytest.mark.parametrize("name", ["cnn", slow("lstm"), slow("resnet20")])
def test_saved_and_loaded(name, tmp_path):
    model = models.build(name, input_shape=(8, 8, 1), num_classes=10)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x = images(4, 8, 8, 1)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(loaded(x)), keras.ops.convert_to_numpy(model(x))
    )


@pytest.mark.quick_one_in(3)
@pytest.mark.parametrize(
    "name", ["cnn", "lstm", "mlp", slow("resnet20"), "MobileNetV2"]
)
@pytest.mark.usefixtures("mixed_precision")
def test_logits_are_float32_under_mixed_precision(name):
    model = models.build(name, input_shape=(32, 32, 3), num_classes=4)
    assert model.compute_dtype == "float16"
    logits = keras.ops.convert_to_numpy(model(images(2, 32, 32, 3)))
    assert logits.shape == (2, 4)
    assert logits.dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "MOBILENETV2"])
def test_applications_in_any_case(name):
    model = models.build(name, input_shape=(32, 32, 3), num_classes=5)
    assert model.output_shape == (None, 5)
    logits = keras.ops.convert_to_numpy(model(images(2, 32, 32, 3)))
    assert np.abs(logits.sum(axis=-1) - 1).max() > 1e-3, "these are probabilities"


@pytest.mark.parametrize("name", ["MobileNetV3Small", slow("EfficientNetB0")])
def test_applications_see_the_pixels_range(name):
    # The networks that scale [0, 255] themselves must still tell images in
    # [-1, 1] apart: the first convolution sees values of the size of one.
    model = models.build(name, input_shape=(32, 32, 3), num_classes=5)
    first = next(x for x in model.layers if isinstance(x, keras.layers.Conv2D))
    seen = keras.ops.convert_to_numpy(
        keras.Model(model.input, first.input)(images(2, 32, 32, 3))
    )
    assert 0.5 < np.ptp(seen) <= 2


def test_every_application_can_return_logits():
    # What applications.build passes to each of them.
    for name, function in applications.functions().items():
        parameters = inspect.signature(function).parameters
        assert {"input_tensor", "classes", "classifier_activation"} <= set(parameters)
        assert name in models.names()


def test_names_begin_with_this_projects_own():
    assert models.names()[: len(OWN)] == OWN
    assert "ResNet50" in models.names()


def test_seed():
    def weights(seed):
        model = models.build("cnn", input_shape=(8, 8, 1), num_classes=10, seed=seed)
        return model.get_weights()

    random.seed(5)
    np.random.seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist()
    first, again, other = weights(1), weights(1), weights(2)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any((a != b).any() for a, b in zip(first, other, strict=True))
    without = weights(None)
    assert any((a != b).any() for a, b in zip(without, weights(None), strict=True))


# The user's own


def test_user_file(user_file):
    path = user_file(
        "import keras\n"
        "def small(input_shape, num_classes):\n"
        "    layers = [keras.layers.Flatten(), keras.layers.Dense(num_classes)]\n"
        "    return keras.Sequential([keras.Input(input_shape), *layers])\n"
    )
    model = models.build(f"{path}:small", input_shape=(8, 8, 1), num_classes=3)
    assert model.output_shape == (None, 3)


def test_user_file_from_the_current_folder(user_file, monkeypatch):
    path = user_file("import keras\ndef f(s, n):\n    return keras.Sequential()\n")
    monkeypatch.chdir(os.path.dirname(path))
    assert isinstance(
        models.build("mine.py:f", input_shape=(2,), num_classes=3), keras.Model
    )


def test_user_file_imports_what_lies_beside_it(tmp_path, monkeypatch):
    """As a script does, with the current directory of a program that has begun."""
    blocks = "import keras\ndef make(s, n):\n    return keras.Sequential()\n"
    for folder, text in (("mine", blocks), ("here", "")):
        (tmp_path / folder / "models").mkdir(parents=True)
        (tmp_path / folder / "models" / "__init__.py").touch()
        (tmp_path / folder / "models" / "blocks.py").write_text(text)
    # It hides nothing that is installed.
    (tmp_path / "mine" / "absl.py").write_text("raise ImportError")
    (tmp_path / "mine" / "net.py").write_text(
        "import absl.app\nfrom models.blocks import make\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    elsewhere = [path for path in sys.path if not [*Path(path).glob("models*")]]
    monkeypatch.setattr(sys, "path", [*elsewhere, str(tmp_path / "here")])
    for name in ("models", "models.blocks"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        name = f"{tmp_path}/mine/net.py:make"
        assert isinstance(
            models.build(name, input_shape=(2,), num_classes=3), keras.Model
        )
        # While it is used, too.
        assert importlib.util.find_spec("net").origin == f"{tmp_path}/mine/net.py"
    finally:
        for name in ("models", "models.blocks"):
            sys.modules.pop(name, None)


def test_check_does_not_run_the_file(user_file):
    path = user_file("raise SystemExit\nif True:\n    def f(s, n): ...\n")
    models.check(f"{path}:f")
    path = user_file("from somewhere import *\n")
    models.check(f"{path}:f")
    path = user_file("import functools\ng = functools.partial(dict)\n")
    models.check(f"{path}:g")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def g(s, n): ...", r"no function 'f' in '.*mine.py' \(it defines g\)"),
        ("x = 1", r"no function 'f' in .*\(it defines none\); name a function that"),
        ("def f(:", "mine.py' is not valid Python"),
    ],
)
def test_user_file_errors_found_by_check(user_file, text, message):
    name = f"{user_file(text)}:f"
    for attempt in (
        lambda: models.check(name),
        lambda: models.build(name, input_shape=(4,), num_classes=2),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f = 3", "no function 'f'"),
        ("f = 3\nn: int = 2\ndef g(): ...", r"no function 'f' in .*\(it defines g\)"),
        ("from os.path import *", "no function 'f'"),
        (
            "import nosuch\ndef f(s, n): ...",
            r"raised ModuleNotFoundError \(No module named 'nosuch'\) in line 1 when "
            r"loaded; install what is missing, or correct the file\.",
        ),
        (
            "def f(s, n): return s[9]",
            r"raised IndexError \(.*\) in line 1 when called with \(\(4,\), 2\); corr",
        ),
        (
            "import sys; sys.exit('no')\ndef f(s, n): ...",
            r"raised SystemExit \(no\) in line 1 w",
        ),
        (
            "def f(s, n): raise SystemExit",
            r"raised SystemExit \(\) in line 1 when called",
        ),
        ("def f(): ...", r"returned NoneType, not a keras.Model"),
        (
            "def f(input_shape, num_outputs): return num_outputs + 'x'",
            r"raised TypeError \(.*called with \(input_shape=\(4,\), num_outputs=2\)",
        ),
        (
            "def f(input_shape, vocab_size): ...",
            r"parameter 'vocab_size', and nothing .* \(did you mean vocabulary_size\?\)"
            r"; expected parameters among input_shape, num_outputs, .*, or a default",
        ),
        ("def f(a, b, c): ...", "has a parameter 'a', and nothing of the data is call"),
        ("def f(table_sizes): ...", "asks for table_sizes, which these data do not"),
        ("def f(s, n): return 'x'", "returned str, not a keras.Model"),
    ],
)
def test_user_file_errors_found_by_build(user_file, text, message):
    name = f"{user_file(text)}:f"
    models.check(name)
    with pytest.raises(ValueError, match=message):
        models.build(name, input_shape=(4,), num_classes=2)


@pytest.mark.parametrize(
    ("parameters", "got"),
    [
        ("shape, n", {"shape": (7,), "n": 3}),
        ("*both", {"both": ((7,), 3)}),
        ("s, n, /, task='x'", {"s": (7,), "n": 3, "task": "tagging"}),
        ("s, n, width", {"s": (7,), "n": 3, "width": 5}),
        ("num_classes, input_shape", {"num_classes": 4, "input_shape": (7,)}),
        (
            "vocabulary_size, width=1, depth=2, class_names=None, table_sizes='own'",
            {"vocabulary_size": 9, "width": 5, "depth": 2, "class_names": ("a",)}
            | {"table_sizes": "own"},
        ),
        ("sequence_length", {"sequence_length": None}),
    ],
)
def test_a_function_gets_what_it_asks_for(user_file, parameters, got):
    path = user_file(
        "import keras\n"
        f"def f({parameters}):\n"
        "    got = dict(locals())\n"
        "    model = keras.Sequential()\n"
        "    model.got = got\n"
        "    return model\n"
    )
    facts = models.Facts(
        input_shape=(7,),
        num_outputs=3,
        num_classes=4,
        task="tagging",
        class_names=("a",),
        vocabulary_size=9,
    )
    options = {"width": 5} if "width" in got else None
    assert models.build(f"{path}:f", facts, options=options).got == got


def test_a_function_may_take_everything(user_file):
    path = user_file(
        "import keras\n"
        "def f(input_shape, **others):\n"
        "    model = keras.Sequential()\n"
        "    model.got = others\n"
        "    return model\n"
    )
    got = models.build(f"{path}:f", input_shape=(4,), num_classes=2).got
    assert got == {"num_outputs": 2, "num_classes": 2, "task": "classification"}


def test_options():
    facts = models.Facts(input_shape=(8, 8, 1), num_outputs=3)
    model = models.build("cnn", facts, options={"widths": (5,)})
    assert model.layers[1].filters == 5
    with pytest.raises(ValueError, match="'cnn' has no parameter 'heads' for heads=2"):
        models.build("cnn", facts, options={"heads": 2})


def test_options_are_checked_before_anything_is_built(user_file):
    assert {o for _, own in spec.OWN.values() for o in own} == {*spec.OPTIONS}
    for name, (_, taken) in spec.OWN.items():
        models.check(name, taken)
        for option in {*spec.OPTIONS} - {*taken}:
            with pytest.raises(
                ValueError, match=f"{option} in --model_options for --model={name}; ex"
            ):
                models.check(name, [option])
    with pytest.raises(
        ValueError, match="width in --model_options for --model=ResNet50; exp"
    ):
        models.check("resnet50", ["width"])
    path = user_file("def f(s, n, *, width): ...\ndef g(**k): ...\n")
    models.check(f"{path}:f", ["width"])
    models.check(f"{path}:g", ["heads"])
    with pytest.raises(
        ValueError, match=r"heads in --m.*, but .* 'f' .*no parameter 'heads'"
    ):
        models.check(f"{path}:f", ["heads"])


# Wrong names and shapes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnet21",
            r"no model 'resnet21' \(did you mean .*resnet20.*file.py:function",
        ),
        ("mobilnet", r"did you mean MobileNet"),
        ("qqqqqq", r"no model 'qqqqqq'; use one of cnn, dlrm, lstm"),
        ("", "must be text"),
        (None, "name must be text, but None"),
        ("nosuch.py:f", r"no file 'nosuch.py' \(looked for as '/.*correct the path"),
        ("nosuch.py:", "add the name of the function, or leave out the colon"),
        ("nosuch.py:f()", "add the name of the function, or leave out the colon"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=message):
        models.check(name)
    with pytest.raises(ValueError, match=message):
        models.build(name, input_shape=(8, 8, 1), num_classes=10)


@pytest.mark.parametrize("name", ["cnn", "lstm", "resnet20", "ResNet50"])
def test_images_are_needed(name):
    with pytest.raises(ValueError, match=r"\(height, width, channels\).*\(64,\).*mlp"):
        models.build(name, input_shape=(64,), num_classes=10)


@pytest.mark.parametrize("shape", [(), 8, (8, 0, 1), (None, None, 3), "88", (8.0,)])
def test_wrong_shapes(shape):
    with pytest.raises(ValueError, match="input_shape must hold whole numbers"):
        models.build("mlp", input_shape=shape, num_classes=10)


@pytest.mark.parametrize("classes", [0, -1, 2.0, True, None])
def test_wrong_class_counts(classes):
    with pytest.raises(ValueError, match="num_classes must be a whole number"):
        models.build("mlp", input_shape=(8,), num_classes=classes)


def test_images_too_small_for_an_application():
    with pytest.raises(ValueError) as caught:
        models.build("InceptionV3", input_shape=(32, 32, 3), num_classes=10)
    message = str(caught.value)
    assert "keras.applications.InceptionV3 cannot be built" in message
    assert "at least 75x75" in message
    assert message.endswith("choose larger images or another model.")
    assert "\n" not in message


def test_the_names_are_those_of_the_tables():
    assert set(spec.OWN) == set(registry._OWN)
    assert set(spec.APPLICATIONS) == set(applications.functions())


def test_check_leaves_the_devices_alone():
    script = (
        "from towers import models\n"
        "models.check('resnet20')\n"
        "models.check('ResNet50')\n"
        "import tensorflow as tf\n"
        "cpu = tf.config.list_physical_devices('CPU')[0]\n"
        "part = tf.config.LogicalDeviceConfiguration()\n"
        "tf.config.set_logical_device_configuration(cpu, [part] * 3)\n"
        "print(len(tf.config.list_logical_devices('CPU')))\n"
    )
    result = warm.run("tests.program", script)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "3"


def test_a_preset_of_keras_hub_is_named_with_a_rank():
    assert spec.split_hub("hub:gpt2_base_en") == ("gpt2_base_en", None)
    home = os.path.expanduser("~/of_gpt2.py")
    assert spec.split_hub("hub:~/of_gpt2.py?lora=8") == (home, 8)
    assert not spec.is_user_file("hub:~/of_gpt2.py?lora=8")
    with pytest.raises(ValueError, match="no ImageNet weights"):
        spec.check_imagenet("hub:vit")


@pytest.mark.parametrize("name", ["hub:", "hub:?lora=8", "hub:a?lora=", "hub:a?lora=0"])
def test_a_preset_needs_a_name_and_a_rank(name):
    with pytest.raises(ValueError, match=r"named hub:PRESET or hub:PRESET\?lora=RANK"):
        spec.check(name)


def test_a_preset_needs_keras_hub(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="which is not installed; run: pip install"):
        spec.check("hub:gpt2_base_en")

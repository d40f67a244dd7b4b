"""--model=hub:PRESET: presets of keras-hub, with LoRA, as Keras alone trains them.

Needs the extra [hub]. Presets are small, of random weights, and in folders.
"""

import csv
import io

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

hub = pytest.importorskip("keras_hub")

from tests import warm  # noqa: E402
from tests.models.hub import presets  # noqa: E402
from tests.towers.train.runs import read_settings  # noqa: E402
from towers import models, multi_gpu_model  # noqa: E402
from towers.input_pipeline import text  # noqa: E402
from towers.models import hub as hub_models  # noqa: E402
from towers.models.facts import Facts  # noqa: E402
from towers.predict.trained import load_model  # noqa: E402

LORA = 4
LENGTH = presets.LENGTH
PROMPT = "the self!"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    keras.utils.set_random_seed(1)
    root = tmp_path_factory.mktemp("presets")
    for make in (presets.gpt2, presets.vit, presets.resnet):
        make(root / make.__name__)
    return root


def text_facts(length=LENGTH):
    size = len(presets.TOKENS)
    return Facts(
        input_shape=(length,),
        num_outputs=size,
        num_classes=size,
        task="language_model",
        vocabulary_size=size,
        sequence_length=length,
    )


def image_facts(shape=(32, 32, 3), classes=3, task="classification"):
    return Facts(input_shape=shape, num_outputs=classes, num_classes=classes, task=task)


def fitted(model, x, y, towers=None):
    """Trains on batches in their order; returns the losses of the epochs."""
    trained = multi_gpu_model(model, gpus=towers) if towers else model
    trained.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    history = trained.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return history.history["loss"]


def compare(ours, task, given, keras_given, y):
    """Trains ours on two towers, keras-hub's by Keras alone, and compares them."""
    # The first values of LoRA, and of a new head, are drawn.
    task.set_weights(ours.layers[-1].task.get_weights())
    before = [variable.numpy() for variable in ours.variables]
    losses = fitted(ours, given, y, towers=2)
    np.testing.assert_allclose(losses, fitted(task, keras_given, y), rtol=1e-5)
    pairs = zip(ours.variables, task.variables, before, strict=True)
    trained = {id(variable) for variable in ours.trainable_variables}
    assert 0 < len(trained) < len(before)
    for variable, theirs, first in pairs:
        if id(variable) in trained:
            changed = np.abs(theirs.numpy() - first).max()
            assert changed > 0
            difference = np.abs(variable.numpy() - theirs.numpy()).max()
            assert difference <= 1e-4 * changed, variable.path
        elif "seed" not in variable.path:
            np.testing.assert_array_equal(variable.numpy(), first, variable.path)


def test_a_language_model_with_lora_equals_keras(folder):
    path = str(folder / "gpt2")
    ours = models.build(f"hub:{path}?lora={LORA}", text_facts(), seed=1)
    task = hub.models.CausalLM.from_preset(path, preprocessor=None)
    task.backbone.enable_lora(LORA)
    tokens = np.random.default_rng(0).integers(0, 100, (8, LENGTH + 1), "int32")
    x, y = tokens[:, :-1], tokens[:, 1:]
    compare(ours, task, x, {"token_ids": x, "padding_mask": np.ones_like(x)}, y)
    trained = {variable.path.split("/")[-1] for variable in ours.trainable_variables}
    assert trained == {"lora_kernel_a", "lora_kernel_b", "bias"}


def test_pictures_with_lora_equal_keras(folder):
    path = str(folder / "vit")
    ours = models.build(f"hub:{path}?lora={LORA}", image_facts(), seed=1)
    task = hub.models.ImageClassifier.from_preset(
        path, preprocessor=None, num_classes=3, activation=None
    )
    task.backbone.enable_lora(LORA)
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 32, 32, 3), "uint8")
    y = rng.integers(0, 3, 8)
    # What keras-hub itself makes of pixels.
    converter = hub.layers.ImageConverter.from_preset(path)
    compare(ours, task, pixels / np.float32(127.5) - 1, converter(pixels), y)


def test_each_color_is_scaled_as_the_preset_says(folder, tmp_path):
    path = str(folder / "resnet")
    ours = models.build(f"hub:{path}", image_facts(), seed=1)
    pixels = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), "uint8")
    converter = hub.layers.ImageConverter.from_preset(path)
    expected = ours.layers[-1].task(converter(pixels))
    given = pixels / np.float32(127.5) - 1
    np.testing.assert_allclose(ours(given), expected, rtol=1e-4, atol=1e-5)
    ours.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(given), ours(given))
    assert again.layers[-1].get_config() == ours.layers[-1].get_config()


def test_logits_are_float32_where_the_task_computes_in_bfloat16(folder):
    keras.config.set_dtype_policy("mixed_bfloat16")
    ours = models.build(f"hub:{folder / 'vit'}?lora={LORA}", image_facts(), seed=1)
    task = ours.layers[-1].task
    assert {each.dtype for each in ours.trainable_variables} == {"float32"}
    assert task.backbone.compute_dtype == "bfloat16"
    assert ours.output.dtype == "float32"


def test_a_tokenizer_is_that_of_the_preset(folder, tmp_path):
    path = str(folder / "gpt2")
    ours = text.HubTokenizer(hub_models.tokenizer(path))
    theirs = hub.tokenizers.Tokenizer.from_preset(path)
    texts = [PROMPT, "", "a < b\n  the other"]
    ids = ours.encode(tf.constant(texts))
    assert ids.dtype == tf.int32
    assert ids.to_list() == [theirs(each).tolist() for each in texts]
    # Id 0 is a token in GPT-2's vocabulary.
    assert not ours.has_padding and 0 in ids[0]
    assert ours.decode([*ids[0].numpy(), ours.end]) == PROMPT
    assert (ours.size, ours.end) == (len(presets.TOKENS), len(presets.TOKENS) - 1)
    ours.save(str(tmp_path))
    again = text.load(str(tmp_path))
    assert again.encode(tf.constant(texts)).to_list() == ids.to_list()
    assert again.fingerprint == ours.fingerprint
    assert again.file() == ours.file()
    (tmp_path / "tokenizer.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="expected the file that a run has saved"):
        text.load(str(tmp_path))


def test_a_tokenizer_runs_in_a_graph(folder):
    pytest.importorskip("tensorflow_text")
    tokenizer = text.HubTokenizer(hub_models.tokenizer(str(folder / "gpt2")))
    texts = tf.constant([PROMPT, "the"])
    data = tf.data.Dataset.from_tensors(texts).map(tokenizer.encode)
    (ids,) = data
    assert ids.to_list() == tokenizer.encode(texts).to_list()


def train(*flags, code=0):
    given = ("--variable_update=parameter_server", "--num_gpus=2", "--deterministic")
    done = warm.run("towers.train", *given, *flags)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the self sees the other self! " * 60)
    return path


def variables(run):
    # model.keras has no states of random numbers.
    trained = load_model(str(run)).model
    return [v.numpy() for v in trained.variables if "seed" not in v.path]


@pytest.mark.slow
def test_text_from_training_to_a_preset(folder, texts, tmp_path):
    flags = (
        *(f"--dataset=text:{texts}", f"--model=hub:{folder / 'gpt2'}?lora={LORA}"),
        *(f"--sequence_length={LENGTH}", "--batch_size=16", "--learning_rate=0.01"),
    )
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(*flags, f"--model_dir={whole}", "--train_epochs=2")
    # Ends within the second epoch, without model.keras of the end of it.
    train(*flags, f"--model_dir={run}", "--train_epochs=2", "--max_train_steps=6")
    done = train(*flags, f"--model_dir={run}", "--train_epochs=2")
    assert "Continuing from" in done.stdout
    for ours, theirs in zip(variables(run), variables(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    written = warm.run("towers.generate", run, f"--prompt={PROMPT}", "--max_tokens=5")
    assert written.stdout.startswith(PROMPT), written.stderr
    done = warm.run("towers.export", run, tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    trained = load_model(str(run))
    tokens = np.arange(2 * LENGTH, dtype="int32").reshape(2, LENGTH)
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    served = exported.serve(tokens)
    expected = trained.model(tokens)
    np.testing.assert_allclose(
        served["probabilities"], tf.nn.softmax(expected), rtol=1e-4
    )
    # As docs/train/hub.md writes a preset of a run: LoRA is part of the weights there.
    task = trained.model.layers[-1].task
    path = str(tmp_path / "tuned")
    task.save_to_preset(path)
    tuned = hub.models.CausalLM.from_preset(path, preprocessor=None)
    found = tuned({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert tuned.count_params() < task.count_params()


@pytest.mark.slow
def test_a_run_that_has_not_ended_is_loaded_with_lora(folder, texts, tmp_path):
    done = warm.run(
        *("towers.train", f"--dataset=text:{texts}", "--variable_update=replicated"),
        *(f"--model=hub:{folder / 'gpt2'}?lora={LORA}", f"--model_dir={tmp_path}"),
        *(f"--sequence_length={LENGTH}", "--num_gpus=2", "--train_epochs=1"),
    )
    assert done.returncode == 0, done.stderr
    ended = load_model(str(tmp_path)).model
    # As it is before the end is written.
    (tmp_path / "summary.json").unlink()
    running = load_model(str(tmp_path)).model
    assert len(running.trainable_variables) == len(ended.trainable_variables)
    tokens = np.arange(LENGTH, dtype="int32")[None]
    np.testing.assert_allclose(running(tokens), ended(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", [f"vit?lora={LORA}", "resnet"])
def test_pictures_from_training_to_predictions(folder, tmp_path, model):
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("light", 200)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(level - 40, level + 40, (32, 32, 3), "uint8")
            path = tmp_path / "photos" / name / f"{number}.png"
            Image.fromarray(pixels).save(path)
    flags = (
        *(f"--dataset=folder:{tmp_path / 'photos'}", "--image_size=32"),
        *(f"--model=hub:{folder / model}", f"--model_dir={tmp_path / 'run'}"),
        *("--batch_size=8", "--learning_rate=0.01"),
    )
    train(*flags, "--train_epochs=2")
    assert "Continuing from" in train(*flags, "--train_epochs=6").stdout
    new = [*map(str, sorted((tmp_path / "photos").glob("*/1*.png")))]
    done = warm.run("towers.predict", tmp_path / "run", *new)
    rows = [*csv.DictReader(io.StringIO(done.stdout))]
    assert [row["class"] for row in rows] == ["dark"] * 3 + ["light"] * 3, done.stderr
    done = warm.run("towers.export", tmp_path / "run", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    model = tf.saved_model.load(str(tmp_path / "exported"))
    served = model.serve(tf.constant([tf.io.read_file(path).numpy() for path in new]))
    found = [float(row["probability_light"]) for row in rows]
    np.testing.assert_allclose(served["probabilities"][:, 1], found, rtol=1e-4)


def test_lora_needs_attention(folder):
    with pytest.raises(ValueError, match="ResNetBackbone, which has no attention"):
        models.build(f"hub:{folder / 'resnet'}?lora=4", image_facts())


@pytest.mark.parametrize(
    ("name", "facts", "said"),
    [
        ("gpt2", text_facts(LENGTH + 1), "give --sequence_length=16 or less"),
        ("gpt2", text_facts(None), "any number of tokens"),
        ("vit", image_facts((28, 28, 3)), r"takes pictures of \(32, 32, 3\)"),
        ("vit", image_facts((32, 32, 1)), "as many colors"),
        ("vit", image_facts(task="segmentation"), "is for pictures, or for"),
        ("vit", image_facts((5,)), "is for pictures, or for"),
        ("vit", text_facts(), "expected a folder .* of a CausalLM"),
        ("gpt2", image_facts(), "expected a folder .* of a ImageClassifier"),
    ],
)
def test_what_does_not_fit_is_one_sentence(folder, name, facts, said):
    with pytest.raises(ValueError, match=said) as raised:
        models.build(f"hub:{folder / name}", facts)
    assert "\n" not in str(raised.value)


def test_without_a_network_a_sentence_says_so(monkeypatch, tmp_path):
    # Nothing listens there, and nothing was downloaded before.
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path))
    said = "cannot be downloaded .*; expected a network connection, or a folder"
    with pytest.raises(ValueError, match=said) as raised:
        models.build("hub:gpt2_base_en", text_facts())
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match=said):
        hub_models.tokenizer("gpt2_base_en")


def test_an_unknown_preset_names_those_that_are_near():
    with pytest.raises(ValueError, match=r"such as .*gpt2_base_en"):
        models.build("hub:gpt2_base_em", text_facts())
    with pytest.raises(ValueError, match=r"such as .*gpt2_base_en"):
        hub_models.tokenizer("gpt2_base_em")


def test_flags_name_the_folder_from_anywhere(folder, monkeypatch):
    monkeypatch.chdir(folder)
    settings = read_settings("--model=hub:gpt2?lora=4", "--dataset=text:python")
    assert f"--model=hub:{folder / 'gpt2'}?lora=4" in settings.as_lines()
    settings = read_settings("--model=hub:gpt2_base_en", "--dataset=text:python")
    assert "--model=hub:gpt2_base_en" in settings.as_lines()
    with pytest.raises(ValueError, match="so leave out --tokenizer"):
        read_settings("--model=hub:gpt2", "--dataset=text:python", "--tokenizer=bytes")
    with pytest.raises(ValueError, match=r"There is no folder '\./gpt3'"):
        read_settings("--model=hub:./gpt3", "--dataset=text:python")
    with pytest.raises(ValueError, match="Received width in --model_options for --mo"):
        read_settings(
            "--model=hub:gpt2", "--dataset=text:python", "--model_options=width=8"
        )

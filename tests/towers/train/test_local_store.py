"""`--local_store` of towers.train: the same training, from another disk."""

import os

import keras
import numpy as np
import pytest
from PIL import Image

from tests import warm


@pytest.fixture
def pictures(tmp_path):
    random = np.random.default_rng(0)
    for number in range(120):
        folder = tmp_path / "pictures" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        size = random.integers(8, 30)
        pixels = random.integers(0, 256, [size, size, 3], np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "pictures"


def train(tmp_path, pictures, name, *flags):
    done = warm.run(
        "towers.train",
        f"--dataset=folder:{pictures}",
        *("--image_size=8", "--model=mlp", "--num_gpus=2", "--batch_size=16"),
        *("--train_epochs=2", "--cache=none", "--deterministic", "--recipe=cifar"),
        f"--model_dir={tmp_path / name}",
        *flags,
    )
    assert done.returncode == 0, done.stderr
    model = keras.saving.load_model(tmp_path / name / "model.keras")
    return done.stdout, model.get_weights()


@pytest.mark.slow
def test_trains_as_without_it(tmp_path, pictures):
    store = tmp_path / "store"
    flags = [f"--local_store=1:{store}"]
    _, expected = train(tmp_path, pictures, "plain")
    said, found = train(tmp_path, pictures, "stored", *flags)
    assert f"{store} keeps all of it" in said
    assert "its files lie on a local disk, where a store is of no use" in said
    # Another run reads what is stored.
    _, again = train(tmp_path, pictures, "again", *flags)
    for weights in (found, again):
        for ours, theirs in zip(weights, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_a_store_with_room_for_little(tmp_path, pictures):
    flags = [f"--local_store=0.00002:{tmp_path}/store"]
    _, expected = train(tmp_path, pictures, "plain")
    said, found = train(tmp_path, pictures, "stored", *flags)
    assert "% of it, spread evenly, and what is left is read from where it" in said
    sizes = [file.stat().st_size for file in os.scandir(tmp_path / "store")]
    assert sum(sizes) <= 0.00002 * 2**30
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)

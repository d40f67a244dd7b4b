"""Sets of TFDS with masks and numbers, written and read as real ones are."""

from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from towers.input_pipeline import make_dataset
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

MASK = (np.arange(20).reshape(4, 5) % 3).astype(np.uint8)


class _Builder(tfds.core.GeneratorBasedBuilder):
    """A set of eight examples."""

    VERSION = tfds.core.Version("1.0.0")
    keys: ClassVar = None

    def _info(self):
        features = tfds.features.FeaturesDict(self.features)
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=self.keys
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(None)}

    def _generate_examples(self, _):
        for index in range(8):
            yield index, self.one(index)


class TinyPets(_Builder):
    """As oxford_iiit_pet: a class, and a mask."""

    features: ClassVar = {
        "image": tfds.features.Image(),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
        "segmentation_mask": tfds.features.Image(shape=(None, None, 1)),
    }
    keys = ("image", "label")

    def one(self, index):
        image = np.full([4, 5, 3], index, np.uint8)
        mask = MASK[..., None]
        return {"image": image, "label": index % 2, "segmentation_mask": mask}


class TinyScenes(_Builder):
    """A mask whose classes have names is what there is to learn."""

    features: ClassVar = {
        "image": tfds.features.Image(shape=(4, 5, 3)),
        "mask": tfds.features.LabeledImage(labels=["a", "b", "c"], shape=(4, 5, 1)),
    }
    keys = ("image", "mask")

    def one(self, index):
        image = np.full([4, 5, 3], index, np.uint8)
        return {"image": image, "mask": MASK[..., None]}


class TinyWines(_Builder):
    """As wine_quality: numbers by their names, and one to predict."""

    features: ClassVar = {
        "features": {"acid": np.float32, "sugar": np.float32, "year": np.int32},
        "price": np.float32,
        "quality": np.int32,
    }
    keys = ("features", "price")

    def one(self, index):
        row = {"acid": index / 2, "sugar": index / 4, "year": 1990 + index}
        # One is no number.
        price = np.nan if index == 5 else index / 8
        return {"features": row, "price": price, "quality": index}


class TinyAges(_Builder):
    """As sets of faces: pictures, and two numbers."""

    features: ClassVar = {
        "face": tfds.features.Image(shape=(4, 5, 3)),
        "point": tfds.features.Tensor(shape=(2,), dtype=np.float64),
    }
    keys = ("face", "point")

    def one(self, index):
        return {"face": np.full([4, 5, 3], index, np.uint8), "point": [index, -index]}


def _open(builder, folder, **options):
    source = TFDSSource(builder(data_dir=folder), f"tfds:{builder.name}", **options)
    source.prepare()
    return source


@pytest.mark.slow
@pytest.mark.parametrize("builder", [TinyPets, TinyScenes])
def test_masks(tmp_path, builder):
    options = {"target": "mask", "num_classes": 3} if builder is TinyPets else {}
    source = _open(builder, tmp_path, **options)
    names = None if builder is TinyPets else ("a", "b", "c")
    assert source.target == Target("mask", 3, names) and source.num_classes == 3
    ((images, masks, _),) = make_dataset(
        source, "train", 8, image_shape=(4, 5, 3), training=False
    )
    assert sorted(images[:, 0, 0, 0].numpy()) == [*range(8)]
    np.testing.assert_array_equal(masks, [MASK] * 8)
    assert quarantine.inspect(source, ["train"], 0).splits == {"train": 8}


def test_a_set_with_a_class_and_a_mask_is_of_classes_unless_asked(tmp_path):
    source = _open(TinyPets, tmp_path)
    assert source.target == Target("class", 2, ("cat", "dog"))
    with pytest.raises(ValueError, match="give their number by --num_classes"):
        TFDSSource(TinyPets(data_dir=tmp_path), "tfds:tiny_pets", target="mask")
    with pytest.raises(ValueError, match="num_classes is 3, but tfds:tiny_pets has 2"):
        TFDSSource(TinyPets(data_dir=tmp_path), "tfds:tiny_pets", num_classes=3)
    with pytest.raises(ValueError, match="which the second is of numbers; found image"):
        TFDSSource(TinyPets(data_dir=tmp_path), "tfds:tiny_pets", target="numbers")


def test_rows_and_numbers(tmp_path):
    source = _open(TinyWines, tmp_path)
    assert source.target == Target("numbers", 1, ("price",))
    assert (source.input_kind, source.image_shape) == ("row", (3,))
    assert [*source.image_fields] == ["acid", "sugar", "year"]
    found = quarantine.inspect(source, ["train"], 1)
    (bad,) = found.bad["train"]
    assert bad.fault == "price is nan, expected a number"
    good = source.without(found.bad, found.splits)
    ((rows, prices),) = make_dataset(good, "train", 8)
    assert rows.dtype == prices.dtype == tf.float32
    np.testing.assert_array_equal(rows[:, :1] / 4, prices)
    np.testing.assert_array_equal(rows[:, 2] - 1990, rows[:, 0] * 2)


@pytest.mark.slow
def test_several_numbers_of_a_picture(tmp_path):
    source = _open(TinyAges, tmp_path)
    assert source.target == Target("numbers", 2)
    ((images, points),) = make_dataset(source, "train", 8)
    value = images[:, 0, 0, 0].numpy().astype(float)
    np.testing.assert_array_equal(points, np.stack([value, -value], axis=1))

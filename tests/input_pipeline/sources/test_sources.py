import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from scripts import make_digits
from tests import warm
from towers.input_pipeline import open_source
from towers.input_pipeline.sources.arrays import ArraySource
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource


def _read(source, split, **kwargs):
    """All examples of a split, decoded outside the pipeline."""

    @tf.autograph.experimental.do_not_convert
    def decode(_, record):
        return source.decode(record)

    records = source.batches(split, 64, **kwargs).unbatch()
    decoded = records.map(decode).as_numpy_iterator()
    return [(image, int(label)) for image, label in decoded]


def _seeds(seed):
    return tf.constant([seed, seed], tf.int64)


def _comparable(examples):
    return sorted((image.tobytes(), label) for image, label in examples)


@pytest.mark.slow
def test_importing_is_light():
    code = """if True:
        import sys
        from towers import input_pipeline
        from tensorflow.python.eager import context
        assert context.context()._context_handle is None, "devices are initialised"
        heavy = {"tensorflow_datasets", "towers.model.tower_model", "towers.models"}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
    """
    # Keras is there before, and leaves the devices alone.
    done = warm.run("tests.program", code)
    assert done.returncode == 0, done.stderr


# --- digits


def test_the_digits_that_are_shipped_are_those_of_scikit_learn():
    expected = make_digits.arrays()
    with np.load(make_digits.FILE) as shipped:
        assert {*shipped} == {*expected}
        for name, array in expected.items():
            np.testing.assert_array_equal(shipped[name], array, strict=True)


@pytest.mark.slow
def test_digits_are_those_of_scikit_learn(digits):
    wanted = load_digits()
    pixels = np.rint(wanted.images * 255 / 16).astype(np.uint8)[..., None]
    splits = train_test_split(
        pixels, wanted.target, test_size=0.2, random_state=0, stratify=wanted.target
    )
    for split, images, labels in zip(
        ("train", "test"), splits[:2], splits[2:], strict=True
    ):
        expected = zip(images, labels.tolist(), strict=True)
        assert _comparable(_read(digits, split)) == _comparable(expected)
    assert digits.splits == {"train": 1437, "test": 360}
    # As many of each digit.
    counts = np.bincount(splits[3])
    assert 34 <= counts.min() <= counts.max() <= 38


def test_digits_describe_themselves(digits):
    assert digits.name == "digits"
    assert digits.num_classes == 10
    assert digits.class_names == tuple("0123456789")
    assert digits.image_shape == (8, 8, 1)
    image, label = digits.decode(next(iter(digits.records("test")))[1])
    assert (image.shape, image.dtype, label.dtype) == ((8, 8, 1), tf.uint8, tf.int64)


def test_digits_lie_in_shards_of_encoded_images(digits):
    files = digits.files("train")
    assert len(files) == 4
    serialized = next(iter(tf.data.TFRecordDataset(files[0]))).numpy()
    field = tf.train.Example.FromString(serialized).features.feature["image"]
    assert field.bytes_list.value[0].startswith(b"\x89PNG")


def test_opening_writes_nothing(tmp_path):
    source = open_source("digits", data_dir=tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    assert (source.num_classes, source.splits) == (10, {})


def test_preparing_after_another_process(tmp_path, capsys):
    first, second = (open_source("digits", data_dir=tmp_path) for _ in range(2))
    first.prepare()
    # Nothing is downloaded.
    written = f"{tmp_path}/towers_digits/1.0.0"
    assert capsys.readouterr().out == f"Writing the digits to {written}.\n"
    stamps = [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))]
    second.prepare()
    assert stamps == [path.stat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))]
    assert second.splits == first.splits


@pytest.mark.slow
def test_preparing_while_another_process_does(tmp_path, monkeypatch):
    first, second = (open_source("digits", data_dir=tmp_path) for _ in range(2))
    generate = second._builder._generate_examples

    def overtaken(*args):
        if not first.splits:
            first.prepare()
        return generate(*args)

    monkeypatch.setattr(second._builder, "_generate_examples", overtaken)
    second.prepare()
    assert second.splits == {"train": 1437, "test": 360}
    assert len(_read(second, "test")) == 360


def test_a_data_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    source = open_source("digits", data_dir=tmp_path / "file" / "data")
    with pytest.raises(ValueError, match=r"digits cannot be prepared in .*file/data"):
        source.prepare()


# --- tfds


class TinyPhotos(tfds.core.GeneratorBasedBuilder):
    """JPEGs of several sizes, a field that is not read, and three splits."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(encoding_format="jpeg"),
                    "label": tfds.features.ClassLabel(names=["cat", "dog"]),
                    "file_name": tfds.features.Text(),
                }
            ),
        )

    def _split_generators(self, dl_manager):
        return {
            name: self._generate_examples(name)
            for name in ("train", "test", "validation")
        }

    def _generate_examples(self, name):
        for index in range(6):
            image = np.full([4 + index, 5, 3], 40 * index, np.uint8)
            yield index, {"image": image, "label": index % 2, "file_name": name}


def test_any_tfds_builder_is_a_source(tmp_path):
    source = TFDSSource(TinyPhotos(data_dir=tmp_path), "tfds:tiny_photos")
    source.prepare()
    assert source.class_names == ("cat", "dog")
    assert source.image_shape == (None, None, 3)
    assert source.splits == {"train": 6, "test": 6}
    # Validation is what to evaluate on where both exist.
    assert all("validation" in path for path in source.files("test"))
    examples = sorted(_read(source, "train"), key=lambda pair: pair[0].shape[0])
    for index, (image, label) in enumerate(examples):
        assert image.shape == (4 + index, 5, 3)
        np.testing.assert_allclose(image.astype(int), 40 * index, atol=2)
        assert label == index % 2


def test_tfds_reads_a_known_set_without_network(tmp_path):
    source = open_source("tfds:mnist", data_dir=tmp_path)
    assert (source.num_classes, source.image_shape) == (10, (28, 28, 1))
    assert list(tmp_path.iterdir()) == []


# --- tfrecord


@pytest.fixture(scope="module")
def shards(tmp_path_factory, image_example, grey, write_tfrecord):
    """Three files to train on and one held out; value 10 * label + index."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(3):
        write_tfrecord(
            folder / f"train-{shard:05}-of-00003",
            [image_example(grey(10 * label + shard), label) for label in range(4)],
        )
    write_tfrecord(folder / "validation-00000-of-00001", [image_example(grey(9), 5)])
    return folder


def test_tfrecord_reads_what_was_written(shards):
    source = open_source(f"tfrecord:{shards}/*", num_classes=6)
    assert source.splits == {"train": None, "test": None}
    assert (source.num_classes, source.image_shape) == (6, (None, None, 3))
    values = sorted((image.mean(), label) for image, label in _read(source, "train"))
    assert values == [(10 * label + n, label) for label in range(4) for n in range(3)]
    assert [label for _, label in _read(source, "test")] == [5]


def test_tfrecord_counts_classes_and_records(shards):
    source = open_source(f"tfrecord:{shards}/*")
    assert source.num_classes == 6
    assert source.splits == {"train": 12, "test": 1}


def test_tfrecord_shuffles_whole_files_by_seed(shards):
    source = open_source(f"tfrecord:{shards}/train-*")

    @tf.function(autograph=False)  # traced once for all seeds
    def order(seeds):
        (numbers, _) = source.batches("train", 12, seeds=seeds).get_single_element()
        return numbers

    orders = [tuple(order(_seeds(seed)).numpy()) for seed in range(20)]
    assert len({*orders}) == 6  # the permutations of three files
    assert tuple(order(_seeds(3)).numpy()) == orders[3]


def test_tfrecord_takes_other_names(tmp_path, encode, example, grey, write_tfrecord):
    record = example(img=encode(grey(7), "JPEG"), cls=2)
    write_tfrecord(tmp_path / "a", [record])
    with pytest.raises(ValueError) as caught:
        open_source(f"tfrecord:{tmp_path}/*")
    assert f"{tmp_path}/a: record 0 (byte offset 0)" in str(caught.value)
    assert "cls (int64), img (bytes)" in str(caught.value)
    source = open_source(
        f"tfrecord:{tmp_path}/*", image_column="img", label_column="cls"
    )
    [(image, label)] = _read(source, "train")
    assert (image.shape, image.mean(), label) == ((8, 8, 3), 7, 2)


def test_the_held_out_word_closest_to_the_file_counts(
    tmp_path, image_example, grey, write_tfrecord
):
    for name in ("my_test_set/train/a", "my_test_set/val/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_tfrecord(tmp_path / name, [image_example(grey(0), 0)])
    source = open_source(f"tfrecord:{tmp_path}/*/*/*")
    assert source.files("train") == [f"{tmp_path}/my_test_set/train/a"]
    assert source.files("test") == [f"{tmp_path}/my_test_set/val/b"]


def test_tfrecord_of_no_record(tmp_path, write_tfrecord):
    write_tfrecord(tmp_path / "empty", [])
    with pytest.raises(ValueError, match="holds no record"):
        open_source(f"tfrecord:{tmp_path}/*")


def test_tfrecord_of_something_else(tmp_path, write_tfrecord):
    write_tfrecord(tmp_path / "text", [b"\xff hello"])
    with pytest.raises(ValueError, match=r"text: record 0 .*: not a tf.Example"):
        open_source(f"tfrecord:{tmp_path}/*")


def test_tfrecord_with_a_negative_label(tmp_path, image_example, grey, write_tfrecord):
    write_tfrecord(tmp_path / "a", [image_example(grey(0), -1)])
    with pytest.raises(ValueError, match=r"a: record 0 .*: image/class/label -1"):
        open_source(f"tfrecord:{tmp_path}/*")


# --- folder


def _write_images(folder, count, value=0, suffix=".png"):
    folder.mkdir(parents=True)
    for index in range(count):
        pixels = np.full([6, 4 + index % 3, 3], value, np.uint8)
        Image.fromarray(pixels).save(folder / f"{index:03}{suffix}")


def test_folder_holds_out_every_tenth(tmp_path):
    _write_images(tmp_path / "dog", 20, value=50, suffix=".JPG")
    _write_images(tmp_path / "cat", 9, value=200)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    source = open_source(f"folder:{tmp_path}")
    assert source.class_names == ("cat", "dog")
    assert source.splits == {"train": 27, "test": 2}
    assert source.files("test") == [
        f"{tmp_path}/dog/009.JPG",
        f"{tmp_path}/dog/019.JPG",
    ]
    assert not set(source.files("train")) & set(source.files("test"))
    for image, label in _read(source, "train"):
        assert image.shape[0::2] == (6, 3)
        np.testing.assert_allclose(image, (200, 50)[label], atol=2)


def test_folder_with_splits_of_its_own(tmp_path):
    for split, count in (("train", 12), ("val", 3), ("test", 1)):
        for name in ("a", "b"):
            _write_images(tmp_path / split / name, count)
    source = open_source(f"folder:{tmp_path}")
    assert source.splits == {"train": 24, "test": 6}
    assert source.class_names == ("a", "b")


def test_folder_shuffles_completely_by_seed(tmp_path):
    _write_images(tmp_path / "a", 9)
    _write_images(tmp_path / "b", 9)
    source = open_source(f"folder:{tmp_path}")

    def paths(seed):
        seeds = None if seed is None else _seeds(seed)
        (batch,) = source.batches("train", 20, seeds=seeds)
        return source.parse(batch[1])[0].numpy().tolist()

    assert paths(1) == paths(1) != paths(2)
    assert sorted(paths(1)) == sorted(paths(None))


def test_a_class_that_is_only_held_out(tmp_path):
    _write_images(tmp_path / "train" / "a", 1)
    _write_images(tmp_path / "test" / "b", 1)
    with pytest.raises(ValueError, match="has the class 'b', which is not in"):
        open_source(f"folder:{tmp_path}")


def test_an_empty_class_is_named(tmp_path):
    _write_images(tmp_path / "a", 1)
    (tmp_path / "empty_one").mkdir()
    with pytest.raises(ValueError, match="empty_one has no JPEG, PNG, "):
        open_source(f"folder:{tmp_path}")


# --- synthetic


def test_synthetic_is_a_function_of_seed_and_index():
    source = open_source("synthetic:6x5x2:3:8", seed=4)
    assert source.splits == {"train": 8, "test": 2}
    assert source.image_shape == (6, 5, 2)
    first, again = _read(source, "train"), _read(source, "train", seeds=_seeds(1))
    assert _comparable(first) == _comparable(again)
    other = _read(open_source("synthetic:6x5x2:3:8", seed=5), "train")
    everything = _comparable(first) + _comparable(other)
    everything += _comparable(_read(source, "test"))
    assert len(set(everything)) == 18
    assert [label for _, label in first] == [0, 1, 2, 0, 1, 2, 0, 1]


def test_synthetic_can_be_learnt():
    source = open_source("synthetic:8x8x1:5:100")
    images, labels = map(np.array, zip(*_read(source, "train"), strict=True))
    means = np.stack([images[labels == label].mean(axis=0) for label in range(5)])
    for image, label in _read(source, "test"):
        distances = np.square(means - image).sum(axis=(1, 2, 3))
        assert distances.argmin() == label
    assert images.min() < 20 and images.max() > 235
    # No image is its pattern alone: the noise is independent of it.
    for image, label in zip(images, labels, strict=True):
        assert np.corrcoef(image.ravel(), means[label].ravel())[0, 1] < 0.92


def test_synthetic_has_a_default_count():
    assert open_source("synthetic:4x4x1:2").splits == {"train": 1024, "test": 256}


# --- arrays


def test_arrays_come_back():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, [7, 4, 3, 1], np.uint8), np.arange(7) % 4
    x_test, y_test = x[:2] // 2, y[:2]
    source = ArraySource(x, y.astype(np.int32), x_test, y_test)
    assert (source.num_classes, source.image_shape) == (4, (4, 3, 1))
    assert source.splits == {"train": 7, "test": 2}
    for split, images, labels in (("train", x, y), ("test", x_test, y_test)):
        examples = _read(source, split)
        np.testing.assert_array_equal([image for image, _ in examples], images)
        assert [label for _, label in examples] == labels.tolist()


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros([2, 4, 4, 1]), [0, 1], r"train images are float64 \(2, 4, 4, 1\)"),
        (np.zeros([2, 4, 4], np.uint8), [0, 1], r"train images are uint8 \(2, 4, 4\)"),
        (np.zeros([2, 4, 4, 1], np.uint8), [0], r"train labels are int64 \(1,\)"),
        (np.zeros([2, 4, 4, 1], np.uint8), ["a", "b"], "train labels are <U1"),
        (np.zeros([2, 4, 4, 1], np.uint8), [0, -1], "labels go from -1 to 0"),
        (np.zeros([2, 4, 4, 1], np.uint8), [0, 3], "labels go from 0 to 3: expected"),
    ],
)
def test_arrays_that_do_not_fit(x, y, message):
    with pytest.raises(ValueError, match=message):
        ArraySource(x, np.array(y), num_classes=3)


# --- specs


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "unknown data set ''.*expected one of digits, tfds:NAME, tfrecord:GLOB"),
        ("digit", "did you mean digits"),
        ("tfrecords:/data/*", "did you mean tfrecord:GLOB"),
        ("mnist", "did you mean tfds:mnist"),
        ("folder:", "unknown data set 'folder:'"),
        ("digits:8", "unknown data set 'digits:8'"),
        ("tfds:mnits", "TFDS has no data set 'mnits': did you mean mnist"),
        ("tfds:mnist:0.0.1", "TFDS cannot open 'mnist:0.0.1'.*only: "),
        ("tfds:imdb_reviews", r"found text \(Text\), label \(ClassLabel\)"),
        ("tfrecord:/no/such/file-*", "no file matches '/no/such/file-"),
        ("folder:/no/such/folder", "'/no/such/folder' is not a folder"),
        ("synthetic:8x8:3", "'synthetic:8x8:3' cannot be read: expected synthetic:HxW"),
        ("synthetic:8x0x1:3", "with positive numbers"),
        ("synthetic:8x8x1:3:", "'synthetic:8x8x1:3:' cannot be read"),
    ],
)
def test_a_spec_that_cannot_be_opened(spec, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        open_source(spec, data_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_its_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_pictures").mkdir()
    for spec in ("my_pictures", str(tmp_path)):
        with pytest.raises(ValueError, match=f"did you mean folder:{spec}[?]"):
            open_source(spec)


def test_a_folder_without_class_folders(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match="has no class folders"):
        open_source(f"folder:{tmp_path}")

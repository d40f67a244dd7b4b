import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from tests import warm
from tests.variants import slow
from towers.input_pipeline import (
    BadRecordError,
    blame_records,
    make_dataset,
    open_source,
)
from towers.input_pipeline.images import augment
from towers.input_pipeline.sources.arrays import ArraySource


@pytest.fixture
def numbered():
    """100 images; image i is filled with i, and so is its label."""
    values = np.arange(100, dtype=np.uint8)
    images = np.broadcast_to(values[:, None, None, None], [100, 4, 4, 1])
    return ArraySource(images, values)


@pytest.fixture(scope="module")
def files(tmp_path_factory, example, write_tfrecord):
    """The same in four files, 25 in each: of pixels, which are not decoded."""
    folder = tmp_path_factory.mktemp("files")
    for file in range(4):
        records = [
            example(
                image__encoded=bytes([i] * 16),
                image__height=4,
                image__width=4,
                image__channels=1,
                image__class__label=i,
            )
            for i in range(25 * file, 25 * file + 25)
        ]
        write_tfrecord(folder / f"train-{file}", records)
    return open_source(f"tfrecord:{folder}/*")


def _dataset(source, split="train", **kwargs):
    shape = tuple(size or 8 for size in source.image_shape)
    defaults = {"batch_size": 32, "image_shape": shape, "training": True}
    return make_dataset(source, split, **(defaults | kwargs))


def _labels(dataset):
    return np.concatenate([labels.numpy() for _, labels in dataset]).tolist()


def _epochs(dataset, count):
    return [_labels(dataset) for _ in range(count)]


@pytest.mark.parametrize("training", [True, False])
def test_batches(numbered, training):
    dataset = _dataset(numbered, training=training)
    images, labels = dataset.element_spec
    assert (images.shape.as_list(), images.dtype) == ([None, 4, 4, 1], tf.uint8)
    assert (labels.shape.as_list(), labels.dtype) == ([None], tf.int64)
    assert dataset.cardinality() == 4
    batches = list(dataset.as_numpy_iterator())
    assert [len(labels) for _, labels in batches] == [32, 32, 32, 4]
    for images, labels in batches:
        wanted = labels[:, None, None, None]
        np.testing.assert_array_equal(images, np.broadcast_to(wanted, images.shape))


def test_one_pass_is_one_epoch(numbered):
    for labels in _epochs(_dataset(numbered), 2):
        assert sorted(labels) == list(range(100))


def test_evaluation_keeps_one_order(numbered):
    assert _epochs(_dataset(numbered, training=False), 2) == [list(range(100))] * 2


def test_every_epoch_has_its_own_order(numbered, monkeypatch):
    # It fixes malloc's threshold for the whole process, which slows down small models.
    monkeypatch.setattr(tf.data.Dataset, "from_generator", None)
    epochs = _epochs(_dataset(numbered), 3)
    assert len({tuple(labels) for labels in epochs}) == 3
    assert tuple(range(100)) not in {tuple(labels) for labels in epochs}


def test_the_seed_alone_decides_the_order(numbered):
    first, *others = (_epochs(_dataset(numbered, seed=seed), 3) for seed in (1, 0, 2))
    for global_seed in (0, 77):
        tf.random.set_seed(global_seed)
        assert _epochs(_dataset(numbered, seed=1), 2) == first[:2]
    # Nor may one seed's second epoch be another's first.
    others = [labels for epochs in others for labels in epochs]
    assert not any(labels in others for labels in first)


def test_a_resumed_run_continues_the_orders(files):
    whole = _epochs(_dataset(files, seed=3), 3)
    assert _epochs(_dataset(files, seed=3, start_epoch=1), 2) == whole[1:]


def test_a_fresh_process_gives_the_same_epochs():
    code = """if True:
        from towers.input_pipeline import make_dataset, open_source
        dataset = make_dataset(
            open_source("synthetic:2x2x1:50:50"), "train",
            batch_size=50, image_shape=(2, 2, 1), training=True, seed=5)
        for _ in range(2):
            for _, labels in dataset:
                print(*labels.numpy())
    """
    done = warm.run("tests.program", code)
    assert done.returncode == 0, done.stderr
    there = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    source = open_source("synthetic:2x2x1:50:50")
    assert _epochs(_dataset(source, seed=5), 2) == there


@pytest.mark.slow
def test_files_and_records_are_both_shuffled(files):
    # With a buffer of one record, only the order of the files can change.
    files_only = _epochs(_dataset(files, shuffle_mb=0), 6)
    assert any(labels != list(range(100)) for labels in files_only)
    block = {tuple(labels[:16]) for labels in files_only}
    # Each begins with the first block of some file.
    assert block <= {tuple(range(start, start + 16)) for start in (0, 25, 50, 75)}
    # Of a small one, nothing is lost.
    for shuffle_mb in (0.01, 256):
        labels = _labels(_dataset(files, shuffle_mb=shuffle_mb))
        assert sorted(labels) == list(range(100))
        assert tuple(labels[:16]) not in block
    assert all(sorted(labels) == list(range(100)) for labels in files_only)


def test_without_determinism_the_examples_are_the_same(files):
    dataset = _dataset(files, deterministic=False)
    assert dataset.options().deterministic is False
    assert sorted(_labels(dataset)) == list(range(100))
    assert _dataset(files).options().deterministic is True
    assert dataset.cardinality() == 4


def test_images_and_labels_stay_together(digits):
    records = digits.batches("train", 2000).unbatch()
    decoded = records.map(lambda _, record: digits.decode(record))
    pairs = {x.tobytes(): int(y) for x, y in decoded.as_numpy_iterator()}
    for images, labels in _dataset(digits).as_numpy_iterator():
        assert [pairs[image.tobytes()] for image in images] == labels.tolist()


def test_images_of_any_size_and_kind_become_one_shape(tmp_path):
    (tmp_path / "a").mkdir()
    rng = np.random.default_rng(0)
    smooth = np.linspace(0, 255, 20 * 30 * 3).reshape(20, 30, 3).astype(np.uint8)
    noise = rng.integers(0, 256, [5, 7], np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a" / "0.jpg", quality=95)
    Image.fromarray(noise).save(tmp_path / "a" / "1.png")
    source = open_source(f"folder:{tmp_path}")
    dataset = _dataset(source, image_shape=(8, 8, 3), training=False)
    [(images, _)] = dataset.as_numpy_iterator()
    for image, name in zip(images, ("0.jpg", "1.png"), strict=True):
        wanted = Image.open(tmp_path / "a" / name).convert("RGB")
        wanted = np.asarray(wanted.resize((8, 8), Image.Resampling.BILINEAR))
        np.testing.assert_allclose(image.astype(int), wanted, atol=4.0)


def test_no_resize_where_the_shape_fits(digits, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("resized")

    monkeypatch.setattr(augment.tf.image, "resize", forbidden)
    _dataset(digits, image_shape=(8, 8, 3))
    with pytest.raises(AssertionError, match="resized"):
        _dataset(digits, image_shape=(9, 8, 1))


@pytest.mark.parametrize("label", [-1, slow(2)])
def test_a_bad_label_is_an_error(tmp_path, image_example, grey, write_tfrecord, label):
    write_tfrecord(tmp_path / "a", [image_example(grey(0), n) for n in (0, 1, label)])
    source = open_source(f"tfrecord:{tmp_path}/*", num_classes=2)
    dataset = _dataset(source, batch_size=2)
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"a label is not 0 to 1:.*{label}"
    ):
        list(dataset)


# Of the dataset, which tells it, the tests of cardinalities are quick.
@pytest.mark.slow
def test_keras_knows_the_length_of_an_epoch(files):
    import keras

    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(100)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    steps = []
    model.fit(
        _dataset(files, batch_size=7),
        epochs=2,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: steps.append(0),
                on_train_batch_end=lambda batch, logs: steps.append(batch),
            )
        ],
    )
    assert steps == [0, *range(15), *range(15)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "dev"}, "arrays has no split 'dev', only train"),
        ({"batch_size": 0}, "batch_size is 0, expected at least 1"),
        ({"shuffle_mb": -1}, "shuffle_mb is -1"),
        ({"start_record": -1}, "start_record is -1"),
        ({"recipe": "cake"}, "recipe is 'cake', expected one of none, imagenet, cifar"),
        ({"seed": -1}, "seed is -1"),
        ({"start_epoch": -1}, "start_epoch is -1"),
        ({"image_shape": (4, 4, 2)}, "images of arrays have 1 channels, and only 1"),
    ],
)
def test_arguments_that_do_not_fit(numbered, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        _dataset(numbered, **change)
    assert "\n" not in str(caught.value)


def test_an_unprepared_source_says_so(tmp_path):
    source = open_source("digits", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"none yet: call prepare\(\) first"):
        _dataset(source)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(("repeat", "start"), [(False, 0), slow(True, 0), (True, 20)])
def test_a_record_fewer_than_were_counted_is_noticed(
    tmp_path, image_example, grey, write_tfrecord, repeat, start
):
    records = [image_example(grey(i), 0) for i in range(33)]
    path = write_tfrecord(tmp_path / "a", records)
    source = open_source(f"tfrecord:{path}")
    assert source.splits == {"train": 33}
    # TensorFlow takes the first bytes of a record for the end of the file.
    content = open(path, "rb").read()
    open(path, "wb").write(content[: 5 - len(records[-1]) - 16])
    dataset = make_dataset(
        *(source, "train"),
        batch_size=4,
        image_shape=(8, 8, 3),
        training=True,
        repeat=repeat,
        start_record=start,
    )
    with pytest.raises(BadRecordError) as caught, blame_records(source):
        for _ in dataset.take(20):
            pass
    assert str(caught.value).startswith(f"{path}: record 32 ")


def test_little_has_to_be_said(tmp_path, encode):
    source = open_source("synthetic:2x3x1:5:50")
    train, test = (make_dataset(source, split, batch_size=8) for split in source.splits)
    assert train.element_spec[0].shape == (None, 2, 3, 1)
    assert (train.pipeline.training, test.pipeline.training) == (True, False)
    assert len(make_dataset(source, "test", 4)) == 3
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(encode(np.zeros([2, 2, 3], np.uint8)))
    with pytest.raises(ValueError, match=r"are 2x2, but .*image_size=2x2 \(in P"):
        make_dataset(open_source(f"folder:{tmp_path}"), "train", batch_size=8)

"""Which records come, in which order, from where on: whatever reads them."""

import functools
import json

import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.variants import slow
from towers.input_pipeline import ArraySource, make_dataset, open_source
from towers.input_pipeline.choices import RECIPES
from towers.input_pipeline.images import recipes


@pytest.fixture(scope="module")
def photos(tmp_path_factory, encode, example, write_tfrecord):
    """60 JPEGs in three files; image i is filled with 4 i, and its label is i."""
    folder = tmp_path_factory.mktemp("photos")
    for shard in range(3):
        records = [
            example(
                image__encoded=encode(np.full([20, 30, 3], 4 * i, np.uint8), "JPEG"),
                image__class__label=i,
            )
            for i in range(20 * shard, 20 * shard + 20)
        ]
        write_tfrecord(folder / f"train-{shard}", records)
    return open_source(f"tfrecord:{folder}/*")


@pytest.fixture(scope="module")
def raw(tmp_path_factory, example, write_tfrecord):
    """The same as pixels."""
    folder = tmp_path_factory.mktemp("raw")
    for shard in range(3):
        records = [
            example(
                image__encoded=bytes([4 * i] * 64),
                image__height=8,
                image__width=8,
                image__channels=1,
                image__class__label=i,
            )
            for i in range(20 * shard, 20 * shard + 20)
        ]
        write_tfrecord(folder / f"train-{shard}", records)
    return open_source(f"tfrecord:{folder}/*")


@pytest.fixture(scope="module")
def arrays():
    x = np.arange(60, dtype=np.uint8) * 4
    return ArraySource(np.broadcast_to(x[:, None, None, None], [60, 8, 8, 1]), x // 4)


@pytest.fixture
def source(request):
    return request.getfixturevalue(request.param)


# What is read from any place, and a stream that is decoded.
UNLIKE = pytest.mark.parametrize("source", ["arrays", slow("photos")], indirect=True)


@functools.cache
def _epoch(source, **options):
    """The images and labels of one epoch, and the sizes of its batches.

    Made once for all tests that want the same.
    """
    defaults = {
        "batch_size": 16,
        "image_shape": (8, 8, source.image_shape[-1]),
        "training": True,
        "recipe": "cifar",
        "seed": 7,
    }
    dataset = make_dataset(source, "train", **(defaults | options))
    batches = list(dataset.as_numpy_iterator())
    images, labels = map(np.concatenate, zip(*batches, strict=True))
    return images, labels.tolist(), [len(labels) for _, labels in batches]


def test_pixels_in_records_are_found_to_be_that(raw):
    assert not raw.encoded
    assert raw.image_shape == (8, 8, 1)


# Each of the stages that a recipe adds, and each source without determinism.
@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("source", "recipe", "deterministic"),
    [
        ("photos", "imagenet", True),
        ("raw", "cifar", False),
        ("arrays", "none", True),
        ("arrays", "cifar", True),
        slow("photos", "none", True),
        slow("photos", "cifar", True),
        slow("photos", "cifar", False),
        slow("raw", "none", True),
        slow("raw", "imagenet", True),
        slow("raw", "cifar", True),
        slow("arrays", "imagenet", True),
        slow("arrays", "cifar", False),
    ],
    indirect=["source"],
)
def test_every_record_comes_once(source, recipe, deterministic):
    _, labels, sizes = _epoch(source, recipe=recipe, deterministic=deterministic)
    assert sorted(labels) == list(range(60))
    # Without determinism batches, too, come as they become ready.
    assert (sizes if deterministic else sorted(sizes)[::-1]) == [16, 16, 16, 12]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    ("source", "training"),
    [
        ("photos", True),
        slow("arrays", True),
        ("arrays", False),
        slow("photos", False),
        slow("raw", True),
        slow("raw", False),
    ],
    indirect=["source"],
)
def test_a_start_in_an_epoch_passes_over_what_was_before(source, training):
    images, labels, _ = _epoch(source, training=training)
    # Streams skip, decoded or not; of arrays, each place is computed.
    for start in (1, 16, 37, 59) if training and not source.encoded else (37,):
        rest, of_it, _ = _epoch(source, training=training, start_record=start)
        assert of_it == labels[start:]
        # Their augmentation is the same, in other batches.
        np.testing.assert_array_equal(rest, images[start:])


@UNLIKE
def test_only_the_first_epoch_starts_late(source):
    dataset = make_dataset(
        source,
        "train",
        batch_size=16,
        image_shape=(8, 8, source.image_shape[-1]),
        training=True,
        start_epoch=1,
        start_record=50,
    )
    epochs = [np.concatenate([y for _, y in dataset]).tolist() for _ in range(2)]
    assert [len(labels) for labels in epochs] == [10, 60]
    assert dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY
    _, second, _ = _epoch(source, recipe="none", seed=0, start_epoch=2)
    assert epochs[1] == second


def _check_no_gap(source, **served):
    options = {
        "batch_size": 16,
        "image_shape": (8, 8, source.image_shape[-1]),
        "training": True,
        "recipe": "imagenet",
        "seed": 7,
        "start_epoch": 2,
    }
    epochs = make_dataset(source, "train", **options)
    wanted = [batch for _ in range(3) for batch in epochs.as_numpy_iterator()]
    endless = make_dataset(source, "train", repeat=True, **options, **served)
    assert endless.cardinality() == tf.data.INFINITE_CARDINALITY
    found = endless.take(12).as_numpy_iterator()
    for mine, theirs in zip(wanted, found, strict=True):
        for part, other in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(part, other)


@UNLIKE
def test_epochs_may_follow_without_a_gap(source):
    _check_no_gap(source)


@pytest.mark.slow
def test_what_is_skipped_is_not_decoded(tmp_path, photos, example, write_tfrecord):
    records = [
        example(image__encoded=b"\xff\xd8\xff broken", image__class__label=0),
        next(photos.walk(photos.files("train")[0])).raw.numpy(),
    ]
    write_tfrecord(tmp_path / "a", records)
    source = open_source(f"tfrecord:{tmp_path}/*")
    options = {"training": False, "recipe": "imagenet"}
    assert _epoch(source, start_record=1, **options)[1] == [0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Invalid JPEG"):
        _epoch(source, **options)


@pytest.mark.slow
@UNLIKE
def test_augmentation_depends_on_seed_epoch_and_record(source):
    images, labels, _ = _epoch(source)
    by_record = dict(zip(labels, images, strict=True))
    assert len({image.tobytes() for image in images}) > 30

    def same(**options):
        images, labels, _ = _epoch(source, **options)
        pairs = zip(images, labels, strict=True)
        return np.mean([np.array_equal(image, by_record[i]) for image, i in pairs])

    assert same(batch_size=7) == 1
    assert same(deterministic=False) == 1
    assert same(seed=8) < 0.5
    assert same(start_epoch=1) < 0.5


@pytest.mark.slow
def test_one_order_for_any_threads_and_towers(photos, arrays, tmp_path):
    np.save(tmp_path / "x.npy", arrays._images)
    folder = photos.files("train")[0].rpartition("/")[0]
    found = []
    for threads, towers in ((1, 1), (8, 3)):
        done = warm.run(
            "tests.input_pipeline.orders",
            *(threads, towers, folder, tmp_path / "x.npy"),
            # What the pipeline makes threads by.
            changed={
                "towers.machine.limits.cpu_count": functools.partial(int, threads)
            },
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    for first, second in found[0].values():
        assert first != second


@pytest.mark.slow
@UNLIKE
def test_workers_of_a_service_make_the_same(source, service):
    options = {"start_epoch": 1, "start_record": 5}
    images, labels, sizes = _epoch(source, **options)
    served = _epoch(source, data_service=service, **options)
    np.testing.assert_array_equal(served[0], images)
    assert served[1:] == (labels, sizes)


# Workers divide the files of the one, and the numbers of the other.
@pytest.mark.parametrize("kind", ["raw", "arrays"])
@pytest.mark.slow
def test_workers_of_a_service_share_the_records(kind, service, request):
    source = request.getfixturevalue(kind)
    # Who gets which records is left to chance.
    for epoch in range(2):
        here = _epoch(source, start_epoch=epoch)
        by_record = dict(zip(*here[1::-1], strict=True))
        images, labels, sizes = _epoch(
            source, deterministic=False, data_service=service, start_epoch=epoch
        )
        assert sorted(labels) == list(range(60))
        # Also if each worker's last batch was short.
        assert sizes == [16, 16, 16, 12]
        for image, label in zip(images, labels, strict=True):
            np.testing.assert_array_equal(image, by_record[label])


@pytest.mark.slow
def test_epochs_of_a_service_follow_without_a_gap(raw, service):
    _check_no_gap(raw, data_service=service)


# By the image, behind a window of it, and behind cifar by the batch.
@pytest.mark.parametrize(
    ("source", "recipe"),
    [("arrays", "none"), slow("photos", "imagenet"), slow("arrays", "cifar")],
    indirect=["source"],
)
def test_randaugment_comes_on_top(source, recipe):
    before, labels, _ = _epoch(source, recipe=recipe)
    after, again, _ = _epoch(source, recipe=recipe, randaugment=(2, 9))
    assert again == labels
    assert after.shape == before.shape
    changed = [not np.array_equal(*pair) for pair in zip(after, before, strict=True)]
    assert np.mean(changed) > 0.5


def test_in_evaluation_nothing_is_random(arrays):
    images, labels, _ = _epoch(arrays, randaugment=(2, 9), training=False)
    assert labels == list(range(60))
    assert all((image == 4 * i).all() for i, image in enumerate(images))
    for recipe in RECIPES:
        assert recipes.find(recipe, False, (8, 8), (2, 9)).draws == 0


@pytest.mark.slow
def test_in_evaluation_nothing_of_photos_is_random(photos):
    options = {"recipe": "imagenet", "training": False}
    plain, _, _ = _epoch(photos, **options)
    still, _, _ = _epoch(photos, randaugment=(2, 9), **options)
    np.testing.assert_array_equal(plain, still)

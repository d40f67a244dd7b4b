import logging
import resource

import numpy as np
import pytest
import tensorflow as tf

from tests import warm
from tests.input_pipeline.damages import DAMAGES
from tests.variants import slow
from towers.input_pipeline import (
    ArraySource,
    cached,
    find_bad_record,
    make_dataset,
    open_source,
)
from towers.input_pipeline.cache import keep, read, space
from towers.input_pipeline.cache.kept import KeptSource
from towers.input_pipeline.choices import RECIPES
from towers.input_pipeline.images.recipes import takes_whole
from towers.input_pipeline.sources.arrays import RowSource
from towers.machine import limits


def _examples(source, split, **options):
    dataset = make_dataset(
        source,
        split,
        batch_size=100,
        **({"training": False, "image_shape": source.image_shape} | options),
    )
    pairs = list(dataset.as_numpy_iterator())
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    return [
        (image.tobytes(), int(label))
        for image, label in zip(images, labels, strict=True)
    ]


@pytest.fixture(scope="module")
def stamps(tmp_path_factory, image_example, write_tfrecord):
    """60 pictures of 8 by 8 grey pixels as PNG, 40 of them to train on."""
    folder, rng = tmp_path_factory.mktemp("stamps"), np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 20)):
        images = rng.integers(0, 256, [count, 8, 8], np.uint8)
        records = [image_example(image, i % 5) for i, image in enumerate(images)]
        write_tfrecord(folder / split, records)
    source = open_source(f"tfrecord:{folder}/*")
    source.image_shape = (8, 8, 1)
    return source


@pytest.fixture(scope="module")
def examples(stamps):
    """Those of each split, in their fixed order."""
    return {split: _examples(stamps, split) for split in stamps.splits}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk", "auto"])
def test_kept_examples_are_the_same(stamps, examples, tmp_path, where):
    kept = cached(stamps, where, str(tmp_path))
    assert isinstance(kept, RowSource if where == "disk" else KeptSource)
    assert (kept.splits, kept.num_classes) == (stamps.splits, stamps.num_classes)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == (
        [".npy", ".npy", ".sums"] if where == "disk" else []
    )
    for split in stamps.splits:
        assert _examples(kept, split) == examples[split]
    shuffled = _examples(kept, "train", training=True)
    assert shuffled != examples["train"]
    assert sorted(shuffled) == sorted(examples["train"])


def test_a_later_run_reads_the_files(stamps, examples, tmp_path, monkeypatch):
    cached(stamps, "disk", str(tmp_path))
    monkeypatch.setattr(read, "Pipeline", None)  # nothing is decoded
    second = cached(stamps, "disk", str(tmp_path))
    monkeypatch.undo()
    assert _examples(second, "test") == examples["test"]


@pytest.mark.slow
def test_other_files_are_another_cache(tmp_path, image_example, grey, write_tfrecord):
    def write(value):
        record = image_example(grey(value), 0)
        write_tfrecord(tmp_path / "data" / "a", [record] * 2)
        source = open_source(f"tfrecord:{tmp_path}/data/*")
        source.image_shape = (8, 8, 3)
        return cached(source, "disk", str(tmp_path / "cache"))

    (tmp_path / "data").mkdir()
    first, second = _examples(write(1), "train"), _examples(write(200), "train")
    assert [image[0] for image, _ in first + second] == [1, 1, 200, 200]


def test_what_does_not_fit_goes_to_the_disk_or_nowhere(stamps, tmp_path, monkeypatch):
    monkeypatch.setattr(space, "free_memory", lambda: 4 * 60 * 64 - 1)
    assert cached(stamps, "auto") is stamps
    kept = cached(stamps, "auto", str(tmp_path))
    assert isinstance(kept, RowSource) and len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(space, "free_memory", lambda: 4 * 60 * 64)
    assert isinstance(cached(stamps, "auto"), KeptSource)


@pytest.mark.slow
def test_the_log_says_what_was_decided(digits, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        kept = cached(digits, "memory")
    assert "digits: 112.3 KB of pixels kept in memory" in caplog.text
    # What is kept is that of any source.
    assert (kept.splits, kept.class_names) == (digits.splits, digits.class_names)


@pytest.mark.slow
def test_kept_digits_are_the_same(digits):
    kept = cached(digits, "memory")
    assert _examples(kept, "test") == _examples(digits, "test")


def test_free_memory_is_known_here():
    assert 2**20 < space.free_memory() < 2**44


def test_what_cannot_be_kept(digits, tmp_path, image_example, grey, write_tfrecord):
    write_tfrecord(tmp_path / "a", [image_example(grey(0), 0)])
    source = open_source(f"tfrecord:{tmp_path}/*")
    assert cached(digits, "none") is digits
    arrays = ArraySource(np.zeros([3, 2, 2, 1], np.uint8), [0, 1, 2])
    assert cached(arrays, "memory") is arrays
    with pytest.raises(ValueError, match="has images of different sizes"):
        cached(source, "disk", str(tmp_path))
    with pytest.raises(ValueError, match="no folder: name one"):
        cached(digits, "disk")
    with pytest.raises(ValueError, match="cache is 'ram', expected one of auto"):
        cached(digits, "ram")


def test_a_killed_write_leaves_no_cache(stamps, examples, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(read, "_fill", killed)
    with pytest.raises(KeyboardInterrupt):
        cached(stamps, "disk", str(tmp_path))
    monkeypatch.undo()
    kept = cached(stamps, "disk", str(tmp_path))
    assert _examples(kept, "test") == examples["test"]


def test_a_full_disk_is_said(digits, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(
            ValueError, match=r"cannot take 112.3 KB of pixels \(File too"
        ):
            cached(digits, "disk", str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


def test_arrays_may_stay_on_disk(tmp_path):
    x = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2, 1)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = ArraySource(mapped, np.arange(6))
    assert isinstance(source._images, np.memmap)
    assert source._tensors[0] is None
    assert _examples(source, "train") == [(x[i].tobytes(), i) for i in range(6)]


def test_rows_of_numbers_pass_as_they_are():
    x = np.random.default_rng(0).normal(size=[5, 3]).astype(np.float32)
    source = ArraySource(x, np.arange(5))
    dataset = make_dataset(
        source, "train", batch_size=5, image_shape=(3,), training=False
    )
    assert dataset.element_spec[0].shape.as_list() == [None, 3]
    [(rows, labels)] = dataset.as_numpy_iterator()
    np.testing.assert_array_equal(rows, x)
    assert rows.dtype == tf.float32 and labels.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="has no images but rows of numbers"):
        make_dataset(
            source,
            "train",
            batch_size=5,
            image_shape=(3,),
            training=True,
            recipe="cifar",
        )


@pytest.fixture
def many_sizes(tmp_path, encode, image_example, write_tfrecord, request):
    """A source of images of many sizes, the same in records and in a folder."""
    rng = np.random.default_rng(0)
    (tmp_path / "records").mkdir()
    for split in ("train", "test"):
        sizes = [(5 + i, 9 - i) for i in range(5)]
        images = [rng.integers(0, 256, [*size, 3], np.uint8) for size in sizes]
        examples = [image_example(image, i) for i, image in enumerate(images)]
        write_tfrecord(tmp_path / "records" / split, examples)
        for i, image in enumerate(images):
            folder = tmp_path / "folder" / split / str(i)
            folder.mkdir(parents=True)
            (folder / "a.png").write_bytes(encode(image))
    if request.param == "records":
        return open_source(f"tfrecord:{tmp_path}/records/*", num_classes=5)
    return open_source(f"folder:{tmp_path}/folder")


KINDS = pytest.mark.parametrize(
    "many_sizes", [slow("records"), "folder"], indirect=True
)


@pytest.mark.slow
@KINDS
def test_images_of_many_sizes_are_kept_encoded(many_sizes):
    source, kept = many_sizes, cached(many_sizes)
    assert kept.encoded and kept.splits == {"train": 5, "test": 5}
    assert "KB of encoded images kept in memory" in kept.note
    for split in kept.splits:
        wanted = _examples(source, split, image_shape=(7, 7, 3))
        assert _examples(kept, split, image_shape=(7, 7, 3)) == wanted
    # What is wrong with a record is said of where it was read.
    assert kept.origin is source
    path = source.files("train")[0]
    with open(path, "r+b") as file:
        file.truncate(30)
    assert find_bad_record(kept, "train").startswith(path)


@pytest.mark.slow
@KINDS
def test_images_of_many_sizes_are_kept_resized(many_sizes):
    kept = cached(many_sizes, image_shape=(7, 7, 3))
    assert not kept.encoded and kept.splits == {"train": 5, "test": 5}
    assert kept.note == "1.4 KB of pixels kept in memory"
    for split in kept.splits:
        wanted = _examples(many_sizes, split, image_shape=(7, 7, 3))
        assert _examples(kept, split) == wanted


@pytest.fixture
def photographs(tmp_path, image_example, write_tfrecord):
    """A source of noise in three sizes; 10 times as large as 8x8 pixels."""
    rng = np.random.default_rng(0)
    shapes = [(20 + 4 * i, 30 - 3 * i, 3) for i in range(3)] * 4
    images = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
    examples = [image_example(image, i) for i, image in enumerate(images)]
    (tmp_path / "photographs").mkdir()
    write_tfrecord(tmp_path / "photographs" / "train", examples)
    return open_source(f"tfrecord:{tmp_path}/photographs/*", num_classes=12)


_OPTIONS = (
    {"training": False},
    {"training": True, "recipe": "cifar", "start_epoch": 1},
)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_photographs_are_kept_at_the_size_wanted(photographs, tmp_path, where):
    """In the same order, and changed at random by the same numbers."""
    encoded = cached(photographs, "memory")
    assert encoded.encoded
    # In memory changed at random, on the disk of two sizes.
    shapes = {"memory": [(8, 8, 3)], "disk": [(8, 8, 3), (8, 6, 1)]}
    for number, shape in enumerate(shapes[where]):
        kept = cached(photographs, where, str(tmp_path / "kept"), image_shape=shape)
        assert kept.image_shape == shape and not kept.encoded
        if where == "disk":
            assert len(list((tmp_path / "kept").iterdir())) == 3 + 3 * number
        for options in _OPTIONS[: 1 + (where == "memory")]:
            wanted = _examples(encoded, "train", image_shape=shape, **options)
            assert _examples(kept, "train", **options) == wanted


def test_what_is_moved_at_random_is_kept_encoded(photographs):
    moved = cached(photographs, "memory", image_shape=(8, 8, 3), recipe="imagenet")
    assert moved.encoded


@pytest.mark.parametrize("counted", [True, False])
def test_what_is_kept_of_photographs_depends_on_the_room(
    photographs, monkeypatch, counted
):
    shape, size = (8, 8, 3), 12 * 8 * 8 * 3
    assert photographs.splits == {"train": None}
    if counted:
        photographs.splits = {"train": 12}

    def kept(free, cache_="auto", shape=shape):
        monkeypatch.setattr(space, "free_memory", lambda: free)
        found = cached(photographs, cache_, image_shape=shape)
        if found is photographs:
            return None
        return "encoded" if found.encoded else "pixels"

    # An estimate of how many there are is not exact.
    assert kept(4 * size if counted else 5 * size) == "pixels"
    # As they are encoded, they take less room than 64x64 pixels.
    assert kept(4 * 10**5, shape=(64, 64, 3)) == "encoded"
    assert kept(4 * size - 1) is None
    # Asked for, the smaller of the two.
    assert kept(0, "memory") == "pixels"
    assert kept(0, "memory", (640, 640, 3)) == "encoded"


@pytest.mark.slow
def test_the_smaller_of_two_sizes_is_kept(stamps):
    for larger in ((16, 16, 1), (8, 8, 3)):
        assert keep._pixels_shape(stamps, larger) == (8, 8, 1)
    small = cached(stamps, image_shape=(4, 4, 1))
    assert small.image_shape == (4, 4, 1)
    wanted = _examples(stamps, "test", image_shape=(4, 4, 1))
    assert _examples(small, "test") == wanted


def test_rows_of_numbers_have_one_shape(tmp_path):
    (tmp_path / "a.csv").write_text("a,b,label\n1,2,0\n3,4,1\n")
    rows = open_source(f"csv:{tmp_path}/*.csv")
    assert cached(rows, image_shape=(2,)).image_shape == (2,)
    with pytest.raises(ValueError, match=r"has rows of 2 numbers.* expected \(2,\)"):
        cached(rows, image_shape=(3,))


@pytest.mark.parametrize(
    "shape", [(8, 8), (8, 8, 3, 1), (), (0, 8, 1), (-1, 8, 1), (8.0, 8, 1), 8, "abc"]
)
def test_what_is_no_shape(digits, shape):
    for make in (
        lambda: cached(digits, image_shape=shape),
        lambda: make_dataset(digits, "test", 8, image_shape=shape),
    ):
        with pytest.raises(ValueError, match="expected height, width and channels"):
            make()


@pytest.mark.parametrize("channels", [2, 4])
def test_channels_that_do_not_convert(digits, channels):
    with pytest.raises(ValueError, match=r"have 1 channels.* expected \(8, 8, 1\)"):
        cached(digits, image_shape=(8, 8, channels))


def test_a_file_is_no_folder(digits, tmp_path):
    (tmp_path / "a").touch()
    with pytest.raises(ValueError, match="which is a file: name a folder"):
        cached(digits, "disk", str(tmp_path / "a"))


@pytest.mark.slow
def test_a_damaged_cache_is_written_anew(stamps, examples, tmp_path, capsys):
    cached(stamps, "disk", str(tmp_path))
    labels = next(tmp_path.glob("*-labels.npy"))
    images = tmp_path / labels.name.replace("-labels", "")
    sums = images.with_suffix(".sums")
    for path, damage in [
        *((path, damage) for path in (images, labels) for damage in DAMAGES),
        (images, lambda content: b""),
        (labels, None),
        (sums, None),
        (sums, lambda content: b"{}"),
    ]:
        capsys.readouterr()
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage(path.read_bytes()))
        again = cached(stamps, "disk", str(tmp_path))
        assert _examples(again, "test") == examples["test"]
        (said,) = capsys.readouterr().err.splitlines()
        assert "cannot be used, as " in said and said.endswith("cache is made anew.")
        assert len([*tmp_path.iterdir()]) == 3
    cached(stamps, "disk", str(tmp_path))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", RECIPES)
def test_which_recipes_take_whole_images(name):
    assert takes_whole(name) == (name != "imagenet")


def test_a_deterministic_run_decides_by_the_data_alone(stamps, monkeypatch):
    monkeypatch.setattr(space, "free_memory", lambda: 0)
    assert cached(stamps) is stamps
    assert isinstance(cached(stamps, deterministic=True), KeptSource)
    monkeypatch.setattr(limits, "SMALL", 1000)
    assert cached(stamps, deterministic=True) is stamps


def test_rows_of_numbers_are_kept(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,label\n1.5,2,0\n-3,4e9,1\n")
    source = open_source(f"csv:{tmp_path}/*.csv")
    kept = cached(source)
    assert isinstance(kept, RowSource) and kept.image_shape == (2,)
    dataset = make_dataset(
        kept, "train", batch_size=2, image_shape=(2,), training=False
    )
    [(rows, labels)] = dataset.as_numpy_iterator()
    np.testing.assert_array_equal(rows, np.float32([[1.5, 2], [-3, 4e9]]))
    assert labels.tolist() == [0, 1]


_KEEP = """
import resource, sys
import tensorflow as tf
from towers.input_pipeline import cached, make_dataset, open_source

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def read(source):
    options = {"batch_size": 8, "image_shape": (512, 512, 3), "training": True}
    batches = make_dataset(source, "train", recipe="cifar", **options)
    for _ in batches.take(4):
        pass

few, many = (open_source(f"tfrecord:{path}", num_classes=2) for path in sys.argv[1:])
read(cached(few, "memory"))
before = peak()
read(cached(many, "memory"))
print(peak() - before)
"""


@pytest.mark.slow
def test_pixels_are_kept_once(tmp_path, example, write_tfrecord):
    record = example(
        image__encoded=bytes(3 * 2**18),
        image__height=512,
        image__width=512,
        image__channels=3,
        image__class__label=1,
    )
    paths = [
        write_tfrecord(tmp_path / str(count), [record] * count) for count in (64, 512)
    ]
    done = warm.run("tests.program", _KEEP, *paths)
    assert done.returncode == 0, done.stderr
    # They are 336 MB more.
    assert float(done.stdout) < 1.5 * 336


@pytest.mark.slow
def test_pixels_in_records_are_counted(tmp_path, example, write_tfrecord):
    for split, count in (("train", 7), ("val", 3)):
        records = [
            example(
                image__encoded=bytes([i] * 12),
                image__height=2,
                image__width=2,
                image__channels=3,
                image__class__label=i,
            )
            for i in range(count)
        ]
        write_tfrecord(tmp_path / split, records)
    source = open_source(f"tfrecord:{tmp_path}/*", num_classes=7)
    assert source.splits == {"train": None, "test": None}
    kept = cached(source)
    assert not kept.encoded and kept.splits == {"train": 7, "test": 3}
    for split in kept.splits:
        wanted = [(bytes([i] * 12), i) for i in range(kept.splits[split])]
        assert _examples(kept, split) == wanted


def test_workers_of_a_service_cannot_read_what_python_reads(stamps, tmp_path):
    kept = cached(stamps, "disk", str(tmp_path))
    with pytest.raises(ValueError, match="read by Python, which its workers cannot"):
        make_dataset(
            kept,
            "train",
            batch_size=8,
            image_shape=(8, 8, 1),
            training=True,
            data_service="grpc://localhost:1",
        )


@pytest.mark.slow
def test_other_fields_are_another_cache(tmp_path, example, write_tfrecord):
    fields = {"image__height": 2, "image__width": 2, "image__channels": 3}
    fields |= {"x": bytes(12), "y": bytes([9] * 12), "coarse": 1, "fine": 7}
    write_tfrecord(tmp_path / "a", [example(**fields)] * 3)
    found = set()
    for image_key, label_key in (("x", "coarse"), ("x", "fine"), ("y", "fine")):
        keys = {"image_column": image_key, "label_column": label_key}
        source = open_source(f"tfrecord:{tmp_path}/a", num_classes=8, **keys)
        kept = cached(source, "disk", str(tmp_path / "cache"))
        ((image, label), *_) = _examples(kept, "train")
        found.add((image[0], label))
    assert found == {(0, 1), (0, 7), (9, 7)}

import logging

import numpy as np
import pytest
import tensorflow as tf

from input_pipeline import ArraySource, cache, keep_decoded, make_dataset, open_source
from input_pipeline.sources.arrays import RowSource


def _examples(source, split, **options):
    dataset = make_dataset(
        source,
        split,
        batch_size=100,
        image_shape=source.image_shape,
        **({"training": False} | options),
    )
    pairs = list(dataset.as_numpy_iterator())
    images, labels = map(np.concatenate, zip(*pairs, strict=True))
    return [
        (image.tobytes(), int(label))
        for image, label in zip(images, labels, strict=True)
    ]


@pytest.mark.parametrize("where", ["memory", "disk", "auto"])
def test_kept_examples_are_the_same(digits, tmp_path, where):
    kept = keep_decoded(digits, where, str(tmp_path))
    assert isinstance(kept, RowSource)
    assert (kept.splits, kept.class_names) == (digits.splits, digits.class_names)
    assert [path.suffix for path in tmp_path.iterdir()] == (
        [".npy", ".npy"] if where == "disk" else []
    )
    for split in digits.splits:
        assert _examples(kept, split) == _examples(digits, split)
    shuffled = _examples(kept, "train", training=True)
    assert shuffled != _examples(digits, "train")
    assert sorted(shuffled) == sorted(_examples(digits, "train"))


def test_a_later_run_reads_the_files(digits, tmp_path, monkeypatch):
    first = keep_decoded(digits, "disk", str(tmp_path))
    monkeypatch.setattr(cache, "Pipeline", None)  # nothing is decoded
    second = keep_decoded(digits, "disk", str(tmp_path))
    monkeypatch.undo()
    assert _examples(second, "test") == _examples(first, "test")


def test_other_files_are_another_cache(tmp_path, image_example, grey, write_tfrecord):
    def write(value):
        record = image_example(grey(value), 0)
        write_tfrecord(tmp_path / "data" / "a", [record] * 2)
        source = open_source(f"tfrecord:{tmp_path}/data/*")
        source.image_shape = (8, 8, 3)
        return keep_decoded(source, "disk", str(tmp_path / "cache"))

    (tmp_path / "data").mkdir()
    first, second = _examples(write(1), "train"), _examples(write(200), "train")
    assert [image[0] for image, _ in first + second] == [1, 1, 200, 200]


def test_what_does_not_fit_goes_to_the_disk_or_nowhere(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_free_memory", lambda: 4 * 1797 * 64 - 1)
    assert keep_decoded(digits, "auto") is digits
    kept = keep_decoded(digits, "auto", str(tmp_path))
    assert isinstance(kept, RowSource) and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(cache, "_free_memory", lambda: 4 * 1797 * 64)
    assert isinstance(keep_decoded(digits, "auto"), RowSource)


def test_the_log_says_what_was_decided(digits, caplog):
    with caplog.at_level(logging.INFO, logger="absl"):
        keep_decoded(digits, "memory")
    assert "digits: 0.1 MB of pixels, kept decoded, cache=memory" in caplog.text


def test_free_memory_is_known_here():
    assert 2**20 < cache._free_memory() < 2**44


def test_what_cannot_be_kept(digits, tmp_path, image_example, grey, write_tfrecord):
    write_tfrecord(tmp_path / "a", [image_example(grey(0), 0)])
    source = open_source(f"tfrecord:{tmp_path}/*")
    assert keep_decoded(source) is source
    assert keep_decoded(digits, "none") is digits
    arrays = ArraySource(np.zeros([3, 2, 2, 1], np.uint8), [0, 1, 2])
    assert keep_decoded(arrays, "memory") is arrays
    with pytest.raises(ValueError, match="different or unknown size and number"):
        keep_decoded(source, "memory")
    with pytest.raises(ValueError, match="no folder: name one"):
        keep_decoded(digits, "disk")
    with pytest.raises(ValueError, match="cache is 'ram', expected one of auto"):
        keep_decoded(digits, "ram")


def test_a_killed_write_leaves_no_cache(digits, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_fill", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_decoded(digits, "disk", str(tmp_path))
    monkeypatch.undo()
    kept = keep_decoded(digits, "disk", str(tmp_path))
    assert _examples(kept, "test") == _examples(digits, "test")


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

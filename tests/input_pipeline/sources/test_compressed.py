"""TFRecord files that are compressed as a whole."""

import zlib

import numpy as np
import pytest
import tensorflow as tf

from towers.input_pipeline import LocalStore, make_dataset, open_source
from towers.input_pipeline.convert.conversion import convert
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.records.checks import scan_labels
from towers.input_pipeline.sources.examples import compressed
from towers.input_pipeline.sources.files.record import BadRecordError

_COUNT = 60


@pytest.fixture
def write(image_example):
    """Writes noisy pictures, which do not compress well; picture k has the label k."""

    def write_file(path, kind, first=0, size=20):
        draw = np.random.default_rng(first)
        with tf.io.TFRecordWriter(str(path), kind) as writer:
            for k in range(first, first + _COUNT):
                pixels = draw.integers(0, 256, [size, size, 3]).astype(np.uint8)
                writer.write(image_example(pixels, k))

    return write_file


def _labels(source, split="train", **options):
    data = make_dataset(source, split, 8, image_shape=(20, 20, 3), **options)
    return [int(y) for _, ys in data.as_numpy_iterator() for y in ys]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_they_are_read_like_others(tmp_path, write, kind, name):
    write(tmp_path / name, kind)
    write(tmp_path / "plain", "", first=_COUNT)
    source = open_source(f"tfrecord:{tmp_path}/*")
    assert source.num_classes == 2 * _COUNT
    scan_labels(source, "train")
    assert source.is_whole(f"{tmp_path}/{name}")
    in_order = _labels(source, training=False)
    assert in_order[:17] == [*range(16), _COUNT] and {*in_order} == {*range(2 * _COUNT)}
    assert sorted(_labels(source, seed=1)) == [*range(2 * _COUNT)]
    assert len(_labels(source, seed=1, start_record=7)) == 2 * _COUNT - 7
    assert source.reads_whole("train") == "files are compressed"
    found = quarantine.inspect(source, ["train"], 0)
    assert not len(found) and found.splits == {"train": 2 * _COUNT}


@pytest.mark.slow
def test_conversion_and_a_local_store(tmp_path, write):
    write(tmp_path / "a.gz", "GZIP")
    info = convert(
        open_source(f"tfrecord:{tmp_path}/a.gz"), f"{tmp_path}/new", shards=1
    )
    assert info["splits"]["train"]["examples"] == _COUNT
    store = LocalStore(tmp_path / "store")
    source = open_source(f"tfrecord:{tmp_path}/a.gz", local_store=store)
    assert "compressed files, which have no parts: no store is used" in source.notes[0]
    assert _labels(source, training=False) == [*range(_COUNT)]


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "damaged"])
def test_nothing_is_read_behind_what_is_damaged(tmp_path, write, kind, cut):
    path = tmp_path / "a"
    write(path, kind, size=80)  # more than TensorFlow takes apart at once
    content = bytearray(path.read_bytes())
    if cut:
        del content[len(content) // 2 :]
    else:
        content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    source = open_source(f"tfrecord:{path}", num_classes=_COUNT)
    assert not source.is_whole(str(path))
    with pytest.raises(
        BadRecordError, match=r"a: record .*corrupted: .* nothing behind"
    ):
        scan_labels(source, "train")
    source = open_source(f"tfrecord:{path}", num_classes=_COUNT, skip_bad=True)
    found = quarantine.inspect(source, ["train"], 9)
    (bad,) = found.bad["train"]
    assert 0 < bad.number < _COUNT and bad.count is None
    kept = source.without(found.bad, found.splits)
    assert _labels(kept, training=False) == [*range(bad.number)]


def test_data_that_end_between_two_records_are_cut_off(tmp_path, write):
    write(tmp_path / "plain", "")
    deflate = zlib.compressobj()
    content = deflate.compress((tmp_path / "plain").read_bytes())
    (tmp_path / "cut").write_bytes(content + deflate.flush(zlib.Z_SYNC_FLUSH))
    *good, bad = compressed.walk(f"{tmp_path}/cut", "ZLIB")
    assert len(good) == _COUNT
    assert bad.fault == "corrupted: the compressed data are truncated"


@pytest.mark.parametrize("length", [0x9C78, 0x0178, 0x088B1F])
def test_a_length_that_looks_like_a_mark(tmp_path, write_tfrecord, length):
    path = write_tfrecord(tmp_path / "a", [b"x" * length, b"y"])
    assert compressed.kinds([path]) == {}


def test_a_compressed_file_without_records(tmp_path):
    for kind in "GZIP", "ZLIB":
        path = f"{tmp_path}/{kind}"
        tf.io.TFRecordWriter(path, kind).close()
        assert compressed.is_whole(path)
        assert [*compressed.walk(path, kind)] == []

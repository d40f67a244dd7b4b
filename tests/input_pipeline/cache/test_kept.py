"""What is kept comes into memory as the first epoch reads it."""

import os

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from pyarrow import parquet

from tests.variants import slow
from towers.input_pipeline import BadRecordError, blame_records, cached, open_source
from towers.input_pipeline.cache import kept as kept_module
from towers.input_pipeline.cache.kept import KeptSource
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.pipeline.rows import Rows
from towers.input_pipeline.sources.base import StreamSource
from towers.input_pipeline.sources.files.file_source import interleaved
from towers.input_pipeline.sources.files.record import Record

pytestmark = pytest.mark.quick_one_in(2)

COUNT, SHAPE = 40, (8, 8, 3)


def _pictures(encode, suffix="PNG"):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, [COUNT, *SHAPE], np.uint8)
    return [encode(image, suffix) for image in images]


def _folder(tmp_path, encode, **_):
    for i, picture in enumerate(_pictures(encode)):
        folder = tmp_path / "train" / str(i % 4)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:02}.png").write_bytes(picture)
        if i < 8:
            folder = tmp_path / "val" / str(i % 4)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:02}.png").write_bytes(picture)
    return f"folder:{tmp_path}"


def _records(tmp_path, encode, example, write_tfrecord, options=None, **_):
    pictures = _pictures(encode)
    # Files of different sizes, of which one has no record.
    for file, (begin, end) in enumerate([(0, 17), (17, 17), (17, 20), (20, COUNT)]):
        records = [
            example(image__encoded=pictures[i], image__class__label=i % 4)
            for i in range(begin, end)
        ]
        path = str(tmp_path / f"train-{file}")
        if options is None:
            write_tfrecord(path, records)
        else:
            with tf.io.TFRecordWriter(path, options) as writer:
                for record in records:
                    writer.write(record)
    return f"tfrecord:{tmp_path}/*"


def _compressed(**fixtures):
    return _records(options="GZIP", **fixtures)


def _pixels(tmp_path, example, write_tfrecord, **_):
    rng = np.random.default_rng(0)
    for file in range(2):
        records = [
            example(
                image__encoded=rng.integers(0, 256, SHAPE, np.uint8).tobytes(),
                image__height=8,
                image__width=8,
                image__channels=3,
                image__class__label=i % 4,
            )
            for i in range(COUNT // 2)
        ]
        write_tfrecord(tmp_path / f"train-{file}", records)
    return f"tfrecord:{tmp_path}/*"


def _parquet(tmp_path, encode, **_):
    pictures = _pictures(encode)
    for file in range(2):
        some = slice(file * COUNT // 2, (file + 1) * COUNT // 2)
        table = {"image": pictures[some], "label": [i % 4 for i in range(COUNT)[some]]}
        path = tmp_path / f"train-{file}.parquet"
        parquet.write_table(pa.table(table), path, row_group_size=7)
    return f"parquet:{tmp_path}/*"


def _digits(**_):
    return "digits"


@pytest.fixture
def source(request, tmp_path, encode, example, write_tfrecord):
    """A source of the kind that a test is given."""
    fixtures = {
        "tmp_path": tmp_path,
        "encode": encode,
        "example": example,
        "write_tfrecord": write_tfrecord,
    }
    return _prepared(request.param(**fixtures))


def _prepared(spec):
    source = open_source(spec)
    source.prepare()
    return source


def _all_kinds(*quick):
    kinds = (_folder, _records, _compressed, _pixels, _parquet, _digits)
    return pytest.mark.parametrize(
        "source",
        [
            pytest.param(kind, id=kind.__name__[1:])
            if kind in quick
            else slow(kind, id=kind.__name__[1:])
            for kind in kinds
        ],
        indirect=True,
    )


def _shape(source):
    return (8, 8, source.image_shape[-1])


def _batches(source, split="train", epochs=1, **options):
    """Batches of some epochs, as bytes and labels."""
    options = {"training": True, "seed": 3, "shuffle_mb": 1, **options}
    pipeline = Pipeline(
        source,
        split,
        batch_size=7,
        image_shape=_shape(source),
        recipe="cifar",
        **options,
    )
    dataset = pipeline.dataset()
    return [
        [(x.tobytes(), y.tolist()) for x, y in dataset.as_numpy_iterator()]
        for _ in range(epochs)
    ]


def _keep(source, shape=True):
    kept = cached(source, "memory", image_shape=_shape(source) if shape else None)
    assert isinstance(kept, KeptSource)
    return kept


def _examples(kept, split="train"):
    return sorted(
        image for epoch in _batches(kept, split, training=False) for image in epoch
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", [True, False])
@_all_kinds(_folder, _records)
def test_batches_do_not_depend_on_what_is_in_memory(source, shape):
    whole = _batches(_keep(source, shape), epochs=3)
    count = sum(len(labels) for _, labels in whole[0])
    if isinstance(source, StreamSource) and shape is False:
        # The order of the first epoch is that of the stream itself.
        labels = [labels for _, labels in whole[0]]
        assert labels == [labels for _, labels in _batches(source)[0]]
    # A run that was killed in its first epoch, or in the second one.
    for epoch, batch in ((0, 3), (1, 2)):
        kept = _keep(source, shape)
        (rest, *others) = _batches(
            kept, epochs=3 - epoch, start_epoch=epoch, start_record=7 * batch
        )
        assert rest == whole[epoch][batch:]
        assert others == whole[epoch + 1 :]
    # What is read in a fixed order, before or after, leaves it as it is.
    kept = _keep(source, shape)
    fixed = _batches(kept, training=False)
    assert _batches(kept, epochs=3) == whole
    assert sum(len(labels) for _, labels in fixed[0]) == count


@pytest.mark.slow
@_all_kinds(_records)
def test_epochs_without_a_gap_are_the_same(source):
    whole = _batches(_keep(source), epochs=3)
    for epoch, batch in ((0, 2), (1, 1)):
        pipeline = Pipeline(
            _keep(source),
            "train",
            batch_size=7,
            image_shape=_shape(source),
            recipe="cifar",
            training=True,
            seed=3,
            shuffle_mb=1,
            repeat=True,
            start_epoch=epoch,
            start_record=7 * batch,
        )
        wanted = [*whole[epoch][batch:]]
        for others in whole[epoch + 1 :]:
            wanted += others
        found = pipeline.dataset().take(len(wanted)).as_numpy_iterator()
        assert [(x.tobytes(), y.tolist()) for x, y in found] == wanted


class _Half:
    """The first or the second half of each batch, as one of two hosts takes."""

    def __init__(self, host):
        self._host = host

    def bounds(self, total):
        middle = (total + 1) // 2
        return (0, middle) if self._host == 0 else (middle, total)

    def of_batch(self, x, first, total, mark):
        del first, total, mark
        return x


@pytest.mark.slow
@_all_kinds(_records)
def test_hosts_have_their_rows_of_the_same_batches(source):
    # The first epoch of each host leaves rows of the other one to the next ones.
    whole = _batches(_keep(source), epochs=2)
    kept = [_keep(source) for _ in range(2)]
    halves = [_batches(kept[host], epochs=2, share=_Half(host)) for host in range(2)]
    joined = [
        [
            (x + other_x, y + other_y)
            for (x, y), (other_x, other_y) in zip(*epochs, strict=True)
        ]
        for epochs in zip(*halves, strict=True)
    ]
    assert joined == whole


@pytest.mark.slow
def test_only_rows_of_a_host_are_decoded(tmp_path, encode):
    source = _prepared(_folder(tmp_path, encode))
    kept, share = _keep(source), _Half(0)
    _batches(kept, share=share)
    filled = kept._store.is_filled(tf.range(COUNT)).numpy()
    batches = -(-COUNT // 7)
    assert filled.sum() == sum(
        Rows(share, 7).count if batch < batches - 1 else (COUNT % 7 + 1) // 2
        for batch in range(batches)
    )


@pytest.mark.slow
@_all_kinds(_folder, _records)
def test_nothing_is_decoded_before_it_is_needed_nor_again(source):
    kept = _keep(source)
    rows = tf.range(kept.splits["train"])
    assert not kept._store.is_filled(rows).numpy().any()
    (first,) = _batches(kept, training=False)
    assert kept._store.is_filled(rows).numpy().all()
    # Whoever looks again for a file does not find it.
    for path in {*source.files("train")} if source.name != "digits" else ():
        os.truncate(path, 0)
    assert _batches(kept, training=False) == [first]


def _write_anew(path, content):
    """Writes a file in place, as whoever changes data does."""
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(content)


@pytest.mark.quick_one_in(4)
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("write", [_folder, _records])
def test_a_bad_record_is_named_when_it_is_read(
    write, epoch, tmp_path, encode, example, write_tfrecord
):
    spec = write(
        tmp_path=tmp_path,
        encode=encode,
        example=example,
        write_tfrecord=write_tfrecord,
    )
    source = _prepared(spec)
    path = source.files("train")[-1]
    if write is _folder:
        _write_anew(path, b"no image")
    else:
        bad = example(image__encoded=b"no image", image__class__label=0)
        write_tfrecord(path, [bad] * (COUNT - 20))
    kept = _keep(source)
    with pytest.raises(BadRecordError, match=path), blame_records(kept):
        _batches(kept, start_epoch=epoch)


@pytest.mark.parametrize(
    ("count", "epoch"),
    [(COUNT - 19, 0), *(slow(COUNT - n, k) for n, k in ((19, 1), (21, 0), (21, 1)))],
)
def test_files_that_change_after_they_are_counted(
    count, epoch, tmp_path, encode, example, write_tfrecord
):
    spec = _records(tmp_path, encode, example, write_tfrecord)
    source = _prepared(spec)
    kept = _keep(source)
    record = example(image__encoded=_pictures(encode)[0], image__class__label=0)
    write_tfrecord(source.files("train")[-1], [record] * count)
    with (
        pytest.raises(BadRecordError, match="another number of records"),
        blame_records(kept),
    ):
        _batches(kept, start_epoch=epoch, epochs=2)


def test_all_of_a_split_is_read_at_once(tmp_path, encode, example, write_tfrecord):
    kept = _keep(_prepared(_records(tmp_path, encode, example, write_tfrecord)))
    assert not kept._is_full("train")
    kept.fill("train")
    assert kept._is_full("train")
    kept.origin.batches = None
    kept.fill("train")  # reads nothing


@pytest.mark.slow
def test_records_that_are_left_out_are_not_kept(tmp_path, encode):
    source = _prepared(_folder(tmp_path, encode))
    bad = {
        "train": [
            Record(path, "", i) for i, path in enumerate(source.files("train")[:3])
        ]
    }
    good = source.without(bad, {"train": COUNT - 3})
    kept = _keep(good)
    assert kept.splits == {"train": COUNT - 3, "test": 8}
    everything, left = _examples_of_one(_keep(source)), _examples_of_one(kept)
    assert left < everything and len(left) == COUNT - 3
    assert _examples_of_one(kept, "test") == _examples_of_one(_keep(source), "test")


def _examples_of_one(kept, split="train"):
    """All images of a split."""
    size = 8 * 8 * 3
    return {
        x[at : at + size]
        for x, _ in _batches(kept, split, training=False)[0]
        for at in range(0, len(x), size)
    }


@pytest.mark.slow
def test_what_takes_long_is_shown(
    tmp_path, encode, example, write_tfrecord, monkeypatch
):
    source = _prepared(_records(tmp_path, encode, example, write_tfrecord))
    begun = []

    class Noted(kept_module.Progress):
        def __init__(self, what, total=None, unit="rows"):
            super().__init__(what, total, unit)
            begun.append((self, total))

    monkeypatch.setattr(kept_module, "Progress", Noted)
    _batches(_keep(source), start_epoch=1)
    ((progress, total),) = begun
    assert progress.done == total == COUNT


@pytest.mark.parametrize("source", [pytest.param(_digits, id="digits")], indirect=True)
def test_numbers_of_records_are_those_that_come(source):
    for split, size in source.splits.items():
        read = [int(number) for number, _ in source.records(split)]
        assert source.numbers(split).tolist() == read
        assert len(read) == size


@pytest.mark.parametrize("seed", range(6))
def test_files_are_interleaved_as_by_tensorflow(seed):
    rng = np.random.default_rng(seed)
    # Some of whole blocks, some empty, and more than are open at the same time.
    counts = rng.integers(0, 5, 12) * rng.choice([1, 4], 12)
    for cycle_length in (1, 3, 12):
        files = tf.data.Dataset.from_tensor_slices((np.arange(12) * 100, counts))
        expected = files.interleave(
            lambda first, count: tf.data.Dataset.range(first, first + count),
            cycle_length=cycle_length,
            block_length=4,
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        turns = interleaved(counts.tolist(), cycle_length, 4)
        order = [100 * file + at for file, a, b in turns for at in range(a, b)]
        assert order == [*expected.as_numpy_iterator()]


@pytest.mark.parametrize("begin", [0, 1])
def test_numbers_of_files_of_records(begin, tmp_path, encode, example, write_tfrecord):
    # More files than are read at once.
    record = example(image__encoded=_pictures(encode)[0], image__class__label=0)
    for file in range(20):
        write_tfrecord(tmp_path / f"{file:02}", [record] * (begin + 7 * (file % 5)))
    source = open_source(f"tfrecord:{tmp_path}/*", num_classes=1)
    read = [int(number) for number, _ in source.records("train")]
    assert source.numbers("train").tolist() == read


@pytest.mark.parametrize(("write", "has_buffer"), [(_folder, False), (_records, True)])
def test_the_buffer_of_a_stream_decides_its_first_epoch(
    write, has_buffer, tmp_path, encode, example, write_tfrecord
):
    spec = write(
        tmp_path=tmp_path,
        encode=encode,
        example=example,
        write_tfrecord=write_tfrecord,
    )
    kept = _keep(_prepared(spec))
    assert kept.has_buffer == has_buffer
    order = Pipeline(kept, "train", batch_size=7, shuffle_mb=3).order
    assert order["shuffle_mb"] == (3 if has_buffer else None)

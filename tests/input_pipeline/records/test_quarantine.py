"""Bad records of every kind, in every source: named, or passed over and counted."""

import concurrent.futures
import json
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.limits import HANG_S
from tests.variants import slow
from towers.input_pipeline import (
    BadRecordError,
    blame_records,
    cached,
    find_bad_record,
    make_dataset,
    open_source,
    scan_labels,
)
from towers.input_pipeline.records import quarantine as quarantines
from towers.input_pipeline.sources.examples import framing
from towers.input_pipeline.sources.tfds.digits import TowersDigits
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

GOOD = 12
# Where the bad one is put among them.
AT = 5


@pytest.fixture
def write(tmp_path, image_example, grey, write_tfrecord):
    """Writes two files of records, the label of each being its place modulo three.

    Takes what to put at AT in the first file; returns a source that classes are given
    to, the first file's path, and the byte offset of the record at AT.
    """

    def write_files(*bad, **options):
        records = [image_example(grey(i), i % 3) for i in range(GOOD)]
        offset = sum(len(record) + 16 for record in records[:AT])
        path = write_tfrecord(
            tmp_path / "train-0", [*records[:AT], *bad, *records[AT:]]
        )
        others = [image_example(grey(100 + i), i % 3) for i in range(GOOD)]
        write_tfrecord(tmp_path / "train-1", others)
        options = {"num_classes": 3, "skip_bad": True} | options
        return open_source(f"tfrecord:{tmp_path}/*", **options), path, offset

    return write_files


def _values(source, seed=0, **options):
    """The first value of each image, in the order of a training epoch."""
    shape = (8, 8, 3) if source.encoded else source.image_shape
    data = make_dataset(
        source,
        "train",
        batch_size=5,
        image_shape=shape,
        training=True,
        seed=seed,
        **options,
    )
    images = [images.numpy().reshape(len(images), -1)[:, 0] for images, _ in data]
    return np.concatenate(images).astype(int).tolist()


def _read(source):
    """The same of what is read and parsed, without the other stages."""
    seeds = tf.constant([1, 2], tf.int64)
    ((_, records),) = source.batches("train", 100, seeds=seeds, buffer_mb=1)
    images, _ = source.parse(records)
    if source.encoded:
        images = [tf.io.decode_image(source.load(image)) for image in images]
    return [int(np.ravel(image)[0]) for image in images]


def _without(source, most=100):
    found = quarantines.inspect(source, [*source.splits], most)
    return source.without(found.bad, found.splits), found


ALL = [*range(GOOD), *range(100, 100 + GOOD)]


def _features(**fields):
    return tf.train.Example(
        features=tf.train.Features(
            feature={
                key.replace("__", "/"): tf.train.Feature(**{f"{kind}_list": values})
                for key, (kind, values) in fields.items()
            }
        )
    ).SerializeToString()


def _labelled(kind, *values):
    lists = {"int64": tf.train.Int64List, "bytes": tf.train.BytesList}
    lists["float"] = tf.train.FloatList
    return lambda image: _features(
        image__encoded=("bytes", tf.train.BytesList(value=[image])),
        image__class__label=(kind, lists[kind](value=values)),
    )


def _shown(make_image):
    return lambda image: _labelled("int64", 0)(make_image(image))


# What takes a good image's bytes and makes a bad record, and what is said of it.
KINDS = {
    "no image": (_shown(lambda _: b"no image"), "image/encoded: Unknown image"),
    "half an image": (_shown(lambda png: png[: len(png) // 2]), "image/encoded: "),
    "bits flipped": (_shown(lambda png: png[:45] + b"~" + png[46:]), "image/encoded: "),
    "empty image": (_shown(lambda _: b""), "image/encoded: "),
    "no label": (
        lambda image: _features(
            image__encoded=("bytes", tf.train.BytesList(value=[image]))
        ),
        "image/class/label",
    ),
    "two labels": (_labelled("int64", 1, 2), "image/class/label"),
    "text as label": (_labelled("bytes", b"cat"), "image/class/label"),
    "label of no number": (_labelled("float", float("nan")), "image/class/label"),
    "label too large": (_labelled("int64", 3), "image/class/label 3 is outside [0, 3)"),
    "label below 0": (_labelled("int64", -1), "image/class/label -1 is outside [0, 3)"),
    "no example": (lambda _: b"\xff\xff", "not a tf.Example"),
}


# What is said of all of them, test_bad_examples_are_passed_over looks at.
QUICK = "no image", "label too large"


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize(
    "kind", [*QUICK, *(slow(kind) for kind in KINDS if kind not in QUICK)]
)
def test_a_bad_example_is_named(write, encode, grey, kind):
    make, reason = KINDS[kind]
    source, path, offset = write(make(encode(grey(1))))
    where = f"{path}: record {AT} (byte offset {offset}): "
    named = find_bad_record(source, "train")
    assert named.startswith(where) and reason in named and "\n" not in named
    found = quarantines.inspect(source, ["train"], 1)
    assert len(found) == 1 and str(found.bad["train"][0]) == named


# Found by its decoder, the parser and our own assertion.
@pytest.mark.parametrize("kind", ["no image", slow("no label"), slow("label below 0")])
def test_a_bad_example_is_named_after_the_error(write, encode, grey, kind):
    make, reason = KINDS[kind]
    source, path, _ = write(make(encode(grey(1))))
    with pytest.raises(BadRecordError) as caught, blame_records(source):
        _values(source)
    assert str(caught.value).startswith(f"{path}: record {AT} ")
    assert reason in str(caught.value)


def test_bad_examples_are_passed_over(write, encode, grey):
    source, path, _ = write(*(make(encode(grey(1))) for make, _ in KINDS.values()))
    good, found = _without(source)
    for place, ((_, reason), bad) in enumerate(
        zip(KINDS.values(), found.bad["train"], strict=True)
    ):
        assert str(bad).startswith(f"{path}: record {AT + place} ")
        assert reason in str(bad)
    assert good.splits == {"train": 2 * GOOD}
    assert sorted(_values(good)) == ALL
    assert find_bad_record(good, "train") is None


@pytest.mark.slow
@pytest.mark.parametrize("place", ["header", "data"])
def test_after_a_wrong_checksum_reading_goes_on(write, image_example, grey, place):
    source, path, offset = write(image_example(grey(50), 0))
    content = bytearray(open(path, "rb").read())
    content[offset + (9 if place == "header" else 30)] ^= 1
    open(path, "wb").write(content)
    good, found = _without(source)
    (bad,) = found.bad["train"]
    assert str(bad).startswith(f"{path}: record {AT} (byte offset {offset}): corrupted")
    # The length itself is right here, though its checksum is not.
    assert sorted(_read(good)) == ALL
    assert good.splits == {"train": len(ALL)}


@pytest.mark.slow
@pytest.mark.parametrize("record", [0, AT, GOOD - 1])
def test_behind_a_wrong_length_the_next_record_is_found(write, record):
    source, path, _ = write()
    sizes = [len(raw.numpy()) + 16 for raw in tf.data.TFRecordDataset(path)]
    content = bytearray(open(path, "rb").read())
    content[sum(sizes[:record]) + 1] ^= 1
    open(path, "wb").write(content)
    good, found = _without(source)
    (bad,) = found.bad["train"]
    assert bad.place == f"record {record} (byte offset {sum(sizes[:record])})"
    # Also with the first one bad: by it, memory for shuffling is bounded.
    assert good.record_bytes("train") == pytest.approx(np.mean(sizes) - 16, rel=0.2)
    assert sorted(_read(good)) == sorted({*ALL} - {record})


def test_with_no_record_to_be_found_the_rest_is_lost(write):
    source, path, offset = write()
    content = bytearray(open(path, "rb").read())
    content[offset] ^= 1
    # The end is lost, too.
    open(path, "wb").write(content[:-7])
    good, found = _without(source)
    (bad,) = found.bad["train"]
    assert str(bad).endswith(", and nothing behind it can be read")
    assert sorted(_read(good)) == [*range(AT), *ALL[GOOD:]]
    assert good.splits == {"train": AT + GOOD}


@pytest.mark.parametrize("left", [12, slow(5), slow(30)])
def test_a_truncated_file_is_read_up_to_there(write, left):
    source, path, offset = write()
    content = open(path, "rb").read()
    open(path, "wb").write(content[: offset + left])
    assert not framing.is_whole(path)
    good, found = _without(source)
    (bad,) = found.bad["train"]
    assert str(bad).startswith(f"{path}: record {AT} (byte offset {offset}): corrupted")
    assert "truncated" in bad.fault and len(found) == 1
    assert sorted(_read(good)) == [*range(AT), *ALL[GOOD:]]


def test_a_file_that_is_not_there(write, tmp_path):
    write()
    link = tmp_path / "train-2"
    link.symlink_to(tmp_path / "nowhere")
    source = open_source(f"tfrecord:{tmp_path}/*", num_classes=3, skip_bad=True)
    with pytest.raises(BadRecordError, match=r"a file cannot be read: .*train-2"):
        scan_labels(source, "train")
    good, found = _without(source)
    (bad,) = found.bad["train"]
    assert bad.path == str(link)
    assert sorted(_read(good)) == ALL
    assert sorted(_values(cached(good, "memory"))) == ALL


@pytest.mark.slow
def test_several_gaps_in_several_files(write, image_example, grey):
    source, _, _ = write()
    expected = list(ALL)
    for file, path in enumerate(source.files("train")):
        sizes = [len(raw.numpy()) + 16 for raw in tf.data.TFRecordDataset(path)]
        content = bytearray(open(path, "rb").read())
        for record in (0, 3, 4, GOOD - 1)[file:]:
            content[sum(sizes[:record]) + 40] ^= 1
            expected.remove(100 * file + record)
        open(path, "wb").write(content)
    good, found = _without(source)
    assert len(found) == 7
    first, again = _read(good), _read(good)
    assert sorted(first) == expected
    assert first == again


@pytest.mark.slow
def test_the_others_keep_order_and_augmentation(write, example):
    bad = example(image__encoded=b"no image", image__class__label=0)
    whole, _, _ = write(bad)
    good, found = _without(whole)

    def numbers(source, start=0):
        seeds = tf.constant([1, 2], tf.int64)
        batches = source.batches("train", 4, seeds=seeds, buffer_mb=1, start=start)
        return [int(number) for batch, _ in batches for number in batch]

    expected = numbers(whole)
    expected.remove(found.bad["train"][0].number)
    for start in (0, 3, 11):
        assert numbers(good, start) == expected[start:]


@pytest.mark.slow
def test_kept_in_memory(write, example):
    source, _, _ = write(example(image__encoded=b"no image", image__class__label=0))
    good, _ = _without(source)
    kept = cached(good, "memory")
    assert kept.splits == {"train": len(ALL)}
    assert sorted(_values(kept)) == ALL
    assert find_bad_record(kept, "train") is None


def test_folder(tmp_path, encode, grey):
    for i in range(9):
        folder = tmp_path / f"class-{i % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i}.png").write_bytes(encode(grey(i)))
    bad = tmp_path / "class-1" / "7.png"
    content = bytearray(bad.read_bytes())
    content[len(content) // 2] ^= 255
    bad.write_bytes(content)
    source = open_source(f"folder:{tmp_path}")
    good, found = _without(source)
    (record,) = found.bad["train"]
    assert record.where == str(bad)
    assert good.splits["train"] == source.splits["train"] - 1
    assert sorted(_read(good)) == sorted(set(_values_of(source)) - {7})
    # The held-out ones are numbered behind all of them.
    assert {split: n for split, n in good.splits.items() if split != "train"} == {
        split: n for split, n in source.splits.items() if split != "train"
    }


def _values_of(source):
    return [int(path.rpartition("/")[2][0]) for path in source.files("train")]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (("x,1", "nan,1", "1,9", "1,-1", "1", "1,x"), 6),
        # Which is looked at before, too.
        (("x,1",), 2),
        *(slow((row,), 2) for row in ("1,9", "1")),
    ],
)
def test_csv(tmp_path, rows, line):
    lines = ["a,label", *(f"{i},{i % 3}" for i in range(10))]
    lines[line - 1 : line - 1] = rows
    (tmp_path / "a.csv").write_text("\n".join(lines))
    source = open_source(
        f"csv:{tmp_path}/*",
        num_classes=3,
        skip_bad=True,
        eval_fraction=0,
        missing="fail",
    )
    good, found = _without(source)
    places = [record.place for record in found.bad["train"]]
    assert places == [f"line {line + i}" for i in range(len(rows))]
    assert sorted(_read(good)) == [*range(10)]


def test_classes_are_counted_beyond_bad_records(tmp_path):
    rows = ["a,label", "1,0", "x,7", "2,2", "3,-5", "4,1"]
    (tmp_path / "a.csv").write_text("\n".join(rows))
    with pytest.raises(ValueError, match="line 3: a is 'x', expected a number"):
        open_source(f"csv:{tmp_path}/*")
    source = open_source(f"csv:{tmp_path}/*", skip_bad=True)
    assert source.num_classes == 3
    good, _ = _without(source)
    assert sorted(_read(good)) == [1, 2, 4]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = [float(i) for i in range(10)]
    values[0] = values[4] = None
    values[7] = float("inf")
    columns = {"a": values, "label": [*[0, 1] * 4, 5, 1]}
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=3)
    source = open_source(
        f"parquet:{tmp_path}/*",
        num_classes=2,
        skip_bad=True,
        eval_fraction=0,
        missing="fail",
    )
    good, found = _without(source)
    assert [record.place for record in found.bad["train"]] == [
        *("row 0", "row 4", "row 7", "row 8")
    ]
    assert sorted(_read(good)) == [1, 2, 3, 5, 6, 9]


def test_a_row_group_that_cannot_be_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": np.arange(90.0), "label": [0, 1] * 45}
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table(columns), path, row_group_size=30, compression="gzip")
    group = parquet.ParquetFile(path).metadata.row_group(1).column(0)
    begin = group.dictionary_page_offset or group.data_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + 60] = bytes(60)
    path.write_bytes(content)
    source = open_source(f"parquet:{tmp_path}/*", num_classes=2, skip_bad=True)
    good, found = _without(source)
    (record,) = found.bad["train"]
    # Of the rows in the group, some are held out.
    assert (record.place, record.count, len(found)) == ("row group 1", 30, 30)
    with pytest.raises(BadRecordError, match="more bad records than the 29"):
        quarantines.inspect(source, ["train"], 29)
    readable = [*range(30), *range(60, 90)]
    held_out = 9, 15, 21, 64, 78, 82
    assert sorted(_read(good)) == [n for n in readable if n not in held_out]
    assert good.splits == {"train": 54, "test": 6}


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [None, [3, 4]])
def test_a_stream_goes_on_behind_bad_records(write, seeds):
    source, _, _ = write(b"no example")
    good, found = _without(source)
    assert len(found) == 1
    seeds = seeds and tf.constant(seeds, tf.int64)

    def numbers(start):
        order = good.batches("train", 5, seeds=seeds, buffer_mb=1, start=start)
        return [int(number) for some, *_ in order for number in some]

    every = numbers(0)
    assert len(every) == 2 * GOOD
    for start in (1, AT, AT + 1, AT + 2, GOOD, 2 * GOOD - 1):
        assert numbers(start) == every[start:]


def test_array_record(tmp_path, image_example, example, grey):
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "train.array_record"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for i in range(9):
        writer.write(image_example(grey(i), i % 3))
        if i == 4:
            writer.write(example(image__encoded=b"no", image__class__label=1))
    writer.close()
    source = open_source(f"array_record:{path}", num_classes=3, skip_bad=True)
    good, found = _without(source)
    assert [record.place for record in found.bad["train"]] == ["record 5"]
    assert good.splits == {"train": 9}
    assert sorted(_read(good)) == [*range(9)]


class FewDigits(TowersDigits):
    """Some of them: bad ones are looked for one by one."""

    def _generate_examples(self, digits, indices):
        return super()._generate_examples(digits, indices[::20])


@pytest.fixture
def few_digits(tmp_path):
    """A source of 72 digits to train on, in four files."""

    def open_few(**parts):
        source = TFDSSource(FewDigits(data_dir=tmp_path), "digits", 4, **parts)
        source.prepare()
        return source

    return open_few


@pytest.mark.slow
def test_tfds(few_digits):
    source = few_digits()
    path = source.files("train")[1]
    records = [record.numpy() for record in tf.data.TFRecordDataset(path)]
    broken = tf.train.Example.FromString(records[3])
    broken.features.feature["image"].bytes_list.value[0] = b"no image"
    records[3] = broken.SerializeToString()
    with tf.io.TFRecordWriter(path) as writer:
        for record in records:
            writer.write(record)
    good, found = _without(source)
    (record,) = found.bad["train"]
    assert record.path == path and record.place.startswith("record 3 ")
    count = source.splits["train"] - 1
    assert good.splits == {**source.splits, "train": count}
    data = make_dataset(
        good, "train", batch_size=64, image_shape=(8, 8, 1), training=True
    )
    assert sum(len(labels) for _, labels in data) == count
    # Of a part of a split, what lies in the part counts.
    part = few_digits(train_split="train[:10]")
    assert quarantines.inspect(part, ["train"], 0).splits["train"] == 10


@pytest.mark.slow
def test_what_tfds_has_to_write_again(few_digits):
    source = few_digits()
    path = source.files("train")[0]
    content = bytearray(open(path, "rb").read())
    content[40] ^= 1
    open(path, "wb").write(content)
    found = quarantines.inspect(source, ["train"], 10)
    with pytest.raises(ValueError, match="it is written again") as caught:
        source.without(found.bad, found.splits)
    assert str(caught.value).startswith(f"{path}: record 0 ")


class Host:
    """One of two hosts, each in a thread."""

    count = 2

    def __init__(self, index, meets, told):
        self.index, self.meets, self.told = index, meets, told

    def exchange(self, value):
        self.told[self.index] = json.dumps(value)
        self.meets.wait()
        told = [json.loads(each) for each in self.told]
        self.meets.wait()
        return told


@pytest.mark.slow
@pytest.mark.parametrize("bad", [True, False])
def test_hosts_look_at_a_part_each(write, example, monkeypatch, bad):
    record = example(image__encoded=b"no image", image__class__label=0)
    source, _, _ = write(*[record] * bad)
    looked_at = []
    check = quarantines.check_records

    def noted(source, path, split):
        looked_at.append(path)
        return check(source, path, split)

    monkeypatch.setattr(quarantines, "check_records", noted)
    alone = quarantines.inspect(source, ["train"], 3)
    assert len(looked_at) == 2 * bad
    looked_at.clear()
    # What only the first host knows counts for all.
    meets, told = threading.Barrier(2, timeout=HANG_S), [None, None]
    for known in ([], [alone]):
        with concurrent.futures.ThreadPoolExecutor(2) as hosts:
            found = hosts.map(
                lambda k, known=known: quarantines.inspect(
                    source, ["train"], 3, [] if k else known, Host(k, meets, told)
                ),
                range(2),
            )
            assert [*found] == [alone, alone]
    assert sorted(looked_at) == source.files("train")[: 2 * bad]


def test_more_than_asked_for(write, example):
    bad = example(image__encoded=b"no image", image__class__label=0)
    source, path, offset = write(bad, bad, bad)
    quarantines.inspect(source, ["train"], 3)
    with pytest.raises(ValueError, match="more bad records than the 2") as caught:
        quarantines.inspect(source, ["train"], 2)
    assert f"{path}: record {AT} (byte offset {offset})" in str(caught.value)


def test_no_good_record(tmp_path):
    (tmp_path / "a.csv").write_text("a,label\n1,9\n")
    source = open_source(f"csv:{tmp_path}/*", num_classes=3, skip_bad=True)
    with pytest.raises(ValueError, match=r"no good record.*line 2: label 9"):
        quarantines.inspect(source, ["train"], 10)


def test_a_list_is_used_while_the_files_are_the_same(
    write, example, tmp_path, monkeypatch
):
    bad = example(image__encoded=b"no image", image__class__label=0)
    source, path, _ = write(bad)
    found = quarantines.inspect(source, ["train"], 10)
    file = tmp_path / "bad_records.json"
    quarantines.write([found], str(file))
    (known,) = quarantines.read(str(file))
    assert known == found
    with monkeypatch.context() as patch:
        patch.setattr(quarantines, "_count_if_good", None)
        assert quarantines.inspect(source, ["train"], 10, [known]) == found
        with pytest.raises(BadRecordError, match="more bad records than the 0"):
            quarantines.inspect(source, ["train"], 0, [known])
    with open(path, "ab") as file:
        file.write(b"\0" * 30)
    again = quarantines.inspect(source, ["train"], 10, [known])
    assert len(again) == 2


@pytest.mark.parametrize("text", ["", "[1]", "{}", '[{"bad": 1}]', "[{}]"])
def test_a_list_that_is_none_is_no_list(tmp_path, text):
    path = tmp_path / "bad_records.json"
    path.write_text(text)
    assert quarantines.read(str(path)) == []
    assert quarantines.read(str(tmp_path / "none")) == []


def test_an_empty_file_is_said(write, tmp_path, caplog):
    source, _, _ = write()
    empty = tmp_path / "train-2"
    empty.write_bytes(b"")
    source = open_source(f"tfrecord:{tmp_path}/train-*", num_classes=3)
    scan_labels(source, "train")
    assert f"{empty} holds no record" in caplog.text
    assert sorted(_read(source)) == ALL

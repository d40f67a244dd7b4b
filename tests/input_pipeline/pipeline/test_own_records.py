"""Each of several hosts reads the records of its own rows, and no others."""

import dataclasses
import os

import numpy as np
import pytest

from tests.input_pipeline.pipeline.test_rows import batches, check, shares
from tests.variants import slow
from towers.input_pipeline import open_source
from towers.input_pipeline.pipeline import Pipeline
from towers.input_pipeline.records import checks, quarantine
from towers.input_pipeline.sources.examples import framing, record_index
from towers.input_pipeline.sources.tfds.digits import TowersDigits
from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

SIZES = 12, 25, 1, 10
OPTIONS = {"batch_size": 10, "image_shape": (8, 8, 3), "seed": 3}


@pytest.fixture
def write(tmp_path, encode, example, write_tfrecord):
    """Writes 48 images of 12 KB to four files of different lengths."""
    noise = np.random.default_rng(0).integers(0, 255, [64, 64, 3], np.uint8)

    def write_files(**bad):
        number = 0
        for file, size in enumerate(SIZES):
            records = []
            for _ in range(size):
                image = bad.get(f"image_{number}") or encode(noise + np.uint8(number))
                label = {"image__class__label": number}
                records.append(example(image__encoded=image, **label))
                number += 1
            write_tfrecord(tmp_path / f"train-{file}", records)
        return open_source(f"tfrecord:{tmp_path}/train-*", num_classes=48)

    return write_files


def bytes_read():
    """What this process has read so far, by whatever call."""
    with open("/proc/self/io") as lines:
        return int(dict(line.split(":") for line in lines)["rchar"])


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [2, 4])
def test_a_host_reads_its_part_of_the_bytes(write, hosts):
    source = write()
    whole = sum(map(os.path.getsize, source.files("train")))
    *_, share = shares((1,) * hosts, (1,) * hosts)
    options = {**OPTIONS, "batch_size": 12}
    dataset = Pipeline(source, "train", share=share, **options).dataset()
    for _ in range(2):  # with what it takes to find the records, and without
        before = bytes_read()
        assert sum(1 for _ in dataset) == 4
        assert 1.0 < (bytes_read() - before) * hosts / whole < 1.05


@pytest.mark.parametrize(
    "options",
    [
        slow({"recipe": "cifar", "start_record": 16, "start_epoch": 1}),
        slow({"recipe": "cifar"}),
        slow({"training": False}),
        slow({"shuffle_mb": 0, "start_record": 5}),
    ],
)
def test_hosts_have_the_rows_of_one(write, options):
    pipeline = Pipeline(write(), "train", **{**OPTIONS, **options})
    check(pipeline, (1, 5, 5), (1, 2))


@pytest.mark.slow
def test_several_epochs(write):
    pipeline = Pipeline(write(), "train", repeat=True, **OPTIONS)
    parts = [
        [*dataclasses.replace(pipeline, share=share).dataset().take(15)]
        for share in shares((1, 1), (1, 1))
    ]
    for (_, whole), (_, first), (_, second) in zip(
        pipeline.dataset().take(15), *parts, strict=True
    ):
        np.testing.assert_array_equal(whole, np.concatenate([first, second]))


def damage(path, number, place):
    """Changes a byte of a record: of its length, of its data, or cuts the file."""
    offset, length = [*framing.headers(path)][number]
    content = bytearray(open(path, "rb").read())
    if place == "end":
        content = content[: offset + length // 2]
    else:
        content[offset + {"length": 1, "data": 100}[place]] ^= 1
    open(path, "wb").write(content)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["length", "data", "end"])
def test_around_bad_records(write, place):
    source = write(image_4=b"no image")
    damage(source.files("train")[1], 20, place)
    found = quarantine.inspect(source, ["train"], 10)
    assert len(found.bad["train"]) == 2
    good = source.without(found.bad, found.splits)
    options = {"start_record": 3, "start_epoch": 1, "recipe": "cifar", **OPTIONS}
    pipeline = Pipeline(good, "train", **options)
    check(pipeline, (1, 1), (1, 1))


@pytest.mark.parametrize("place", ["data", "length", "end"])
def test_a_damaged_record_is_named_by_who_reads_it(write, place):
    source = write()
    path = source.files("train")[1]
    damage(path, 20, place)
    pipeline = Pipeline(source, "train", training=False, **OPTIONS)
    faults = []
    for share in shares((1, 1), (1, 1)):
        try:
            with checks.blame_records(source):
                batches(dataclasses.replace(pipeline, share=share))
        except ValueError as error:
            faults.append(str(error))
    assert faults
    for fault in faults:
        assert fault.startswith(f"{path}: record 20 ") and "corrupted" in fault


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, shares((1, 1), (1, 1))[0]])
def test_a_file_that_is_gone_is_named(write, share):
    source = write()
    # The size of a record, which is asked for first, tells nothing of it.
    os.remove(source.files("train")[2])
    dataset = Pipeline(source, "train", share=share, **OPTIONS).dataset()
    with pytest.raises(ValueError, match="train-2"), checks.blame_records(source):
        list(dataset)


@pytest.mark.slow
def test_records_are_found_once(write, monkeypatch):
    share = shares((1, 1), (1, 1))[0]
    dataset = Pipeline(write(), "train", share=share, **OPTIONS).dataset()
    first = [*dataset]
    monkeypatch.setattr(framing, "begins", None)
    assert len([*dataset]) == len(first)


def test_records_are_found_by_their_lengths(write):
    paths = write().files("train")
    index = record_index.RecordIndex(paths)
    offsets, end = index._find(1, 0)
    assert [*offsets] == [offset for offset, _ in framing.headers(paths[1])]
    assert end == os.path.getsize(paths[1])
    assert [*index._find(1, offsets[3])[0]] == [*offsets[3:]]
    os.remove(paths[2])
    with pytest.raises(ValueError, match=r"train-2: .*No such file"):
        index._find(2, 0)


def test_of_tfds(tmp_path, monkeypatch):
    # TFDS knows data by such names, each once in a process.
    class DigitsOfHosts(TowersDigits):
        def _generate_examples(self, digits, indices):
            return super()._generate_examples(digits, indices[::20])

    monkeypatch.setattr(record_index, "LEAST_BYTES", 0)
    builder = DigitsOfHosts(data_dir=tmp_path)
    source = TFDSSource(builder, "digits", 4, train_split="train[5:50]")
    source.prepare()
    assert not source.reads_whole("train")
    options = {"batch_size": 7, "image_shape": (8, 8, 1), "seed": 3}
    pipeline = Pipeline(source, "train", start_record=7, **options)
    check(pipeline, (1, 1, 1), (2, 1))


def test_why_all_is_read(write, tmp_path):
    (share, _) = shares((1, 1), (1, 1))
    pipeline = Pipeline(write(), "train", share=share, **OPTIONS)
    assert not pipeline.reads_whole
    of_service = dataclasses.replace(pipeline, data_service="grpc://localhost:1")
    assert "workers of a data service" in of_service.reads_whole
    with pytest.raises(ValueError, match="on several hosts, whose workers would give"):
        dataclasses.replace(of_service, deterministic=False)
    (tmp_path / "a.csv").write_text("x,y\n1,0\n2,1\n")
    rows = open_source(f"csv:{tmp_path}/a.csv", eval_fraction=0)
    said = Pipeline(rows, "train", batch_size=2, share=share).reads_whole
    assert said.startswith(f"Each host reads all of {rows.name}, as rows are read")


@pytest.mark.parametrize(
    ("paths", "record_bytes", "pauses", "said"),
    [
        (["gs://bucket/a"], 1e5, [0], "by the megabyte"),
        (None, 100, [0], "less than 8 KB"),
        # A pause of the machine is no slow file system.
        (None, 1e5, [0, 9, 0.001, 9], ""),
        (None, 1e5, [0, 0.03, 0.02, 9], "takes 20 ms"),
    ],
)
def test_what_tells_how_to_read(write, paths, record_bytes, pauses, said):
    times = iter(np.cumsum([*pauses, *[9] * 20]))
    index = record_index.RecordIndex(paths or write().files("train"))
    found = index.reads_whole(lambda: record_bytes, lambda: float(next(times)))
    assert said in found and bool(said) == bool(found)

"""A store changes nothing but where data are read, whatever becomes of it."""

import concurrent.futures
import dataclasses
import os
import pathlib
import random
import re
import subprocess
import sys
import threading

import fsspec
import numpy as np
import pytest
import tensorflow as tf

from tests import object_store, once, warm
from tests.input_pipeline.local_store import fill
from tests.input_pipeline.pipeline.test_rows import check as check_rows
from tests.limits import HANG_S
from towers.input_pipeline import (
    BadRecordError,
    LocalStore,
    blame_records,
    cached,
    make_dataset,
    open_source,
    scan_labels,
)
from towers.input_pipeline.local_store import notes, packs, places, store
from towers.input_pipeline.pipeline import Pipeline

FILL = "tests.input_pipeline.local_store.fill"
KINDS = "tfrecord", "folder", "masks", "csv", "parquet", "pictures"


@pytest.fixture(scope="module")
def specs(tmp_path_factory, encode, image_example, write_tfrecord):
    """Data sets of each kind that takes a store, by their names."""

    def make(path):
        rng = np.random.default_rng(0)

        def picture():
            # Of very different sizes in bytes.
            return encode(rng.integers(0, 256, [rng.integers(8, 40), 9, 3], np.uint8))

        for file in range(3):
            (path / "tfrecord").mkdir(exist_ok=True)
            pixels = [
                rng.integers(0, 256, [rng.integers(8, 40), 9, 3], np.uint8)
                for _ in range(40)
            ]
            records = [image_example(each, k % 5) for k, each in enumerate(pixels)]
            write_tfrecord(path / "tfrecord" / f"train-{file}", records)
            write_tfrecord(path / "tfrecord" / f"test-{file}", records[:7])
        for number in range(90):
            for folder in (f"folder/c{number % 3}", "masks/images", "masks/masks"):
                (path / folder).mkdir(parents=True, exist_ok=True)
            (path / f"folder/c{number % 3}/{number}.png").write_bytes(picture())
            (path / f"masks/images/{number}.png").write_bytes(picture())
            mask = rng.integers(0, 3, [8, 8], np.uint8)
            (path / f"masks/masks/{number}.png").write_bytes(encode(mask))
        rows = [f"{k},{k / 7:.3f},{k % 4}\r\n" for k in range(500)]
        (path / "rows.csv").write_text("a,b,label\n" + "".join(rows).rstrip())
        return path

    path = once.make(tmp_path_factory, "stored", make)
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = tmp_path_factory.mktemp("parquet")
    rng = np.random.default_rng(1)
    images = [
        encode(rng.integers(0, 256, [rng.integers(8, 40), 9, 3], np.uint8))
        for _ in range(60)
    ]
    tables = {
        "rows": {"a": rng.normal(size=300), "label": rng.integers(0, 3, 300)},
        "pictures": {"image": images, "label": rng.integers(0, 3, 60)},
    }
    for name, columns in tables.items():
        table = pyarrow.table(columns)
        parquet.write_table(table, folder / f"{name}.parquet", row_group_size=20)
    return {
        "tfrecord": f"tfrecord:{path}/tfrecord/*",
        "folder": f"folder:{path}/folder",
        "masks": f"folder:{path}/masks",
        "csv": f"csv:{path}/rows.csv",
        "parquet": f"parquet:{folder}/rows.parquet",
        "pictures": f"parquet:{folder}/pictures.parquet",
    }


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Blocks in which no record fits, or many, and packs of a few blocks."""
    monkeypatch.setattr(places, "_BLOCK_BYTES", 700)
    monkeypatch.setattr(store, "_PACK_BYTES", 5000)


@pytest.fixture
def local_store(tmp_path):
    made = []

    def make(limit_gb=1.0, name="store"):
        said = []
        made.append(LocalStore(tmp_path / name, limit_gb, said.append))
        made[-1].said = said
        return made[-1]

    yield make
    for each in made:
        each.close()


def batches(source, split="train", epochs=2, **options):
    shape = (8, 8, 3) if source.input_kind == "image" else None
    options = {"image_shape": shape, "shuffle_mb": 1, **options}
    data = make_dataset(source, split, 16, **options)
    return [[tf.nest.flatten(batch) for batch in data] for _ in range(epochs)]


def assert_same(found, expected):
    tf.nest.assert_same_structure(found, expected)
    for x, y in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture
def far():
    """Copies what a spec names to an address of fsspec, and returns the spec of it."""
    system = fsspec.filesystem("memory")

    def make(spec):
        kind, _, pattern = spec.partition(":")
        path = pathlib.Path(pattern.partition("*")[0])
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                system.pipe_file(f"/far{file}", file.read_bytes())
        return f"{kind}:memory://far{pattern}"

    yield make
    system.rm("/far", recursive=True)


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_are_read_as_files(specs, far, local_store, kind):
    expected = batches(open_source(specs[kind]))
    address = far(specs[kind])
    assert_same(batches(open_source(address)), expected)
    kept = local_store()
    assert_same(batches(open_source(address, local_store=kept)), expected)
    assert kept.remote_bytes > 0
    kept.close()
    again = local_store()
    assert_same(batches(open_source(address, local_store=again)), expected)
    assert again.remote_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("folder", 600),
        ("tfrecord", 10**5),
        *(
            (kind, block)
            for kind in KINDS
            for block in (600, 10**5)
            if (kind, block) not in (("folder", 600), ("tfrecord", 10**5))
        ),
    ],
)
def test_the_same_batches_in_the_same_order(
    specs, kind, block, local_store, monkeypatch
):
    monkeypatch.setattr(places, "_BLOCK_BYTES", block)
    plain = open_source(specs[kind])
    for fills in (True, False):
        opened = local_store()
        source = open_source(specs[kind], local_store=opened)
        assert source.splits == plain.splits
        for split in plain.splits:
            assert_same(batches(source, split), batches(plain, split))
            options = {"start_epoch": 3, "start_record": 20, "split": split}
            resumed = batches(source, **options), batches(plain, **options)
            assert_same(*resumed)
        opened.close()
        # The second one has read nothing from where the data lie.
        assert (opened.remote_blocks > 0) == fills
        assert not opened.said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "tfrecord", "csv", "parquet"])
def test_hosts_read_their_rows_through_one_store(specs, local_store, kind):
    opened = local_store()
    source = open_source(specs[kind], local_store=opened)
    shape = (8, 8, 3) if source.input_kind == "image" else None
    made = Pipeline(source, "train", batch_size=16, image_shape=shape, seed=1)
    # In two epochs: from where the data lie, and from the store.
    for start in (0, 1):
        check_rows(dataclasses.replace(made, start_epoch=start), (1, 2), (1, 1))
    assert not opened.said


def test_reads_each_block_once(specs, local_store):
    opened = local_store()
    batches(open_source(specs["folder"], local_store=opened), epochs=4)
    files = [*pathlib.Path(specs["folder"].partition(":")[2]).rglob("*.png")]
    train = open_source(specs["folder"]).files("train")
    assert (
        opened.remote_bytes
        == sum(map(os.path.getsize, train))
        < sum(map(os.path.getsize, files))
    )


def test_what_does_not_fit_is_read_evenly(tmp_path, local_store, monkeypatch):
    monkeypatch.setattr(places, "_BLOCK_BYTES", 2**20)
    for number in range(2000):
        folder = tmp_path / "data" / f"c{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(tf.io.encode_png(PIXEL).numpy() * 5)
    size = sum(path.stat().st_size for path in (tmp_path / "data").rglob("*.png"))
    # Tables of packs take their part.
    opened = local_store(limit_gb=(size / 2 + 2000 * 44) / 2**30)
    source = open_source(f"folder:{tmp_path}/data", eval_fraction=0, local_store=opened)
    assert "% of it, spread evenly" in source.notes[-1]
    data = make_dataset(source, "train", 100, image_shape=(1, 1, 3))
    for _ in data:
        pass
    opened.flush()
    stored = sum(path.stat().st_size for path in (tmp_path / "store").iterdir())
    assert 0.8 * size / 2 < stored <= size / 2 + 2000 * 44
    read = []
    monkeypatch.setattr(store, "read_range", record(store.read_range, read))
    order = {path: place for place, path in enumerate(paths_in_order(source, epoch=1))}
    for _ in data:
        pass
    assert 600 < len(read) < 1400
    tenths = np.bincount([order[path] * 10 // 2000 for path in read], minlength=10)
    assert tenths.min() > 0.5 * tenths.mean() and tenths.max() < 1.5 * tenths.mean()
    assert not opened.said


PIXEL = np.zeros([1, 1, 3], np.uint8)


def paths_in_order(source, epoch):
    from towers.input_pipeline.images import draws

    seeds = tf.constant(draws.epoch_seeds(0, epoch)[:2])
    numbers = [n for n, _ in source.batches("train", 100, seeds=seeds)]
    files = source.files("train")
    return [files[number] for number in np.concatenate(numbers)]


def test_a_later_file_holds_no_earlier_one_up(specs, local_store, monkeypatch):
    """Nor do files of the next epochs, which the pipeline begins at once."""
    source = open_source(specs["folder"], local_store=local_store())
    first, in_vain = paths_in_order(source, 0)[:16], []
    one_is_there, read = threading.Event(), store.read_range

    def waits(path, *rest):
        if path not in first and not one_is_there.wait(HANG_S):
            in_vain.append(path)
        return read(path, *rest)

    monkeypatch.setattr(store, "read_range", waits)
    data = make_dataset(source, "train", 16, image_shape=(8, 8, 3), repeat=True)
    ready = iter(data)
    next(ready)
    one_is_there.set()
    assert not in_vain


def record(function, calls):
    def recorded(path, *rest):
        calls.append(path)
        return function(path, *rest)

    return recorded


@pytest.mark.slow
def test_a_damaged_byte_is_fetched_again(specs, tmp_path, local_store):
    plain = batches(open_source(specs["tfrecord"]))
    opened = local_store()
    assert_same(batches(open_source(specs["tfrecord"], local_store=opened)), plain)
    opened.close()
    for path in (tmp_path / "store").iterdir():
        data = bytearray(path.read_bytes())
        data[10] ^= 255
        path.write_bytes(data)
    damaged = local_store()
    assert_same(batches(open_source(specs["tfrecord"], local_store=damaged)), plain)
    assert damaged.remote_blocks == len(damaged.said) > 0
    assert all("is damaged (its checksum differs)" in line for line in damaged.said)
    damaged.close()
    # Now it is whole again.
    again = local_store()
    assert_same(batches(open_source(specs["tfrecord"], local_store=again)), plain)
    assert again.remote_blocks == 0 and not again.said


def test_changed_files_are_read_anew(tmp_path, local_store, encode, grey):
    def write(values):
        for number, value in enumerate(values):
            path = tmp_path / "data" / f"c{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(grey(value)))
            os.utime(path, (value, value))

    def read(opened):
        spec = f"folder:{tmp_path}/data"
        source = open_source(spec, eval_fraction=0, local_store=opened)
        images = [image for ((image, _),) in batches(source, training=False, epochs=1)]
        return sorted(np.concatenate(images)[:, 0, 0, 0].tolist())

    for values in ([1, 2, 3, 4], [1, 2, 3, 9]):
        write(values)
        opened = local_store()
        assert read(opened) == values
        opened.close()
    assert opened.remote_blocks == 1


def test_a_full_disk_is_said_once_and_nothing_else(specs, local_store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packs.os, "rename", full)
    opened = local_store()
    source = open_source(specs["folder"], local_store=opened)
    assert_same(batches(source), batches(open_source(specs["folder"])))
    opened.flush()
    (line,) = opened.said
    assert line == (
        f"The local store {opened.folder} takes nothing more (No space left on "
        "device); what is not there is read from where it lies."
    )
    assert not os.listdir(opened.folder)


@pytest.mark.slow
@pytest.mark.parametrize("others_fill_it", [True, False])
def test_says_once_at_the_end_what_has_found_no_room(
    specs, local_store, monkeypatch, others_fill_it
):
    folder = pathlib.Path(specs["folder"].partition(":")[2])
    size = sum(map(os.path.getsize, folder.rglob("*.png")))
    opened = local_store(limit_gb=(1 if others_fill_it else 0.5) * 1.2 * size / 2**30)
    source = open_source(specs["folder"], local_store=opened)
    if others_fill_it:
        # After this run has begun, so all of it was expected to fit.
        assert "keeps all of it" in source.notes[-1]
        with open(os.path.join(opened.folder, "theirs"), "wb") as file:
            file.write(bytes(size // 2))
    assert_same(batches(source), batches(open_source(specs["folder"])))
    opened.flush()
    assert not opened.said
    opened.close()
    opened.close()
    (line,) = opened.said
    assert line.startswith(f"The local store {opened.folder} has no room for ")
    left = float(re.search(r" \((\d+)%\), which are read ", line)[1])
    assert 20 < left < 80
    assert "; --local_store=0.1:FOLDER (in Python, limit_gb) would hold all." in line
    # So it is: nothing is to be said then.
    larger = local_store(limit_gb=0.1)
    batches(open_source(specs["folder"], local_store=larger), epochs=1)
    larger.close()
    assert not larger.said


def test_a_store_of_which_nothing_was_read_says_nothing_at_the_end(specs, local_store):
    opened = local_store(limit_gb=1e-6)
    open_source(specs["folder"], local_store=opened)
    opened.close()
    assert not opened.said


def test_a_disk_that_is_too_small_is_no_matter_of_the_limit():
    taken = packs.Taken(ours=2**30, others=2**30, disk=3 * 2**30)
    line = notes.of_limit("/store", taken, 5 * 2**30, 4 * 2**30)
    assert line == (
        "The local store /store has no room for 4,096.0 MB of 5,120.0 MB (80%), which "
        "are read from where they lie in each epoch; a disk with 6.2 GB for it would "
        "hold all."
    )


@pytest.mark.slow
def test_a_folder_that_vanishes_is_no_error(specs, local_store):
    opened = local_store()
    source = open_source(specs["folder"], local_store=opened)
    plain = batches(open_source(specs["folder"]))
    assert_same(batches(source), plain)
    opened.flush()
    for name in os.listdir(opened.folder):
        os.unlink(os.path.join(opened.folder, name))
    os.rmdir(opened.folder)
    assert_same(batches(source), plain)


@pytest.mark.slow
def test_a_bad_record_is_named(tmp_path, local_store, image_example, grey):
    path = tmp_path / "train-0"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(30):
            writer.write(image_example(grey(number), number % 2))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    messages = []
    for options in ({}, {"local_store": local_store()}):
        source = open_source(f"tfrecord:{path}", num_classes=2, **options)
        with pytest.raises(BadRecordError) as error, blame_records(source):
            batches(source)
        messages.append(str(error.value))
        with pytest.raises(BadRecordError) as error:
            scan_labels(source, "train")
        messages.append(str(error.value))
    assert len({*messages}) == 1 and str(path) in messages[0]


@pytest.mark.parametrize("cut", [3, 11, 20])
def test_a_file_that_is_cut_off_is_told_as_without(
    tmp_path, local_store, cut, image_example, grey
):
    path = tmp_path / "train-0"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(30):
            writer.write(image_example(grey(number), number % 2))
    with open(path, "ab") as file:
        file.write(path.read_bytes()[:cut])
    messages = []
    for options in ({}, {"local_store": local_store()}):
        source = open_source(f"tfrecord:{path}", num_classes=2, **options)
        with pytest.raises(BadRecordError) as error:
            scan_labels(source, "train")
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_a_file_that_is_gone_is_named(specs, tmp_path, local_store, encode, grey):
    for number in range(4):
        path = tmp_path / "data" / f"c{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(grey(number)))
    spec = f"folder:{tmp_path}/data"
    source = open_source(spec, eval_fraction=0, local_store=local_store())
    path.unlink()
    source._stored.store._known.clear()
    with pytest.raises(BadRecordError, match=str(path)), blame_records(source):
        batches(source)


@pytest.mark.slow
def test_keeps_in_memory_what_it_reads_through_a_store(specs, local_store):
    opened = local_store()
    source = cached(open_source(specs["folder"], local_store=opened), "memory")
    plain = cached(open_source(specs["folder"]), "memory")
    assert_same(batches(source), batches(plain))
    assert opened.remote_blocks


@pytest.mark.parametrize("kind", KINDS)
def test_says_of_what_use_it_is(specs, local_store, kind):
    opened = local_store()
    notes = " ".join(open_source(specs[kind], local_store=opened).notes)
    assert f"{opened.folder} keeps all of it; its files lie on a local disk" in notes


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, 2**26), ("4096", 4096), ("0", 700), ("4M", 2**26)],
)
def test_reads_as_much_at_a_time_as_tensorflow(monkeypatch, asked, expected):
    monkeypatch.delenv("GCS_READAHEAD_BUFFER_SIZE_BYTES", raising=False)
    if asked is not None:
        monkeypatch.setenv("GCS_READAHEAD_BUFFER_SIZE_BYTES", asked)
    assert places.block_bytes("gs://bucket/file") == expected
    assert places.block_bytes("/data/file") == 700


def test_refuses_what_it_cannot_store(local_store):
    opened = local_store()
    with pytest.raises(ValueError, match="received local_store for 'digits'"):
        open_source("digits", local_store=opened)
    for limit_gb in (0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"limit_gb is {limit_gb}: expected a num"):
            LocalStore(opened.folder, limit_gb)
    with pytest.raises(ValueError, match="cannot be used"):
        LocalStore(f"{__file__}/store")


def filled(spec, folder, delay_ms=0, epochs=1, limit_gb=1, reads=()):
    """Runs ``fill``; what it printed, or nothing if it was killed."""
    flags = spec, folder, delay_ms, epochs, limit_gb, *reads
    sizes = {
        "towers.input_pipeline.local_store.places._BLOCK_BYTES": 150,
        "towers.input_pipeline.local_store.store._PACK_BYTES": 1500,
    }
    done = warm.run(FILL, *flags, changed=sizes)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_two_processes_fill_one_store(specs, tmp_path):
    spec, folder = specs["folder"], tmp_path / "store"
    expected = fill.digest(open_source(spec), epochs=2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(filled, spec, folder, delay_ms=20, epochs=2)
            for _ in range(2)
        ]
        for run in runs:
            code, said = run.result()
            assert code == 0 and said[0] == expected
    assert filled(spec, folder, epochs=2) == (0, [expected, "remote 0 0"])


def killed_and_filled(spec, folder, kills):
    """Kills processes at random while they fill a store; a full one begins anew.

    Returns:
        How many entries were left after each kill, how many there are in all, and how
        many runs ended.
    """
    expected, rng = fill.digest(open_source(spec), epochs=1), random.Random(3)
    assert filled(spec, folder / "whole")[1][0] == expected
    total, left, number = entries_in(folder / "whole"), [], 0
    found = ended = 0
    while len(left) < kills:
        here = folder / str(number)
        # In one of three runs, fewer reads are left, and it ends.
        reads = [rng.randrange(3 * (total - found % total) // 2 + 2)]
        code, said = filled(spec, here, delay_ms=20, reads=reads)
        before, found = found % total, entries_in(here)
        # Nothing that was there is lost.
        assert found >= before
        if code == 0:
            assert said[0] == expected
            ended += 1
        else:
            left.append(found)
        number += found == total
    code, (same, remote) = filled(spec, here)
    assert (code, same) == (0, expected)
    assert int(remote.split()[1]) == total - found
    assert filled(spec, here)[1] == [expected, "remote 0 0"]
    return left, total, ended


def entries_in(folder):
    """Counts entries of packs, whose bytes are checked, too."""
    found = packs.Packs(str(folder), 2**40, pytest.fail)
    keys = [row for part in found._table._parts for row in part]
    for row in keys:
        key = packs.Key(int(row["key"]), int(row["check"]))
        assert found.read(key, int(row["stamp"])) is not None
    return len(keys)


@pytest.mark.slow
def test_kills_lose_nothing(specs, tmp_path):
    killed_and_filled(specs["folder"], tmp_path, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "tfrecord"])
def test_twenty_kills_lose_nothing(specs, tmp_path, kind):
    left, total, ended = killed_and_filled(specs[kind], tmp_path, 20)
    print(f"{kind}: of {total} entries, each kill left {left} in whole packs")
    assert ended and len({*left}) > 2


WAITS_AT_EXIT = """
import sys, time
from towers.input_pipeline import LocalStore, make_dataset, open_source
from towers.input_pipeline.local_store import store
read_range = store.read_range
store.read_range = lambda *where: time.sleep(0.3) or read_range(*where)
opened = LocalStore(sys.argv[1])
source = open_source(sys.argv[2], local_store=opened)
ready = iter(make_dataset(source, "train", 8, image_shape=(8, 8, 3), repeat=True))
next(ready)
"""


@pytest.mark.slow
def test_python_ends_while_files_are_awaited(specs, tmp_path):
    """As after an error, whose traceback holds the iterator."""
    subprocess.run(
        [sys.executable, "-c", WAITS_AT_EXIT, str(tmp_path / "store"), specs["folder"]],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        timeout=HANG_S,
        check=True,
    )


REMOTE = """
import sys
from tests.input_pipeline.local_store import fill
from towers.input_pipeline import LocalStore, open_source
from towers.input_pipeline.local_store import places
for spec in sys.argv[2:]:
    plain = fill.digest(open_source(spec), 2)
    for _ in range(2):
        store = LocalStore(sys.argv[1], 1, print)
        source = open_source(spec, local_store=store)
        assert "local disk" not in source.notes[-1]
        print(fill.digest(source, 2) == plain, store.remote_blocks > 0)
        store.close()
"""


@pytest.mark.skipif(not object_store.is_possible(), reason="no openssl")
@pytest.mark.slow
def test_reads_an_object_store(specs, tmp_path):
    """The real code of TensorFlow for `gs://`, and a server on this machine."""
    root = pathlib.Path(specs["folder"].partition(":")[2]).parent
    urls = [f"{kind}:gs://{root.name}/{kind}" for kind in ("tfrecord", "folder")]
    with object_store.serve(root.parent, tmp_path / "keys", latency_ms=5) as server:
        environ = {**server.environ, "CUDA_VISIBLE_DEVICES": "-1"}
        places.read_small_blocks(environ)
        done = subprocess.run(
            [sys.executable, "-c", REMOTE, str(tmp_path / "store"), *urls],
            cwd=object_store.ROOT,
            env=os.environ | environ,
            stdout=subprocess.PIPE,
            timeout=HANG_S,
            check=True,
        )
    assert done.stdout.split() == [b"True", b"True", b"True", b"False"] * 2

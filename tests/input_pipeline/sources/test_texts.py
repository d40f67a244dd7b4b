import ast

import numpy as np
import pytest
from tensorflow.data.experimental import service

from tests.input_pipeline.damages import DAMAGES
from tests.variants import slow
from towers import input_pipeline
from towers.input_pipeline import text
from towers.input_pipeline.convert import conversion
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.input_pipeline.sources.texts import documents, tokens

END = 257
_WORDS = text.WordTokenizer(["one", "two", "three"])


def _write(folder, *contents, name="{:02}.txt"):
    for number, content in enumerate(contents):
        content = content if isinstance(content, bytes) else content.encode()
        (folder / name.format(number)).write_bytes(content)


def _open(folder, length=4, **options):
    options = {"eval_fraction": 0, **options}
    source = input_pipeline.open_source(
        f"text:{folder}/*.txt", sequence_length=length, **options
    )
    source.prepare()
    return source


def _stream(*contents):
    return [i for one in contents for i in [*(b + 1 for b in one.encode()), END]]


def _rows(source, split="train", batch_size=3, **options):
    """All rows, with each row's last target at its end."""
    data = input_pipeline.make_dataset(source, split, batch_size, **options)
    batches = [*data.as_numpy_iterator()]
    for x, y in batches:
        assert (x.dtype, y.dtype) == (np.int32, np.int64)
        np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    return [[*x, y[-1]] for xs, ys in batches for x, y in zip(xs, ys, strict=True)]


def test_rows_are_the_documents_one_behind_the_other(tmp_path):
    contents = ["def f():\n", "", "Straße", "x" * 11]
    _write(tmp_path, *contents)
    source = _open(tmp_path)
    stream = _stream("def f():\n", "Straße", "x" * 11)
    wanted = [stream[k : k + 5] for k in range(0, len(stream) - 4, 4)]
    assert _rows(source, training=False) == wanted
    assert source.splits == {"train": len(wanted)}
    assert (source.target.kind, source.target.size) == ("tokens", 258)
    assert (source.input_kind, source.image_shape) == ("tokens", (4,))
    assert source.bytes_per_token == {"train": pytest.approx(27 / 30)}
    assert "1 file left out as empty, such as" in source.notes[-1]
    assert "30 tokens" in source.note


@pytest.mark.parametrize("on_disk", [False, True])
def test_order_is_that_of_other_sources(tmp_path, on_disk):
    contents = [f"{k} bottles of beer" for k in range(12)]
    _write(tmp_path, *contents)
    options = {"cache_dir": str(tmp_path / "cache")} if on_disk else {}
    source = _open(tmp_path, **options)
    in_order = _rows(source, training=False)
    if on_disk:
        stream, numbers = _stream(*contents), np.arange(len(in_order))
        wanted = [stream[4 * k : 4 * k + 5] for k in numbers]
        assert source._read(numbers)[0].tolist() == in_order == wanted
    first, second = (_rows(source, seed=3, start_epoch=k) for k in (0, 1))
    assert first != in_order and first != second
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert _rows(source, seed=3) == first
    # A run that goes on in the middle of an epoch.
    assert _rows(source, seed=3, start_record=7) == first[7:]


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("tokenizer", ["bytes", _WORDS], ids=["bytes", "words"])
def test_tokens_on_the_disk_are_made_once(tmp_path, monkeypatch, tokenizer):
    _write(tmp_path, *[f"one two three four {k}\n" * 9 for k in range(20)])
    options = {"tokenizer": tokenizer, "eval_fraction": 0.2}
    in_memory = _open(tmp_path, **options)
    folder = f"{tmp_path}/new/folder"
    kept = _open(tmp_path, **options, cache_dir=folder)
    assert kept.note.endswith(f"kept in {folder}") and not kept.in_graph
    monkeypatch.setattr(type(kept.tokenizer), "encode", None)
    # The length of the rows does not change the tokens.
    others = [_open(tmp_path, k, **options, cache_dir=folder) for k in (4, 9)]
    assert others[1].splits != kept.splits
    for split in ("train", "test"):
        wanted = _rows(in_memory, split, seed=5)
        assert _rows(kept, split, seed=5) == wanted == _rows(others[0], split, seed=5)
    _write(tmp_path, "other text")
    with pytest.raises(TypeError):
        _open(tmp_path, **options, cache_dir=folder)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("end", [".ids", ".json"])
def test_damaged_tokens_are_made_anew(tmp_path, capsys, end):
    _write(tmp_path, *[f"one two three {k}\n" * 9 for k in range(20)])
    folder = tmp_path / "cache"
    wanted = _rows(_open(tmp_path, cache_dir=folder))
    (path,) = folder.glob(f"*{end}")
    for damage in DAMAGES:
        path.write_bytes(damage(path.read_bytes()))
        capsys.readouterr()
        assert _rows(_open(tmp_path, cache_dir=folder)) == wanted
        said = capsys.readouterr().err
        assert f"{path.name} has another checksum: the cache is made anew." in said
        assert _rows(_open(tmp_path, cache_dir=folder)) == wanted
        assert not capsys.readouterr().err


def test_a_tokenizer_makes_the_tokens(tmp_path):
    _write(tmp_path, "one two\nfour", "three three")
    source = _open(tmp_path, 2, tokenizer=_WORDS)
    assert _rows(source, training=False) == [[3, 4, 1], [1, 2, 5], [5, 5, 2]]
    assert source.tokenizer.decode([3, 4, 1]) == "one two <unk>"
    assert source.bytes_per_token["train"] == 23 / 7


def test_long_documents_are_tokenised_in_parts(tmp_path, monkeypatch):
    contents = ["one two\nthree\n" * 50, "one", "two three " * 20]
    _write(tmp_path, *contents)
    wanted = _rows(_open(tmp_path, tokenizer=_WORDS), training=False)
    bytes_wanted = _rows(_open(tmp_path), training=False)
    monkeypatch.setattr(tokens, "_CHUNK", 7)
    monkeypatch.setattr(tokens, "_AT_ONCE", 50)
    assert _rows(_open(tmp_path, tokenizer=_WORDS), training=False) == wanted
    assert _rows(_open(tmp_path), training=False) == bytes_wanted
    cut = [*documents.chunks(b"ab\ncdefg\nh", 2, True)]
    assert cut == [b"ab\n", b"cdefg\n", b"h"]


def test_some_of_many_files_are_held_out(tmp_path):
    contents = [f"{k:02} " * 5 for k in range(20)]
    _write(tmp_path, *contents)
    source = _open(tmp_path, 5, eval_fraction=None)
    held = [contents[9], contents[19]]
    kept = [one for one in contents if one not in held]
    decode = source.tokenizer.decode
    found = "".join(decode(row[:-1]) for row in _rows(source, training=False))
    assert found == "".join(kept)[: len(found)]
    found = "".join(decode(row[:-1]) for row in _rows(source, "test"))
    assert found == "".join(held)[: len(found)]
    assert any("10% of the files, 2 in all, are held out" in n for n in source.notes)


def test_the_end_of_each_of_few_files_is_held_out(tmp_path):
    _write(tmp_path, "line\n" * 20, "ü" * 30)
    source = _open(tmp_path, 2, eval_fraction=0.25)
    decode = source.tokenizer.decode
    train, test = (
        "".join(decode(row[:-1]) for row in _rows(source, split, training=False))
        for split in ("train", "test")
    )
    # Behind a line; where there is none, behind a character.
    assert "\ufffd" not in train + test
    assert train == ("line\n" * 15 + "ü" * 22)[: len(train)]
    assert test == ("line\n" * 5 + "ü" * 8)[: len(test)]
    assert source.files("train") == source.files("test")


def test_files_are_held_out_of_those_that_are_good(tmp_path):
    _write(tmp_path, *["one two three"] * 9, b"\xff", "three " * 9)
    options = {"eval_fraction": None, "tokenizer": _WORDS, "skip_bad": True}
    source = _open(tmp_path, 2, **options)
    assert source.files("test") == [f"{tmp_path}/10.txt"]
    # Bad ones are none of the ten of which one can be held out.
    (tmp_path / "08.txt").write_bytes(b"\xff")
    source = _open(tmp_path, 2, **options)
    assert source.files("test") == source.files("train")
    assert "text, at the end of each file" in source.notes[0]


def test_files_are_held_out_by_their_names(tmp_path):
    _write(tmp_path, "train " * 9, name="a.txt")
    _write(tmp_path, "valid " * 9, name="valid.txt")
    source = _open(tmp_path, eval_fraction=None)
    assert source.tokenizer.decode(_rows(source, "test")[0]) == "valid"
    with pytest.raises(ValueError, match="are held out by their names, such as"):
        _open(tmp_path, eval_fraction=0.1)


def test_bad_files_are_said(tmp_path):
    _write(tmp_path, "one two three one two", b"one \xff two", "three one two")
    with pytest.raises(
        BadRecordError,
        match=r"01\.txt: is not UTF-8 at byte 4, expected text; --tokenizer=bytes",
    ):
        _open(tmp_path, 2, tokenizer=_WORDS)
    # Bytes are no text.
    assert _open(tmp_path, 2).splits == {"train": 22}


def test_bad_files_are_left_out_and_listed(tmp_path):
    _write(tmp_path, "one two three one two", b"one \xff two", "three one two")
    source = _open(tmp_path, 2, tokenizer=_WORDS, skip_bad=True)
    found = quarantine.inspect(source, ["train"], most=1)
    (bad,) = found.bad["train"]
    assert (bad.path, len(found)) == (f"{tmp_path}/01.txt", 1)
    assert found.splits == source.splits == {"train": 4}
    without = source.without(found.bad, found.splits)
    assert _rows(without, seed=1) == _rows(source, seed=1)
    assert sorted(_rows(without)) == [[3, 4, 5], [4, 2, 5], [5, 3, 4], [5, 3, 4]]
    with pytest.raises(BadRecordError, match="more bad records than the 0"):
        quarantine.inspect(source, ["train"], most=0)
    path = f"{tmp_path}/bad_records.json"
    quarantine.write([found], path)
    assert quarantine.read(path) == [found]


def test_the_rows_of_a_file_are_those_that_begin_there(tmp_path):
    _write(tmp_path, "abcdef", "x", "ghijkl")
    source = _open(tmp_path, 3)
    found = {
        path[-6:]: [int(r.raw) for r in source.walk(path)]
        for path in source.files("train")
    }
    assert found == {"00.txt": [0, 1, 2], "01.txt": [], "02.txt": [3, 4]}


def test_too_little_text_is_said(tmp_path):
    _write(tmp_path, "abc")
    with pytest.raises(
        ValueError,
        match="has 4 tokens in its split train: expected more than a row, so give "
        "more text, or a smaller --sequence_length than 4",
    ):
        _open(tmp_path, 4)
    assert _open(tmp_path, 3).splits == {"train": 1}
    with pytest.raises(ValueError, match="sequence_length is 0, expected at least 1"):
        _open(tmp_path, 0)
    with pytest.raises(ValueError, match="no file matches"):
        input_pipeline.open_source("text:missing/*.txt")


def test_text_is_not_converted(tmp_path):
    _write(tmp_path, "abcdefgh")
    with pytest.raises(ValueError, match="is text, which training reads as fast"):
        conversion.convert(_open(tmp_path), str(tmp_path / "converted"))


@pytest.mark.slow
def test_workers_of_a_service_make_the_same_batches(tmp_path):
    _write(tmp_path, *[f"{k} bottles of beer" for k in range(12)])
    source = _open(tmp_path)
    wanted = _rows(source, seed=3)
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address))
    assert _rows(source, seed=3, data_service=dispatcher.target) == wanted
    del worker


def test_tokens_that_do_not_fit_into_memory_are_said(tmp_path, monkeypatch):
    _write(tmp_path, "abc" * 9)

    class Free:
        available = 53

    monkeypatch.setattr(tokens.psutil, "virtual_memory", Free)
    with pytest.raises(
        ValueError, match=r"by --cache=disk:FOLDER \(in Python, cache_dir\)"
    ):
        _open(tmp_path)
    assert _open(tmp_path, cache_dir=str(tmp_path / "cache")).splits == {"train": 6}


def test_texts_that_are_not_there(tmp_path, monkeypatch):
    missing = documents.Documents({})
    for path, said in (
        (f"{tmp_path}/none", "No such f"),
        ("ram://none", "NotFoundE|Could not open"),
    ):
        with pytest.raises(BadRecordError, match=f"none: .*({said})"):
            missing.read(path, "train")
    monkeypatch.setattr(documents.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"library, but {tmp_path} has none: expected"):
        input_pipeline.open_source("text:python")
    _write(tmp_path, "some text")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be written into .*/file \(.*\): exp"):
        _open(tmp_path, cache_dir=f"{tmp_path}/file")


def test_python_is_text_of_every_machine():
    source = input_pipeline.open_source("text:python")
    paths = source.files("train") + source.files("test")
    assert len(paths) > 100 and "site-packages" not in "".join(paths)
    names = {path.rpartition("/")[2] for path in paths}
    assert {"abc.py", "random.py"} <= names
    (decoder,) = (path for path in paths if path.endswith("/json/decoder.py"))
    ast.parse(source._documents.read(decoder, "train"))
    assert "standard library of Python" in source.notes[0]


@pytest.mark.slow
def test_python_is_read():
    source = input_pipeline.open_source("text:python", sequence_length=256)
    source.prepare()
    x, _ = next(iter(input_pipeline.make_dataset(source, "train", 512, seed=1)))
    assert "return" in source.tokenizer.decode(x)
    assert 0.05 < source.splits["test"] / source.splits["train"] < 0.2


def _whole(source, split="train", **options):
    """Tokens and the token behind them, of rows that are checked to be padded."""
    found = []
    for batch in input_pipeline.make_dataset(source, split, 2, **options):
        for x, y, weights in zip(*(part.numpy() for part in batch), strict=True):
            count = int(weights.sum())
            assert (weights[:count] == 1).all() and not (x[count:] + y[count:]).any()
            assert x[:count].all() and (y[: count - 1] == x[1:count]).all()
            found.append([*x[:count].tolist(), int(y[count - 1])])
    return found


@pytest.mark.parametrize("on_disk", [False, slow(True)])
def test_documents_in_rows_of_their_own(tmp_path, on_disk):
    _write(tmp_path, "one two three four five", "three", "", "two four")
    options = {"cache_dir": str(tmp_path / "cache")} if on_disk else {}
    source = _open(tmp_path, 3, tokenizer=_WORDS, packing=False, **options)
    # 1 is any other word, 2 the end; the token behind a row begins the next one.
    wanted = [[3, 4, 5, 1], [1, 1, 2], [5, 2], [4, 1, 2]]
    assert _whole(source, training=False) == wanted
    assert (source.target.kind, source.splits) == ("tokens", {"train": 4})
    assert source.mean_length("train") == 2.0  # of 3, 2, 1 and 2
    source.prepare()  # once is enough
    grouped = _whole(source, seed=1, group_by_length=True)
    assert sorted(grouped) == sorted(wanted)
    assert _whole(source, seed=1, group_by_length=True, start_record=2) == grouped[2:]
    assert any("1 file left out as empty" in note for note in source.notes)
    assert source.in_graph and source.note.endswith("kept in memory")


def test_documents_that_are_held_out_or_bad(tmp_path):
    _write(tmp_path, *[f"{k} " * (k + 1) for k in range(10)])
    source = _open(tmp_path, 8, packing=False, eval_fraction=None)
    decode = source.tokenizer.decode
    assert decode(_whole(source, "test", training=False)[0][:-1]) == "9 9 9 9 "
    (tmp_path / "03.txt").write_bytes(b"\xff")
    options = {"tokenizer": _WORDS, "packing": False, "skip_bad": True}
    source = _open(tmp_path, 8, **options)
    found = quarantine.inspect(source, ["train"], 9).bad["train"]
    assert [bad.path for bad in found] == [f"{tmp_path}/03.txt"]
    (record,) = source.walk(f"{tmp_path}/02.txt")
    assert source.parse_one(record.raw)[0].numpy().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]

"""What bears a name of a run's files and is none: no reader waits or gives a traceback.

Each reader takes such a file for one that is not there, or ends in one sentence that
names it.
"""

import contextlib
import os
import types

import pytest

from towers.elastic import requests
from towers.input_pipeline import text
from towers.input_pipeline.convert import folder as conversion
from towers.input_pipeline.local_store import packs
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.examples import tfrecord
from towers.lifecycle.checkpoints.manager import SaveError
from towers.model.update import remembered
from towers.predict import arguments, model
from towers.queue.entry import Entry
from towers.queue.record import Record
from towers.report import read as report
from towers.train.outputs import files, links, model_files, summary
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts.data import scale

JSON = {"folder", "FIFO", "not UTF-8", "deep", "another type"}
TEXT = {"folder", "FIFO"}
KINDS = {
    "folder": os.mkdir,
    "FIFO": os.mkfifo,
    "not UTF-8": lambda path: _write(path, b'{"a": "\xfc"}'),
    "deep": lambda path: _write(path, b'{"a":' * 900 + b"1" + b"}" * 900),
    "another type": lambda path: _write(path, b"3"),
}


def _write(path, content):
    with open(path, "wb") as file:
        file.write(content)


def _run(folder):
    """As much of a job, or of a run in a queue, as readers of files ask for."""
    return types.SimpleNamespace(model_dir=str(folder))


def _manifest(folder):
    source = types.SimpleNamespace(splits=(), files=None, name="digits")
    conversion.prepare(source, str(folder), {"source": "digits"}, overwrite=False)


def _record(folder):
    queue = Record(str(folder))
    return queue.is_finished(_run(folder))


# By the name of a file: what reads it, of which kinds it is none, and what that gives
# where it is taken for one that is not there.
SENTENCE = object()
READERS = {
    "a report's summary.json": (report._read_summary, JSON, SENTENCE),
    "a report's flags.txt": (report._read_flags, TEXT, ""),
    "a report's train/events.out.tfevents.1": (
        lambda folder: report._read_events(f"{folder}/train").scalars,
        TEXT,
        {},
    ),
    "a new run's summary.json": (
        lambda folder: summary.measured_before(folder)["verdict"],
        JSON,
        None,
    ),
    "a new run's flags.txt": (
        lambda folder: files.read(_run(folder), "flags.txt"),
        TEXT,
        None,
    ),
    "a new run's log.csv": (
        lambda folder: files.log_columns(f"{folder}/log.csv"),
        JSON - {"deep", "another type"},
        SENTENCE,
    ),
    "a new run's bad_records.json": (
        lambda folder: quarantine.read(f"{folder}/bad_records.json"),
        JSON,
        [],
    ),
    "a new run's preprocessing.json": (scale._read, JSON, SENTENCE),
    "a new run's variable_update.json": (
        lambda folder: remembered.read(f"{folder}/variable_update.json"),
        JSON,
        {},
    ),
    "a running run's resize.json": (
        lambda folder: requests.Inbox(folder).take(),
        JSON,
        None,
    ),
    "a queue's queue.json": (_record, JSON, False),
    "a queue's summary.json": (lambda folder: Entry(_run(folder)).summary(), JSON, {}),
    "prediction's preprocessing.json": (Preprocessing.load, JSON, SENTENCE),
    "prediction's arguments and preprocessing.json": (
        arguments.preprocessing_of,
        JSON,
        {},
    ),
    "prediction's summary.json": (
        lambda folder: model._has_ended(folder, "ckpt-1-0"),
        JSON,
        False,
    ),
    "prediction's classes.json": (model_files.read_classes, JSON, SENTENCE),
    "prediction's model.keras": (
        lambda folder: model.read(folder, "last"),
        JSON,
        SENTENCE,
    ),
    "a tokenizer's tokenizer.json": (text.load, JSON, SENTENCE),
    "a conversion's .convert.json": (_manifest, JSON, SENTENCE),
    "a data set's dataset_info.json": (
        lambda folder: tfrecord._read_info([f"{folder}/train-00000-of-00001.tfrecord"]),
        JSON,
        SENTENCE,
    ),
    "a store's 1.pack": (
        lambda folder: packs._read_end(f"{folder}/1.pack"),
        TEXT,
        SENTENCE,
    ),
}
CASES = [
    pytest.param(name, kind, id=f"{name}, {kind}")
    for name, (_, kinds, _) in READERS.items()
    for kind in sorted(kinds)
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_what_is_none_of_ours(tmp_path, name, kind):
    path = tmp_path / name.split()[-1]
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    function, _, absent = READERS[name]
    with contextlib.ExitStack() as expected:
        if absent is SENTENCE:
            raised = expected.enter_context(pytest.raises((ValueError, SaveError)))
        assert function(str(tmp_path)) == absent
    if absent is SENTENCE:
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", [*links.FILES, "lock", "tokenizer/tokenizer.txt"])
def test_a_run_writes_to_no_file_elsewhere(tmp_path, name):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveError, match=rf"is a link to {tmp_path}/elsewhere, which"):
        files.alone(str(folder)).__enter__()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SaveError, match="is no regular file, and the run writes one"):
        files.alone(str(folder)).__enter__()
    assert [*tmp_path.iterdir()] == [folder]


def test_a_link_to_a_folder_is_said_once(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path)
    # As a run does: while it is put together, and while it trains.
    with files.alone(str(tmp_path / "run")), files.alone(str(tmp_path / "run")):
        pass
    assert capsys.readouterr().err.count(f"the run writes to {tmp_path}.") == 1


def test_a_tokenizer_names_no_file_elsewhere(tmp_path):
    (tmp_path / "words.txt").write_text("a\nb\n")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("../words.txt", str(tmp_path / "words.txt"), ".."):
        (folder / "tokenizer.json").write_text(
            f'{{"tokenizer": "words", "file": "{name}"}}'
        )
        with pytest.raises(ValueError, match="which is no file beside it"):
            text.load(str(folder))

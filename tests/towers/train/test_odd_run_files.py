"""What bears a name of a run's files and is none: no reader waits or gives a traceback.

Each reader takes such a file for one that is not there, or ends in one sentence that
names it.
"""

import contextlib
import os
import types

import pytest
import tensorflow as tf

from towers.elastic import requests
from towers.export import arguments as export_arguments
from towers.input_pipeline import text
from towers.input_pipeline.convert import folder as conversion
from towers.input_pipeline.local_store import packs
from towers.input_pipeline.records import quarantine
from towers.input_pipeline.sources.examples import tfrecord
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.manager import SaveError
from towers.model import remembered
from towers.predict import arguments, model
from towers.program import whole_file
from towers.queue.entry import Entry
from towers.queue.record import Record
from towers.report import read as report
from towers.report.__main__ import write as report_of
from towers.train import run
from towers.train.outputs import files, preprocessing
from towers.train.outputs.preprocessing import Preprocessing
from towers.train.parts import scale

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
        lambda folder: run.measured_before(folder)["verdict"],
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
    "prediction's classes.json": (preprocessing.read_classes, JSON, SENTENCE),
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


@pytest.mark.parametrize("name", [*files.FILES, "lock", "tokenizer/tokenizer.txt"])
def test_a_run_writes_to_no_file_elsewhere(tmp_path, name):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SaveError, match=rf"is a link to {tmp_path}/elsewhere, and"):
        files.alone(str(folder)).__enter__()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SaveError, match="is no regular file, and the run writes one"):
        files.alone(str(folder)).__enter__()
    assert [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("name", files.FOLDERS)
@pytest.mark.parametrize("kind", ["folder", "nothing", "loop", "FIFO"])
def test_a_run_writes_to_no_folder_elsewhere(tmp_path, name, kind):
    path, other = tmp_path / "run" / name, tmp_path / "other"
    path.parent.mkdir(parents=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(path if kind == "loop" else other)
    if kind == "folder":
        (other / "ckpt-1-0").mkdir(parents=True)
    said = "is no folder" if kind in ("loop", "FIFO") else f"is a link to {other}"
    with pytest.raises(SaveError, match=rf"{name} {said}, and the run "):
        files.alone(str(tmp_path / "run")).__enter__()
    assert (other / "ckpt-1-0").exists() == (kind == "folder")


def test_a_model_dir_may_be_a_link_and_have_links_inside(tmp_path):
    folder = tmp_path / "disk" / "run"
    (folder / "validation").mkdir(parents=True)
    (folder / "train").symlink_to("validation")
    (tmp_path / "run").symlink_to(folder)
    with files.alone(str(tmp_path / "run")):
        assert requests.is_running(str(folder))


# What removes or replaces a name in a folder that may come from anybody.
MAKES_ROOM = {
    **{
        f"--clean, {name}": (name, files.remove_run)
        for name in (
            *files.FILES,
            *("train/plugins/profile", "train/events.out.tfevents.1", "tokenizer"),
            *("checkpoints/.unfinished", "checkpoints/.unfinished-removal"),
        )
    },
    "a report": ("report.html", lambda folder: _write_report(folder)),
    "towers resize": (
        requests.FILES[0],
        lambda folder: _ask_no_run(folder),
    ),
    "a file of a run": (
        "summary.json",
        lambda folder: whole_file.write_text(f"{folder}/summary.json", "{}"),
    ),
    "a checkpoint": (
        "ckpt-1-0",
        lambda folder: store.save(folder, store.Position(1), store.Contents({}, {})),
    ),
    "a checkpoint that a save has left": (
        "ckpt-1-0.replaced",
        lambda folder: store.save(folder, store.Position(1), store.Contents({}, {})),
    ),
    "a checkpoint that is written": (
        ".unfinished",
        lambda folder: store.save(folder, store.Position(1), store.Contents({}, {})),
    ),
}


def _ask_no_run(folder):
    with pytest.raises(requests.RunError):
        requests.ask(folder, requests.Request.new(), 0)


def _write_report(folder):
    os.makedirs(f"{folder}/train")
    with tf.summary.create_file_writer(f"{folder}/train").as_default():
        tf.summary.scalar("epoch_loss", 1.0, 1)
    report_of(folder)


@pytest.mark.parametrize("to", ["a folder", "a file", "nothing", "itself"])
@pytest.mark.parametrize(("name", "function"), MAKES_ROOM.values(), ids=MAKES_ROOM)
def test_a_link_is_removed_itself(tmp_path, name, function, to):
    other, link = tmp_path / "other", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    if to == "a folder":
        (other / "theirs").mkdir(parents=True)
    elif to == "a file":
        other.write_text("of somebody")
    link.symlink_to(link if to == "itself" else other)
    function(str(tmp_path / "run"))
    assert not link.is_symlink()
    if to == "a folder":
        assert [*other.iterdir()] == [other / "theirs"]
    elif to == "a file":
        assert other.read_text() == "of somebody"
    else:
        assert not other.exists()


def test_an_export_follows_no_link_that_nobody_names(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "saved_model.pb").touch()
    (tmp_path / "model.keras").touch()
    (tmp_path / "exported").symlink_to(other)
    with pytest.raises(ValueError, match="exported is a link, which may lead anywh"):
        export_arguments.read(["", str(tmp_path)], "")


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

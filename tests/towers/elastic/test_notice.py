"""Notices that the machine is about to be taken away, and what a run does then."""

import contextlib
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar

import keras
import numpy as np
import psutil
import pytest

import towers
from tests.limits import HANG_S
from tests.towers.train.runs import ROOT, finish, ours, start, wait_for
from towers.elastic import notice
from towers.elastic.notice import NoticeError
from towers.elastic.preemption import Lookout, PreemptionNotice
from towers.lifecycle.checkpoint import Checkpoint
from towers.processes.signals import Stopped
from towers.train import checks
from towers.train.settings import Settings


def fails(source, message):
    with pytest.raises(NoticeError, match=message) as caught:
        source.look()
    assert "\n" not in str(caught.value)


# Files.


def test_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = notice.source("gone")
    monkeypatch.chdir("/")
    assert source.look() is None
    path = tmp_path / "gone"
    path.write_text("")
    assert source.look() == f"the file {path} exists"
    path.write_text("at\tnoon \x1b[1m\nsecond line")
    assert source.look() == f'the file {path} exists and says "at noon [1m"'
    path.write_bytes(b"\xff" * 1000)
    assert len(source.look()) < 400


def test_a_file_that_cannot_be_read_is_there(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "folder"):
        source = notice.source(str(path))
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        assert source.look() == f"the file {path} exists"


# Commands.


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("true", "true succeeds"),
        ("echo at noon; echo or later", ' and says "at noon"'),
        ("echo no | grep yes", None),
        ("read answer", None),  # it has no input
        ("kill $$", None),
        ("head -c 200000 /dev/zero", "head -c 200000 /dev/zero succeeds"),
    ],
)
def test_a_command(line, what):
    said = notice.source(f"command:{line}").look()
    assert said is None if what is None else said.endswith(what)


def test_a_command_that_cannot_be_run():
    fails(notice.source("command:no-such-program -f"), "-f cannot be run and says .*no")
    fails(notice.source("command:/"), "^/ cannot be run and says ")


def test_a_command_that_does_not_end(tmp_path, monkeypatch):
    monkeypatch.setattr(notice, "_LIMIT_S", 0.1)
    # What it has started ends, too: it holds a pipe until then.
    sleeps = f"sleep 9{os.getpid()}"
    source = notice.source(f"command:{sleeps} | tee {tmp_path}/out")
    fails(source, f"^{sleeps} .* has not ended after 0.1 s")
    running = psutil.process_iter(["cmdline"])
    assert sleeps not in {" ".join(each.info["cmdline"] or ()) for each in running}


class Cloud(http.server.BaseHTTPRequestHandler):
    """Answers as the metadata services of clouds do, by their documents."""

    ANSWERS: ClassVar = {
        "/latest/meta-data/spot/instance-action": '{"action": "terminate"}',
        "/computeMetadata/v1/instance/preempted": "FALSE",
        "/computeMetadata/v1/instance/maintenance-event": (
            "TERMINATE_ON_HOST_MAINTENANCE"
        ),
        "/metadata/scheduledevents?api-version=2020-07-01": (
            '{"DocumentIncarnation":1,"Events":[{"EventType":"Preempt"}]}'
        ),
    }

    def do_GET(self):
        proper = (
            self.headers["X-aws-ec2-metadata-token"] == "token"
            or self.headers["Metadata-Flavor"] == "Google"
            or self.headers["Metadata"] == "true"
        )
        self.answer(self.ANSWERS.get(self.path) if proper else None)

    def do_PUT(self):
        proper = "X-aws-ec2-metadata-token-ttl-seconds" in self.headers
        self.answer("token" if proper else None)

    def answer(self, text):
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *args):
        pass


def of_the_documents():
    """Returns the commands for clouds that docs/train/resuming.md has."""
    text = (ROOT / "docs/train/resuming.md").read_text()
    return re.findall(r"^[ \w]+='(command:.*)'$", text, re.M)


@pytest.mark.skipif(shutil.which("curl") is None, reason="it needs curl")
def test_the_documents_commands_for_clouds(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Cloud) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host = "{}:{}".format(*server.server_address)
        lines = [
            re.sub(r"(?<=http://)[\w.]+", host, each) for each in of_the_documents()
        ]
        sources = [notice.source(each) for each in lines]
        assert len(sources) == 3
        assert all(each.look() for each in sources)
        for path, text in {
            "/latest/meta-data/spot/instance-action": None,
            "/computeMetadata/v1/instance/maintenance-event": (
                "MIGRATE_ON_HOST_MAINTENANCE"
            ),
            "/metadata/scheduledevents?api-version=2020-07-01": '{"Events":[]}',
        }.items():
            monkeypatch.setitem(Cloud.ANSWERS, path, text)
        assert not any(each.look() for each in sources)
        server.shutdown()


# What may be asked for.


@pytest.mark.parametrize("where", ["gone", "~/gone", "./aws", "command:curl -sf a://b"])
def test_where_notices_may_come_from(where):
    notice.check(where)
    checks.check(Settings(preemption_notice=where))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", "; expected the path of a file, or command: and a line for the shell."),
        ("/", "; expected the path of a file, or command:"),
        ("command:", "; expected the path of a file, or command: and"),
        ("command:a\nb", "; expected the path of a file, or command: and"),
        *(
            (
                former,
                ".* such as 'command:curl -sf URL'; docs/train/resuming.md has one ",
            )
            for former in ("aws", "azure", "gcp", "http://a/b")
        ),
        ("/none/gone", ", but there is no folder /none; expected .* that exists"),
    ],
)
def test_where_they_may_not(where, expected):
    said = f"={re.escape(where)}{expected}"
    with pytest.raises(ValueError, match=f"^Received where{said}"):
        PreemptionNotice(where)
    with pytest.raises(ValueError, match=f"^Received --preemption_notice{said}"):
        checks.check(Settings(preemption_notice=where))


def test_the_flag_repeats_a_run_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for where, line in {
        "gone": f"{tmp_path}/gone",
        f"{notice.COMMAND}./gone": "command:./gone",
    }.items():
        lines = Settings(preemption_notice=where).as_text().splitlines()
        assert f"--preemption_notice={line}" in lines
    assert "preemption" not in Settings().as_text()
    assert "--preemption_notice" not in Settings().of_all_hosts()


# The thread.


class Scripted:
    """A source that says one thing after another, then waits to be released."""

    every_s = 0.0

    def __init__(self, *looks):
        self.looks, self.waits = [*looks], threading.Event()
        self.release = threading.Event()

    def look(self):
        if not self.looks:
            self.waits.set()
            assert self.release.wait(HANG_S)
            return "late"
        found = self.looks.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def threads():
    return [each for each in threading.enumerate() if each.name == "towers-notice"]


def join_threads():
    for each in threads():
        each.join(HANG_S)
    assert not threads()


def test_the_first_notice_is_told_once_and_failures_as_well(caplog):
    failure, other = NoticeError("x answers 500"), NoticeError("x is gone")
    looks = [failure, None, failure, other, None, failure, "this"]
    source, told = Scripted(*looks, "that"), []
    lookout = Lookout(source, told.append)
    lookout.start()
    join_threads()
    assert told == ["this"]
    assert [each.getMessage() for each in caplog.records] == [
        f"No notice of preemption can be had: {text}; asked again every 0 s."
        for text in ("x answers 500", "x is gone")
    ]
    lookout.start()  # as another `fit` begins
    join_threads()
    assert told == ["this", "that"]


def test_nothing_is_told_after_the_end():
    source, told = Scripted(), []
    lookout = Lookout(source, told.append)
    lookout.end()  # which has not begun
    lookout.start()
    assert source.waits.wait(HANG_S)
    lookout.end()  # without waiting for an answer
    assert threads()
    source.release.set()
    join_threads()
    assert told == []


# Within `fit`.


class Guard(keras.callbacks.Callback):
    """Breaks a run off that nothing stops."""

    def __init__(self):
        super().__init__()
        self._end = time.monotonic() + HANG_S

    def on_train_batch_end(self, batch, logs=None):
        assert time.monotonic() < self._end, "Nothing has stopped it."


class Tells(keras.callbacks.Callback):
    """Tells that an epoch is done."""

    def __init__(self, done):
        super().__init__()
        self._done = done

    def on_epoch_end(self, epoch, logs=None):
        self._done.set()


def fit(*callbacks, epochs=10**6):
    parallel = towers.multi_gpu_model(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), gpus=2
    )
    parallel.compile("sgd", "mse")
    x = np.ones((32, 4), "float32")
    options = {"epochs": epochs, "batch_size": 8, "verbose": 0, "shuffle": False}
    parallel.fit(x, x[:, :1], callbacks=[*callbacks, Guard()], **options)


@pytest.mark.quick_one_in(2)
@pytest.mark.parametrize("first", [True, False])
def test_a_notice_saves_and_ends_the_run(tmp_path, capsys, monkeypatch, first):
    monkeypatch.setattr(notice._Command, "every_s", 0.01)
    trained = threading.Event()
    look = notice._Command.look

    def look_once_trained(source):
        # If this comes too late for one look, it does not for the next.
        assert trained.wait(HANG_S)
        return look(source)

    monkeypatch.setattr(notice._Command, "look", look_once_trained)
    before = signal.getsignal(signal.SIGTERM)
    callbacks = [
        PreemptionNotice("command:echo terminate"),
        Checkpoint(tmp_path / "run"),
    ]
    with pytest.raises(Stopped) as stopped:
        fit(*(callbacks if first else callbacks[::-1]), Tells(trained))
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    noticed, saved = capsys.readouterr().err.splitlines()[-2:]
    assert noticed == (
        'towers: Preemption notice: echo terminate succeeds and says "terminate". This '
        "process ends as by SIGTERM."
    )
    assert saved.startswith("towers: Stopped by SIGTERM: the last checkpoint is ")
    assert [*(tmp_path / "run").glob("ckpt-*")]
    join_threads()


@pytest.mark.slow
def test_without_a_notice_nothing_happens(tmp_path, capsys):
    callbacks = [
        PreemptionNotice(tmp_path / "gone"),
        PreemptionNotice("command:false"),
    ]
    assert not threads()
    fit(*callbacks, epochs=2)
    join_threads()
    assert "notice" not in capsys.readouterr().err

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(*callbacks, Fails())
    join_threads()


# Signals of the machine's own end would end the tests' process.
_SCRIPT = """
import signal, sys, threading
from pathlib import Path

import towers

towers.configure(num_gpus=2)

import keras
import numpy as np

folder, first = Path(sys.argv[1]), sys.argv[2]


class At(keras.callbacks.Callback):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            self.function()


def notice():
    (folder / "gone").touch()
    for each in threading.enumerate():
        if each.name == "towers-notice":
            each.join(60)


def terminate():
    signal.raise_signal(signal.SIGTERM)


before, behind = {
    "notice": (notice, terminate),
    "signal": (terminate, notice),
}[first]
parallel = towers.multi_gpu_model(
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
)
parallel.compile("sgd", "mse")
callbacks = [
    At(before),
    towers.callbacks.PreemptionNotice(folder / "gone"),
    At(behind),
    towers.callbacks.Checkpoint(folder / "run"),
]
x = np.ones((64, 4), "float32")
parallel.fit(x, x[:, :1], batch_size=8, verbose=0, shuffle=False, callbacks=callbacks)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["notice", "signal"])
def test_the_signal_of_the_machines_end_is_no_second_one(tmp_path, first):
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, tmp_path, first],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=HANG_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 143, done.stderr
    assert done.stderr.count("Preemption notice: ") == 1
    assert "Left at once" not in done.stderr
    assert f"Stopped by SIGTERM: the last checkpoint is {tmp_path}/run/ckpt-0-4" in (
        done.stderr
    )


@pytest.mark.slow
def test_a_run_of_the_program(tmp_path):
    folder, path = tmp_path / "run", tmp_path / "gone"
    flags = ("--dataset=synthetic:4x4x1:3:1472", "--model=mlp", "--log_steps=10")
    flags += (f"--model_dir={folder}", f"--preemption_notice={path}")
    process = start(*flags, "--train_epochs=100000")
    wait_for(process, "step 10/")
    whole = tmp_path / "whole"
    whole.write_text("by the operator\n")
    whole.rename(path)
    done = finish(process)
    assert done.returncode == 143, done.stderr
    noticed, stopped = ours(done)
    assert f'the file {path} exists and says "by the operator"' in noticed
    saved = re.match(
        r"Stopped by SIGTERM: the last checkpoint is (\S+); run again", stopped
    )
    assert os.path.isdir(saved[1])
    assert "Traceback" not in done.stderr

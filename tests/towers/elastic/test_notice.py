"""Notices that the machine is about to be taken away, and what a run does then."""

import contextlib
import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

import towers
from tests.limits import HANG_S
from tests.towers.train.runs import ROOT, finish, ours, start, wait_for
from towers.elastic import notice
from towers.elastic.notice import Notice, NoticeError
from towers.elastic.preemption import Lookout, PreemptionNotice
from towers.lifecycle.checkpoint import Checkpoint
from towers.processes.signals import Stopped
from towers.train import checks
from towers.train.settings import Settings

TOKEN, ACTION = "/latest/api/token", "/latest/meta-data/spot/instance-action"
GCP = "/computeMetadata/v1/instance"
PREEMPTED, MAINTENANCE = f"{GCP}/preempted", f"{GCP}/maintenance-event"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


class Cloud:
    """A server on the loopback.

    Attributes:
        host: Its name and port.
        answers: Status and text by path, or what returns them for the headers.
        asked: What it was asked: method and path.
    """

    def __init__(self, server):
        self.host = "{}:{}".format(*server.server_address)
        self.url = f"http://{self.host}"
        self.answers, self.asked = {}, []

    def answer(self, method, path, headers):
        self.asked.append((method, path))
        found = self.answers.get(path, (404, "no such thing"))
        return found(method, headers) if callable(found) else found

    def says(self, name, **answers):
        """Answers as a source of this name; looks once."""
        self.answers = answers.pop("answers", self.answers) | answers
        return notice.source(name, self.host).look()


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Says nothing: a client that has waited too long hangs up."""


@pytest.fixture
def cloud():
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            status, text = cloud.answer(self.command, self.path, self.headers)
            self.send_response(status)
            if status // 100 == 3:
                self.send_header("Location", "/there")
            data = text if isinstance(text, bytes) else text.encode()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = answer

        def log_message(self, *args):
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        cloud = Cloud(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield cloud
        server.shutdown()


@pytest.fixture
def silent(monkeypatch):
    """The host of a server that takes calls and never answers."""
    monkeypatch.setattr(notice, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(notice, "_FIRST_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield "{}:{}".format(*server.getsockname())


@pytest.fixture
def closed():
    """A host where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = "{}:{}".format(*server.getsockname())
    return host


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
    assert source.look().what == f"the file {path} exists"
    path.write_text("at\tnoon \x1b[1m\nsecond line")
    assert source.look().line() == (
        f'Preemption notice: the file {path} exists and says "at noon [1m". The '
        "machine goes at a time that is not told; this process ends as by SIGTERM."
    )
    path.write_bytes(b"\xff" * 1000)
    assert len(source.look().what) < 400


def test_a_file_that_cannot_be_read_is_there(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "folder"):
        source = notice.source(str(path))
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        assert source.look().what == f"the file {path} exists"


# A URL.


@pytest.mark.parametrize(
    ("status", "text", "what"),
    [
        (200, "", "answers 200"),
        (200, "\n at noon\nor later", 'answers 200 and says "at noon"'),
        (404, "no", None),
    ],
)
def test_a_url(cloud, status, text, what):
    cloud.answers["/gone"] = status, text
    found = notice.source(f"{cloud.url}/gone").look()
    assert found == (what and Notice(f"{cloud.url}/gone {what}", notice._NOT_TOLD))


@pytest.mark.parametrize("status", [204, 301, 403, 500])
def test_a_url_with_other_answers(cloud, status):
    cloud.answers |= {"/gone": (status, ""), "/there": (200, "")}
    fails(notice.source(f"{cloud.url}/gone"), rf"/gone answers with status {status}")


def test_a_url_without_an_answer(closed, silent):
    for host in (closed, silent, "no-such-name.invalid", "a..b"):
        assert notice.source(f"http://{host}/gone").look() is None


def test_a_server_that_speaks_another_language():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connected, _ = server.accept()
            with connected:
                connected.recv(9999)
                connected.sendall(b"SSH-2.0-garbage\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        host = "{}:{}".format(*server.getsockname())
        fails(notice.source("gcp", host), r"does not answer \(\w+\)$")
        thread.join(HANG_S)


def test_proxies_are_for_others(cloud, closed, monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://{closed}")
    cloud.answers |= {"/gone": (200, ""), PREEMPTED: (200, "TRUE")}
    assert notice.source(f"{cloud.url}/gone").look() is None  # by the proxy
    assert cloud.says("gcp") is not None
    # The proxy sees what it is asked for; nobody else would.
    monkeypatch.setenv("http_proxy", cloud.url)
    cloud.answers |= {"http://example.invalid/gone": (200, "")}
    assert notice.source("http://example.invalid/gone").look() is not None
    assert notice._is_link_local("169.254.169.254")
    assert notice._is_link_local("metadata.google.internal")
    assert not notice._is_link_local("example.org")


# AWS.


class Tokens:
    """What AWS asks: a new token, and that it is shown."""

    def __init__(self, status, text):
        self.given, self.valid, self.found = 0, None, (status, text)

    def token(self, method, headers):
        if method != "PUT" or "X-aws-ec2-metadata-token-ttl-seconds" not in headers:
            return 400, ""
        assert headers["X-aws-ec2-metadata-token-ttl-seconds"] == "21600"
        self.given += 1
        self.valid = f"token{self.given}"
        return 200, self.valid

    def action(self, method, headers):
        shown = headers.get("X-aws-ec2-metadata-token")
        return self.found if method == "GET" and shown == self.valid else (401, "")

    @property
    def answers(self):
        return {TOKEN: self.token, ACTION: self.action}


@pytest.mark.parametrize(
    ("status", "text", "found"),
    [
        (404, "", None),
        *(
            (
                200,
                json.dumps({"action": action, "time": "2026-11-25T08:22:00Z"}),
                (
                    f'AWS has planned "{action}" for this machine',
                    "at 2026-11-25T08:22:00Z",
                ),
            )
            for action in ("terminate", "stop", "hibernate")
        ),
        (
            200,
            '{"action": "stop"}',
            ('AWS has planned "stop" for this machine', notice._NOT_TOLD),
        ),
    ],
)
def test_aws(cloud, status, text, found):
    tokens = Tokens(status, text)
    assert cloud.says("aws", answers=tokens.answers) == found
    assert cloud.asked == [("PUT", TOKEN), ("GET", ACTION)]


def test_aws_renews_its_token(cloud):
    tokens = Tokens(404, "")
    cloud.answers = tokens.answers
    source = notice.source("aws", cloud.host)
    for _ in range(2):
        assert source.look() is None
    assert tokens.given == 1
    tokens.valid = "forgotten"
    tokens.found = 200, '{"action": "stop", "time": "now"}'
    assert source.look().when == "at now"
    assert tokens.given == 2
    # Whatever is shown is refused: two are enough for a look.
    cloud.answers[ACTION] = 401, ""
    fails(source, "instance-action answers with status 401")
    assert tokens.given == 3
    fails(source, "instance-action answers with status 401")
    assert tokens.given == 5


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (TOKEN, (403, ""), "api/token answers with status 403"),
        (TOKEN, (200, ""), "api/token answers what cannot be read"),
        (TOKEN, (200, "a\r\nb: c"), "api/token answers what cannot be read"),
        (ACTION, (500, ""), "instance-action answers with status 500"),
        (ACTION, (200, "<html>"), "instance-action answers what cannot be read"),
        (ACTION, (200, b"\xff\x00"), "instance-action answers what cannot be read"),
        (ACTION, (200, "[" * 9999), "instance-action answers what cannot be read"),
        (ACTION, (200, "[]"), "instance-action answers what cannot be read"),
        (ACTION, (200, '{"action": ["a"]}'), "answers what cannot be read"),
        (ACTION, (200, '{"time": 1}'), "answers what cannot be read"),
    ],
)
def test_aws_answers_something_else(cloud, path, answer, message):
    cloud.answers = Tokens(404, "").answers | {path: answer}
    fails(notice.source("aws", cloud.host), message)


# Google Cloud.


@pytest.mark.parametrize(
    ("preempted", "maintenance", "found"),
    [
        ("FALSE", "NONE", None),
        ("FALSE\n", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TRUE", "NONE", ("preempted this machine", "within about 30 s")),
        (
            *("FALSE", "TERMINATE_ON_HOST_MAINTENANCE"),
            ("for the maintenance of its host", notice._NOT_TOLD),
        ),
    ],
)
def test_gcp(cloud, preempted, maintenance, found):
    def answers(text):
        def answer(method, headers):
            return (200, text) if headers["Metadata-Flavor"] == "Google" else (403, "")

        return answer

    cloud.answers = {PREEMPTED: answers(preempted), MAINTENANCE: answers(maintenance)}
    told = cloud.says("gcp")
    if found is None:
        assert told is None
    else:
        assert told.what.endswith(found[0]) and told.when == found[1]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (PREEMPTED, (404, ""), "preempted answers with status 404"),
        (PREEMPTED, (200, "<html>"), "preempted answers what cannot be read"),
        (MAINTENANCE, (503, ""), "maintenance-event answers with status 503"),
        (MAINTENANCE, (200, ""), "maintenance-event answers what cannot be read"),
    ],
)
def test_gcp_answers_something_else(cloud, path, answer, message):
    cloud.answers = {PREEMPTED: (200, "FALSE"), MAINTENANCE: (200, "NONE")}
    cloud.answers[path] = answer
    fails(notice.source("gcp", cloud.host), message)


# Azure.


def event(kind, *names, before="Mon, 19 Sep 2026 18:29:47 GMT", **others):
    return {
        **{"EventId": "f020ba2e", "EventType": kind, "ResourceType": "VirtualMachine"},
        **{"Resources": names, "EventStatus": "Scheduled", "NotBefore": before},
        **others,
    }


def answers_of_azure(*events, name="vm_0"):
    def shown(text):
        def answer(method, headers):
            return (200, text) if headers["Metadata"] == "true" else (400, "")

        return answer

    told = {"DocumentIncarnation": 3, "Events": events}
    return {NAME: shown(name), EVENTS: shown(json.dumps(told))}


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Redeploy", "Reboot"])
def test_azure(cloud, kind):
    others = event("Freeze", "vm_0"), event(kind, "vm_1")
    cloud.answers = answers_of_azure(*others, event(kind, "vm_1", "VM_0"))
    assert cloud.says("azure") == (
        f'Azure has planned "{kind}" for this machine',
        "not before Mon, 19 Sep 2026 18:29:47 GMT",
    )
    assert cloud.asked == [("GET", NAME), ("GET", EVENTS)]


def test_an_event_of_azure_that_has_begun(cloud):
    cloud.answers = answers_of_azure(
        event("Preempt", "vm_0", before="", EventStatus="Started")
    )
    assert cloud.says("azure").when == "at once"


@pytest.mark.parametrize(
    "events",
    [
        (),
        (event("Freeze", "vm_0"),),
        (event("Preempt", "vm_1"), event("Terminate", "vm_00")),  # not named
        (event("Preempt"),),
    ],
)
def test_events_of_azure_that_are_none(cloud, events):
    cloud.answers = answers_of_azure(*events)
    source = notice.source("azure", cloud.host)
    for _ in range(2):
        assert source.look() is None
    # It asks for the name once.
    assert [path for _, path in cloud.asked] == [NAME, EVENTS, EVENTS]


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        (NAME, (404, ""), "name.* answers with status 404"),
        (NAME, (200, " "), "name.* answers what cannot be read"),
        (EVENTS, (429, ""), "scheduledevents.* answers with status 429"),
        (EVENTS, (200, "<html>"), "scheduledevents.* answers what cannot be read"),
        (EVENTS, (200, "{}"), "scheduledevents.* answers what cannot be read"),
        *(
            (EVENTS, (200, json.dumps({"Events": events})), "what cannot be read")
            for events in (None, ["x"], [{}], [{"EventType": "Preempt"}])
        ),
        (EVENTS, (200, json.dumps({"Events": [event("Preempt", 1)]})), "what cannot"),
    ],
)
def test_azure_answers_something_else(cloud, path, answer, message):
    cloud.answers = answers_of_azure() | {path: answer}
    source = notice.source("azure", cloud.host)
    fails(source, message)
    # It goes on once it can.
    cloud.answers = answers_of_azure(event("Preempt", "vm_0"))
    assert source.look() is not None


def test_the_first_call_of_azure_may_take_minutes(cloud, monkeypatch):
    waited = []
    opened = notice.urllib.request.OpenerDirector.open

    def open_and_note(opener, asked, timeout):
        waited.append(timeout)
        return opened(opener, asked, timeout=timeout)

    monkeypatch.setattr(notice.urllib.request.OpenerDirector, "open", open_and_note)
    cloud.answers = answers_of_azure()
    source = notice.source("azure", cloud.host)
    source.look(), source.look()
    assert waited == [2, 150, 2]


@pytest.mark.parametrize("name", notice.CLOUDS)
def test_a_cloud_that_does_not_answer(name, closed, silent):
    fails(notice.source(name, closed), r"does not answer \(Connection refused\)")
    fails(notice.source(name, silent), r"does not answer \(timed out\)")


# What may be asked for.


@pytest.mark.parametrize(
    "where",
    [*notice.CLOUDS, "http://a/b?c=d", "https://a:8443", "gone", "~/gone", "./aws"],
)
def test_where_notices_may_come_from(where):
    notice.check(where)
    checks.check(Settings(preemption_notice=where))


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("", "; expected aws, gcp, azure, a URL of http or https, or the path of a fi"),
        ("gs://bucket/gone", "; expected aws, gcp, azure, a URL of http or https, or"),
        ("http://", "; expected aws"),
        ("http://a:b/", "; expected aws"),
        ("http://me:secret@a/", "; expected aws"),
        ("http://a/ä", "; expected aws"),
        ("http://[a/", "; expected aws"),
        ("/", "; expected aws, gcp, azure, a URL of http or https, or the path of a f"),
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
        "http://a/b": "http://a/b",
        "aws": "aws",
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
            return Notice("late", "now")
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
    looks = [failure, None, failure, other, None, failure, Notice("this", "now")]
    source, told = Scripted(*looks, Notice("that", "now")), []
    lookout = Lookout(source, told.append)
    lookout.start()
    join_threads()
    assert told == [Notice("this", "now")]
    assert [each.getMessage() for each in caplog.records] == [
        f"No notice of preemption can be had: {text}; asked again every 0 s."
        for text in ("x answers 500", "x is gone")
    ]
    lookout.start()  # as another `fit` begins
    join_threads()
    assert told == [Notice("this", "now"), Notice("that", "now")]


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
def test_a_notice_saves_and_ends_the_run(cloud, tmp_path, capsys, monkeypatch, first):
    monkeypatch.setattr(notice._Aws, "every_s", 0.01)
    tokens = Tokens(200, '{"action": "terminate", "time": "2026-11-25T08:22:00Z"}')
    trained = threading.Event()

    def action(method, headers):
        # If this comes too late for one look, it does not for the next.
        assert trained.wait(HANG_S)
        return tokens.action(method, headers)

    cloud.answers = tokens.answers | {ACTION: action}
    before = signal.getsignal(signal.SIGTERM)
    callbacks = [
        PreemptionNotice("aws", metadata_host=cloud.host),
        Checkpoint(tmp_path / "run"),
    ]
    with pytest.raises(Stopped) as stopped:
        fit(*(callbacks if first else callbacks[::-1]), Tells(trained))
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before
    noticed, saved = capsys.readouterr().err.splitlines()[-2:]
    assert noticed == (
        'towers: Preemption notice: AWS has planned "terminate" for this machine. The '
        "machine goes at 2026-11-25T08:22:00Z; this process ends as by SIGTERM."
    )
    assert saved.startswith("towers: Stopped by SIGTERM: the last checkpoint is ")
    assert [*(tmp_path / "run").glob("ckpt-*")]
    join_threads()


@pytest.mark.slow
def test_without_a_notice_nothing_happens(cloud, tmp_path, capsys):
    cloud.answers = Tokens(404, "").answers
    aws = PreemptionNotice("aws", metadata_host=cloud.host)
    callbacks = [PreemptionNotice(tmp_path / "gone"), aws]
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
    wait_for(process, "epoch 1/")
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

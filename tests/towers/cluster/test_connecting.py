"""A process whose TensorFlow waits too long for other hosts is ended."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from tests.limits import HANG_S
from towers.cluster import connecting


@pytest.fixture
def waiting():
    """A process that waits."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def start(pid, seconds, hosts, **changed):
    """Starts the program, with constants of it changed."""
    code = (
        f"import runpy; own = runpy.run_path({connecting.__file__!r})\n"
        f"own['main'].__globals__.update({changed})\n"
        f"own['main']({pid}, {seconds}, {json.dumps(hosts)})"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_is_ended_once_a_host_has_ended(waiting):
    """The sentence names the host at whose port nobody listens any more."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as ends,
    ):
        hosts = [
            ["host 0", *server.getsockname()],
            ["host 1", *ends.getsockname()],
        ]
        with start(waiting.pid, HANG_S, hosts, GONE_S=0.5) as ending:
            came, _ = ends.accept()
            ends.close()
            came.close()
            assert waiting.wait(HANG_S) == -signal.SIGKILL
            text = ending.stderr.read()
    assert text.startswith("towers: host 1 has ended, or cannot be reached at its port")


def test_it_is_ended_if_all_listen_and_do_not_connect(waiting):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts = [["host 0", *server.getsockname()]]
        with start(waiting.pid, 0.5, hosts) as ending:
            assert waiting.wait(HANG_S) == -signal.SIGKILL
            text = ending.stderr.read()
    assert text.startswith("towers: Not all hosts have connected within 0 s, after")


def test_it_is_left_alone_once_all_have_connected(waiting):
    with start(waiting.pid, HANG_S, []) as ending:
        ending.stdin.close()
        assert (ending.wait(HANG_S), ending.stderr.read()) == (0, "")
    assert waiting.poll() is None

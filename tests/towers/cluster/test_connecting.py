"""A process whose TensorFlow waits too long for other hosts is ended."""

import json
import signal
import socket
import subprocess
import sys

import pytest

from tests.hosts import free_ports
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


def start(pid, seconds, hosts):
    arguments = str(pid), str(seconds), json.dumps(hosts)
    return subprocess.Popen(
        [sys.executable, "-I", "-S", connecting.__file__, *arguments],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_it_is_ended_with_a_sentence_that_names_who_is_missing(waiting):
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        hosts = [["host 0", *server.getsockname()], ["host 1", "127.0.0.1", port]]
        with start(waiting.pid, 0.1, hosts) as ending:
            assert waiting.wait(HANG_S) == -signal.SIGKILL
            text = ending.stderr.read()
    assert text.startswith("towers: host 1 has not connected within 0 s after")


def test_it_is_left_alone_once_all_have_connected(waiting):
    with start(waiting.pid, HANG_S, []) as ending:
        ending.stdin.close()
        assert (ending.wait(HANG_S), ending.stderr.read()) == (0, "")
    assert waiting.poll() is None

"""Hosts of tests/network.py reach one another, until a cable is cut."""

import subprocess
import sys

import pytest

from tests import network

_ECHO = """
import socketserver

class Echo(socketserver.BaseRequestHandler):
    def handle(self):
        while received := self.request.recv(2**20):
            self.request.sendall(received)

with socketserver.ThreadingTCPServer(("0.0.0.0", 5000), Echo) as server:
    print("listens", flush=True)
    server.serve_forever()
"""

_ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=20) as asked:
    start = time.monotonic()
    asked.sendall(b"?")
    asked.recv(1)
    print(time.monotonic() - start, flush=True)
    answers, size = 0, int(sys.argv[2])
    asked.sendall(bytes(size))
    while answers < size:
        answers += len(asked.recv(2**20))
    print(answers, flush=True)
    asked.settimeout(0.2)
    for command in sys.stdin:
        asked.sendall(b"?")
        try:
            print(len(asked.recv(1)), flush=True)
        except TimeoutError:
            print("silence", flush=True)
"""


def test_hosts_reach_one_another_until_a_cable_is_cut():
    if reason := network.why_not():
        pytest.skip(reason)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with network.Network(3, mbit=100, delay_ms=5) as joined:

        def start(host, code, *arguments):
            command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
            return joined.start(host, command, **pipes)

        server = start(0, _ECHO)
        assert server.stdout.readline() == "listens\n"
        asks = [start(host, _ASK, joined.addresses[0], 10**5) for host in (1, 2)]
        for ask in asks:
            # There and back.
            assert float(ask.stdout.readline()) >= 0.01
            assert ask.stdout.readline() == "100000\n"
        joined.cut(1)
        for ask, answer in zip(asks, ("silence\n", "1\n"), strict=True):
            print(file=ask.stdin, flush=True)
            assert ask.stdout.readline() == answer
    assert [process.wait() for process in (server, *asks)] == [-9] * 3


def test_a_machine_without_namespaces_says_so(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "unshare" in network.why_not.__wrapped__()

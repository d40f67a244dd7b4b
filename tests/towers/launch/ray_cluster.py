"""A cluster of Ray on this machine, for tests: each node has its own address."""

import os
import secrets
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from tests.limits import HANG_S
from towers.cluster import addresses

ROOT = Path(__file__).parents[3]
# What `ray start` says once the cluster knows the node.
_STARTED = "Ray runtime started"


class Node:
    """A node: `ray start`, and what that has started."""

    def __init__(self, *flags, folder, environ):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags],
            env={**environ, "PYTHONUNBUFFERED": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._said, self._has_said = [], threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            self._said.append(line)
            if _STARTED in line:
                self._has_said.set()
        self._has_said.set()

    def wait(self):
        """Waits until the cluster knows it."""
        self._has_said.wait(HANG_S)
        assert _STARTED in "".join(self._said), self._said

    def has(self, pid):
        """Tells whether a process runs on it."""
        return self._process.pid in [each.pid for each in psutil.Process(pid).parents()]

    def kill(self):
        """Has it end as a node does that is not asked to: its raylet is just gone."""
        for each in psutil.Process(self._process.pid).children():
            each.kill()
        self.end()

    def end(self):
        """Ends it."""
        self._process.terminate()
        with self._process:
            self._reader.join()


class Cluster:
    """Nodes.

    Attributes:
        environ: The environment of who uses it.
    """

    def __init__(self, cpus):
        """Starts its first node, with so many CPUs."""
        with addresses.held_port("127.0.0.1") as free:
            port = free.getsockname()[1]
        # Its sockets have to have short names, so not in a folder of pytest's.
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._nodes, self._count = [], 2
        self.environ = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
            "CUDA_VISIBLE_DEVICES": "-1",
            # Ray takes lines for the same that differ by numbers.
            "RAY_DEDUP_LOGS": "0",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            "RAY_raylet_start_wait_time_s": str(HANG_S),
            **{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
        }
        flags = f"--port={port}", "--node-ip-address=127.0.0.2", f"--num-cpus={cpus}"
        flags += "--include-dashboard=false", f"--temp-dir={self._folder.name}"
        self._start("--head", *flags, "--disable-usage-stats").wait()
        self.environ["RAY_ADDRESS"] = f"127.0.0.2:{port}"

    def start(self, *cpus):
        """Starts a node for each number of CPUs."""
        address = f"--address={self.environ['RAY_ADDRESS']}"
        found = []
        for count in cpus:
            self._count += 1
            where = f"--node-ip-address=127.0.0.{self._count}"
            # One by one: in their common folder, they choose names for their sockets.
            found.append(self._start(address, where, f"--num-cpus={count}"))
            found[-1].wait()
        return found

    def _start(self, *flags):
        node = Node(*flags, folder=self._folder.name, environ=self.environ)
        self._nodes.append(node)
        return node

    def end_others(self):
        """Ends all nodes but the first."""
        while len(self._nodes) > 1:
            self._nodes.pop().end()

    def close(self):
        """Ends all nodes."""
        self.end_others()
        self._nodes.pop().end()
        self._folder.cleanup()

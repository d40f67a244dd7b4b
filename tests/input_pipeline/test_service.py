import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests import warm
from tests.limits import HANG_S
from towers.input_pipeline import make_dataset, open_source
from towers.program.commands import check_data_service


@contextlib.contextmanager
def _started(*args, stderr=subprocess.DEVNULL):
    """A server in a process of its own; gives what it says first."""
    command = [sys.executable, "-m", "towers.input_pipeline.service", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
    process = subprocess.Popen(command, **pipes)
    try:
        yield process.stdout.readline().strip()
        os.kill(_another_thread(process), signal.SIGTERM)
        assert process.wait(timeout=HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _another_thread(process):
    """Returns a thread that does not block SIGTERM, and is not the main one.

    The kernel gives a signal to the thread whose number it is sent to, if it can.
    """
    blocked = 1 << (signal.SIGTERM - 1)
    threads = pathlib.Path(f"/proc/{process.pid}/task")
    # Those of libraries, which stay, have begun first.
    for number in sorted(int(thread.name) for thread in threads.iterdir()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            status = (threads / str(number) / "status").read_text()
            mask = re.search(r"^SigBlk:\s+(\w+)$", status, re.MULTILINE)[1]
            if number != process.pid and not int(mask, 16) & blocked:
                return number
    raise AssertionError("no thread but the main one would receive the signal")


@pytest.mark.slow
def test_processes_make_the_batches(tmp_path, image_example, grey, write_tfrecord):
    for shard in range(2):
        records = [image_example(grey(i), i % 5) for i in range(20)]
        write_tfrecord(tmp_path / f"train-{shard}", records)
    source = open_source(f"tfrecord:{tmp_path}/*")
    options = {
        "batch_size": 8,
        "image_shape": (6, 6, 3),
        "training": True,
        "recipe": "imagenet",
    }
    here = list(make_dataset(source, "train", **options).as_numpy_iterator())
    with _started("dispatcher") as said:
        address = said.removeprefix("dispatcher at ")
        worker = ("worker", f"--dispatcher={address.partition('://')[2]}")
        # One is enough: what is the same in each epoch is made by one of them.
        with _started(*worker) as first:
            assert first == f"worker of {address.partition('://')[2]}"
            there = make_dataset(source, "train", data_service=address, **options)
            for mine, theirs in zip(here, there.as_numpy_iterator(), strict=True):
                for part, other in zip(mine, theirs, strict=True):
                    np.testing.assert_array_equal(part, other)


@pytest.mark.slow
def test_who_can_reach_it_is_said(tmp_path):
    with (
        open(tmp_path / "said", "w+") as stderr,
        _started("dispatcher", stderr=stderr) as said,
    ):
        port = int(said.rpartition(":")[2])
        # What the sentence is about: every address of this machine answers.
        socket.create_connection(("127.0.0.2", port), timeout=HANG_S).close()
    lines = (tmp_path / "said").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("towers: ")]
    assert "The dispatcher listens on all addresses of this machine" in line
    assert "firewall" in line


def test_a_service_without_workers_is_not_waited_for():
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer()
    with pytest.raises(ValueError, match=r"workers do not answer \(there are none"):
        check_data_service(dispatcher.target)
    config = service.WorkerConfig(dispatcher.target.removeprefix("grpc://"))
    worker = service.WorkerServer(config)
    check_data_service(dispatcher.target)
    worker.stop()
    # The dispatcher has not noticed.
    with pytest.raises(ValueError, match=r"workers do not answer \(localhost:"):
        check_data_service(dispatcher.target)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "Received no ROLE; expected it: What to run: dispatcher"),
        (["boss"], "Received boss; expected dispatcher or worker"),
        (["worker"], "Received --dispatcher=None for a worker; expected it"),
        (["dispatcher", "--dispatcher=a:1"], "--dispatcher=a:1 for a dispatcher"),
        (["worker", "--dispatcher=a"], "expected HOST:PORT, such as localhost:5050"),
        (["worker", "--dispatcher=a:b"], "expected HOST:PORT, such as localhost:5050"),
        (
            ["worker", "--dispatcher=localhost:1"],
            "no dispatcher answers at localhost:1",
        ),
    ],
)
def test_arguments_that_do_not_fit(args, message):
    done = warm.run("towers.input_pipeline.service", *args)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr

"""Processes that a program starts: which signals are sent to them."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import HANG_S
from towers.processes.child import Child

ROOT = Path(__file__).parents[3]
HANDLERS = {
    "handled": "lambda *_: print('heard', flush=True)",
    "ignored": "signal.SIG_IGN",
    "not handled": "signal.SIG_DFL",
}
CODE = "import signal; signal.signal(signal.SIGUSR1, {}); print('ready'); input()"


@pytest.mark.parametrize("how", HANDLERS)
def test_a_request_to_save_ends_no_process(tmp_path, caplog, how):
    ended = queue.SimpleQueue()
    log = tmp_path / "log"
    receive, send = os.pipe()
    command = sys.executable, "-c", CODE.format(HANDLERS[how])
    with open(receive) as stdin:
        child = Child(command, os.environ, ended.put, str(log), stdin=stdin)
    with open(send, "w") as goes_on:
        while "ready" not in log.read_text():
            assert ended.empty()
        child.signal(signal.SIGUSR1)
        while how == "handled" and "heard" not in log.read_text():
            assert ended.empty()
        goes_on.write("\n")
    assert ended.get(timeout=HANG_S).code == 0
    said = f"SIGUSR1 is not passed on to process {child.pid}, which does not handle it"
    assert (said in caplog.text) == (how == "not handled")


@pytest.mark.parametrize("program", ["train", "launch", "queue"])
def test_a_request_to_save_before_a_program_listens(tmp_path, program):
    # What is first imported once flags are read.
    (tmp_path / "psutil.py").write_text("import signal; signal.raise_signal(10)\n1/0")
    process = subprocess.run(
        [sys.executable, "-m", f"towers.{program}", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        timeout=HANG_S,
    )
    assert process.returncode >= 0
    assert "SIGUSR1 received: nothing is saved now, as no training" in process.stderr


def test_a_request_to_save_before_and_after_fit():
    code = (
        "import os, signal\n"
        "from towers.processes.signals import Signals\n"
        "signals = Signals()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "with signals:\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    assert signals.save\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SIGUSR1 received: nothing is saved now") == 2

"""What TensorFlow writes to standard error, and what is left of it."""

import subprocess
import sys
import textwrap

import pytest

from tests.limits import HANG_S
from towers.program import sieve

_PROGRAM = r"""
import os, sys
from towers.program import startup
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
startup._sift_from_now_on()
for line in sys.argv[1:]:
    os.write(2, line.encode() + b"\n")
"""
_RAISED = "W0000 00:00:1.2 3 op_kernel.cc:1845] UNKNOWN: RuntimeError: no file"
_FRAMES = """\
Traceback (most recent call last):

  File "/packages/script_ops.py", line 269, in __call__
    ret = func(*args)
          ^^^^^^^^^^^

  File "/home/mine.py", line 11, in batches
    open(
    "file")

RuntimeError: no file
of two lines


"""
_REMOTE = '''\
multiprocessing.pool.RemoteTraceback:
"""
Traceback (most recent call last):
  File "/home/mine.py", line 6, in __getitem__
    broken(i)
RuntimeError: no file
"""


The above exception was the direct cause of the following exception:


'''
_CAUSE = (
    "\n\nThe above exception was the direct cause of the following exception:\n\n\n"
)
_UNWANTED = {
    "an attribute": "E0000 00:00:1.2 3 node_def_util.cc:680] NodeDef mentions an "
    "attribute use_unbounded_threadpool which is not in the op definition: Op<name=Map"
    "Dataset> This may be expected if your graph generating binary is newer  than this "
    "binary. Unknown attributes will be ignored. NodeDef: {{node ParallelMap/_14}}",
    "an operation": "W0000 00:00:1.2 3 op_kernel.cc:1] OP_REQUIRES failed at x.cc:1 : "
    "UNKNOWN",
    "a node": "\t [[{{node PyFunc}}]]",
    "an error of Python's": f"{_RAISED}\n{_FRAMES}",
    "two of them": f"{_RAISED}\n{_FRAMES}{_RAISED}\n{_FRAMES}",
    "a second log of it": f"E0000 00:00:1.2 3 local_rendezvous.cc:4] {_RAISED}\n"
    + _FRAMES,
    "an error of a pool's process": f"{_RAISED}\n{_REMOTE}{_FRAMES}",
    "an error with a cause": f"{_RAISED}\n{_FRAMES.rstrip()}{_CAUSE}{_FRAMES}",
}
_WANTED = {
    "another line": "E0000 00:00:1.2 3 other.cc:1] something else",
    "a sentence": "a sentence of ours",
    "a traceback of a child": textwrap.dedent(
        """\
        Traceback (most recent call last):
          File "/home/mine.py", line 6, in work
            broken(i)
        RuntimeError: no file"""
    ),
    "a crash": 'Fatal Python error: Aborted\n\nThread 0x1:\n  File "x.py", line 1 in f',
}


@pytest.mark.parametrize("unwanted", _UNWANTED.values(), ids=_UNWANTED)
@pytest.mark.parametrize("wanted", _WANTED.values(), ids=_WANTED)
def test_lines_that_say_nothing_are_left_out(unwanted, wanted):
    text = "\n".join([wanted, unwanted, wanted, ""])
    seen = b"".join(sieve.sift(text.encode().splitlines(keepends=True)))
    assert seen.decode() == f"{wanted}\n{wanted}\n"


def test_the_process_that_does_so():
    lines = [*_UNWANTED.values(), *_WANTED.values()]
    command = [sys.executable, "-c", _PROGRAM, *lines]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.stderr == "\n".join([*_WANTED.values(), ""])


def test_a_line_is_seen_before_the_next_one():
    command = [sys.executable, "-I", "-S", sieve.__file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdin.write(b"first\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"first\n"
        process.stdin.close()


@pytest.mark.parametrize(
    "cut_off",
    [
        'Traceback (most recent call last):\n\n  File "a.py", line 1, in f\n',
        'Traceback (most recent call last):\n\n  File "a.py", line 1\n\nOSError: no\n',
        "W0000 00:00:1 2 op_kernel.cc:1] UNKNOWN: OSError: no\n"
        'multiprocessing.pool.RemoteTraceback: \n"""\nTraceback (most recent c\n',
    ],
    ids=["frames", "an error", "quotes"],
)
@pytest.mark.parametrize(
    "last",
    ["F0000 00:00:1 2 x.cc:3] Check failed: a == b\n", "Fatal Python error: A\n"],
)
def test_the_last_words_of_a_crash_are_seen(cut_off, last):
    lines = (cut_off + last).encode().splitlines(keepends=True)
    assert b"".join(sieve.sift(lines)).endswith(last.encode())

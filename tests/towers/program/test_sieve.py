"""What TensorFlow writes to standard error, and what is left of it."""

import subprocess
import sys

_PROGRAM = r"""
import os, sys
from towers.program import startup
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
startup._sift_from_now_on()
for line in sys.argv[1:]:
    os.write(2, line.encode() + b"\n")
"""
_UNWANTED = (
    "E0000 00:00:1.2 3 node_def_util.cc:680] NodeDef mentions attribute "
    "use_unbounded_threadpool which is not in the op definition: Op<name=MapDataset> "
    "This may be expected if your graph generating binary is newer  than this binary. "
    "Unknown attributes will be ignored. NodeDef: {{node ParallelMapDatasetV2/_14}}",
    "W0000 00:00:1.2 3 op_kernel.cc:1] OP_REQUIRES failed at x.cc:1 : UNKNOWN",
)
_WANTED = ("E0000 00:00:1.2 3 other.cc:1] something else", "a sentence of ours")


def test_lines_that_say_nothing_are_left_out():
    command = [sys.executable, "-c", _PROGRAM, *_UNWANTED, *_WANTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines() == [*_WANTED]

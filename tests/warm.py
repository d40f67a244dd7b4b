"""Commands of ours in processes that have TensorFlow imported already: 2 s less each.

Python's fork server imports it once, before it has any device or thread of its own, and
forks from there. What a test does to a process (signals, a terminal) needs a real one.
"""

import gc
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["keras"])


def run(
    module: str,
    *flags: object,
    timeout_s: float,
    changed: Mapping[str, object] | None = None,
) -> subprocess.CompletedProcess:
    """Does what `python -m module flags` does, without GPUs, nor functions at exit.

    `changed` holds what is set before, such as {"module.NAME": 1}.
    """
    args = [module, *map(str, flags)]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, name) for name in ("out", "err")]
        process = _server.Process(target=_be, args=(args, changed or {}, *files))
        # The server has the environment of its first start, and hands it on.
        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1"):
            process.start()
        process.join(timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
        out, err = (Path(file).read_text() for file in files)
    return subprocess.CompletedProcess(args, process.exitcode, out, err)


def _be(args, changed, out, err):
    for stream, file in ((sys.stdout, out), (sys.stderr, err)):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, stream.fileno())
    gc.freeze()  # TensorFlow and Keras stay
    os.chdir(ROOT)
    sys.argv[:] = args
    for name, value in changed.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)
    runpy.run_module(args[0], run_name="__main__", alter_sys=True)

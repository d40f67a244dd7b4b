"""A contender: how fast it could be, in C, with libjpeg-turbo and two processes.

Each decodes no more than the crop, right into a batch in memory that both sides see.
"""

import contextlib
import ctypes
import hashlib
import mmap
import multiprocessing
import os
import pathlib
import subprocess
import tempfile
from multiprocessing import connection

import numpy as np

from ..works import WORKS

_PROCESSES = 2
_BATCHES = 3  # that a process may be ahead
_SOURCE = pathlib.Path(__file__).with_suffix(".c")


def batches(contender, work, folder):
    """Yields batches for ever; each is overwritten after the next one."""
    library = build(folder)
    paths = sorted((folder / "folder").glob("*/*.jpg"))
    jpegs = [path.read_bytes() for path in paths]
    classes = [path.parent.name for path in paths]
    labels = np.unique(classes, return_inverse=True)[1].astype(np.int64)
    shape = (_PROCESSES, _BATCHES, WORKS[work].batch, *WORKS[work].shape)
    memory = mmap.mmap(-1, int(np.prod(shape)))
    images = np.frombuffer(memory, np.uint8).reshape(shape)
    # It is in C already; a fork takes the JPEGs along.
    context = multiprocessing.get_context("fork")
    processes = {}
    for number in range(_PROCESSES):
        ours, theirs = context.Pipe()
        arguments = library, jpegs, images[number], theirs, number
        process = context.Process(target=_fill, args=arguments, daemon=True)
        process.start()
        theirs.close()
        processes[ours] = number, process
    try:
        for ours in processes:
            for slot in range(_BATCHES):
                ours.send(slot)
        while True:
            for ours in connection.wait(list(processes)):
                slot, chosen = ours.recv()
                yield images[processes[ours][0], slot], labels[chosen]
                ours.send(slot)
    finally:
        for _, process in processes.values():
            process.terminate()
            process.join()


def build(folder: pathlib.Path) -> str:
    """Compiles the library, on first use.

    Raises:
        ValueError: If it cannot be compiled.
    """
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]
    library = folder / f"limit-{digest}.so"
    if library.exists():
        return str(library)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = os.path.join(temporary, "limit.so")
        options = "-O3", "-march=native", "-shared", "-fPIC"
        command = ["cc", *options, str(_SOURCE), "-o", made, "-ljpeg", "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise ValueError(
                f"It needs a C compiler and libjpeg-turbo's headers, but cc said "
                f"{said.strip().splitlines()[0]!r}; install them, such as by apt "
                "install gcc libjpeg62-turbo-dev."
            ) from None
        os.replace(made, library)
    return str(library)


def _fill(library, jpegs, images, parent, number):
    """Is one of the processes: fills the batches that it is told to."""
    crop = ctypes.CDLL(library).crop_batch
    random = np.random.default_rng(number)
    state = ctypes.c_uint64(number + 1)
    order = np.array([], np.int64)
    batch, height, width, _ = images[0].shape
    with contextlib.suppress(EOFError):
        while True:
            slot = parent.recv()
            while len(order) < batch:
                order = np.concatenate([order, random.permutation(len(jpegs))])
            chosen, order = order[:batch], order[batch:]
            crop(
                (ctypes.c_char_p * batch)(*(jpegs[i] for i in chosen)),
                (ctypes.c_ulong * batch)(*(len(jpegs[i]) for i in chosen)),
                batch,
                height,
                width,
                ctypes.byref(state),
                images[slot].ctypes.data_as(ctypes.c_void_p),
            )
            parent.send((slot, chosen))

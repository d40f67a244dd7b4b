"""Reads a data set through a local store, and prints what came and what was read.

    python -m tests.input_pipeline.local_store.fill SPEC FOLDER DELAY_MS EPOCHS GB READS

Reading a block from where it lies takes DELAY_MS more. If READS is given, the process
is killed within three DELAY_MS after so many of these reads began.
"""

import hashlib
import itertools
import os
import random
import signal
import sys
import threading
import time

from towers.input_pipeline import LocalStore, make_dataset, open_source
from towers.input_pipeline.local_store import store


def digest(source, epochs, split="train"):
    """A digest of all batches of some epochs, in their order."""
    data = make_dataset(source, split, 16, image_shape=(8, 8, 3), shuffle_mb=1)
    found = hashlib.sha256()
    for _ in range(epochs):
        for batch in data:
            for part in batch:
                found.update(part.numpy().tobytes())
    return found.hexdigest()


def main():
    """Does what the module says."""
    spec, folder, delay_ms, epochs, limit_gb, *reads = sys.argv[1:]
    read_range, delay_s = store.read_range, float(delay_ms) / 1000
    number, last = itertools.count(), int(reads[0]) if reads else None

    def count():
        if next(number) == last:
            kill = os.kill, [os.getpid(), signal.SIGKILL]
            killer = threading.Timer(random.uniform(0.0, 3 * delay_s), *kill)
            killer.daemon = True
            killer.start()

    def late(*where):
        count()
        time.sleep(delay_s)
        return read_range(*where)

    store.read_range = late
    count()
    local_store = LocalStore(folder, float(limit_gb), tell=print)
    source = open_source(spec, local_store=local_store)
    print(digest(source, int(epochs)))
    local_store.close()
    print("remote", local_store.remote_blocks, local_store.remote_bytes)


if __name__ == "__main__":
    main()

"""Runs towers.train and kills it, as kill -9 does, where it has a checkpoint.

python -m tests.towers.train.dies EPOCH FLAGS...    not before so many epochs
"""

import os
import re
import runpy
import signal
import sys

from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import store


def _is_saved(latest: str | None, epoch: int) -> bool:
    """Tells whether there is a checkpoint of the middle of an epoch."""
    paths = store.find(os.path.dirname(latest)) if latest else ()
    names = map(os.path.basename, paths)
    places = (re.fullmatch(r"ckpt-(\d+)-(\d+)", name) for name in names)
    return any(int(place[1]) == epoch and int(place[2]) for place in places)


def main() -> None:
    """Runs it."""
    epoch = int(sys.argv.pop(1))
    end_batch = Checkpoint.on_train_batch_end

    def end_or_die(self, batch, logs=None):
        end_batch(self, batch, logs)
        if _is_saved(self.latest, epoch):
            os.kill(os.getpid(), signal.SIGKILL)

    Checkpoint.on_train_batch_end = end_or_die
    runpy.run_module("towers.train", run_name="__main__")


if __name__ == "__main__":
    main()

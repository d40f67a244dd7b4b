"""Runs towers.train and kills it, as kill -9 does, while it stores a checkpoint.

python -m tests.towers.train.dies_storing NAME FLAGS...    NAME as in ckpt-1-3
"""

import os
import runpy
import signal
import sys

from towers.lifecycle.remote_run import RemoteRun


def main() -> None:
    """Runs it: all objects of the checkpoint are there but the last."""
    name = sys.argv.pop(1)
    put = RemoteRun._put

    def put_or_die(self, objects):
        put(self, objects)
        if any(f"/{name}." in stored for stored in objects.values()):
            os.kill(os.getpid(), signal.SIGKILL)

    RemoteRun._put = put_or_die
    runpy.run_module("towers.train", run_name="__main__")


if __name__ == "__main__":
    main()

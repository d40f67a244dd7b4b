"""Trains by this process's flags; prints how many operations TensorFlow runs at once.

The threads that a process has in all are no measure: tf.data makes pools of them and
ends old ones when it likes.
"""

import contextlib
import runpy
import sys

if __name__ == "__main__":
    with contextlib.suppress(SystemExit):
        sys.argv[0] = "towers.train"
        runpy.run_module("towers.train", run_name="__main__", alter_sys=True)
    import tensorflow as tf

    print(tf.config.threading.get_inter_op_parallelism_threads(), flush=True)

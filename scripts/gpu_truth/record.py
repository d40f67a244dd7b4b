"""Records a profile of a contender's steps, and tells what the GPU did in them.

python -m scripts.gpu_truth.record --work=mlp --contender=towers --output=DIR
"""

import contextlib
import gzip
import importlib
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from ..bench.contenders import parse
from ..bench.worker import Job
from ..bench.works import WORKS
from . import trace

FLAGS = flags.FLAGS

flags.DEFINE_enum("work", "mlp", [*WORKS], "What to train.")
flags.DEFINE_string("contender", "towers:parameter_server", "Who trains.")
flags.DEFINE_integer("towers", 2, "Towers.")
flags.DEFINE_integer("gpu_memory_limit_mb", 4096, "Memory of a logical GPU, in MB.")
flags.DEFINE_integer("steps", 5, "Steps to record.", lower_bound=1)
flags.DEFINE_string("output", None, "Folder for the trace and figures.", required=True)


class _RecordedError(Exception):
    """Ends training."""


class Recorder:
    """Takes the place of a contender's clock: warms up, records, and ends training."""

    def __init__(self, job: Job, steps: int, folder: pathlib.Path):
        """Makes a recorder of `steps` steps, whose trace is to be in `folder`."""
        self.memory_mb = self.on_turn = None
        self._first = 1 + job.warmup
        self._last = self._first + steps
        self._folder, self._calls = str(folder), 0

    def start(self) -> None:
        """Is called just before the model is built."""

    def call_ended(self) -> None:
        """Begins or ends the record, if it is time.

        Raises:
            _RecordedError: When the record is written.
        """
        import tensorflow as tf

        self._calls += 1
        if self._calls == self._first:
            tf.profiler.experimental.start(self._folder)
        elif self._calls == self._last:
            tf.profiler.experimental.stop()
            raise _RecordedError


def main(argv: Sequence[str]) -> None:
    """Records, reads and writes."""
    from towers.keras_adapter.runtime import XSpace

    output = pathlib.Path(FLAGS.output)
    try:
        contender = parse(FLAGS.contender)
    except ValueError as error:
        sys.exit(str(error))
    if contender.steps_per_call > 1:
        sys.exit(f"Received {FLAGS.contender}; expected one step a call.")
    job = Job(
        FLAGS.contender,
        FLAGS.work,
        FLAGS.towers,
        warmup=WORKS[FLAGS.work].warmup,
        steps=FLAGS.steps,
        gpu_memory_limit_mb=FLAGS.gpu_memory_limit_mb,
    )
    module = importlib.import_module(f"scripts.bench.peers.{contender.kind.module}")
    with contextlib.suppress(_RecordedError):
        module.run(job, Recorder(job, FLAGS.steps, output / "trace"))
    recorded = max((output / "trace").glob("**/*.xplane.pb")).read_bytes()
    (output / "xplane.pb.gz").write_bytes(gzip.compress(recorded))
    space = XSpace.FromString(recorded)
    figures = {
        gpu: trace.read(each, FLAGS.steps)
        for gpu, each in trace.events(space).items()
        if each
    }
    if not figures:
        print("The profiler recorded no GPU.")
    text = json.dumps(figures, indent=1)
    (output / "trace.json").write_text(text)
    print(text)


if __name__ == "__main__":
    app.run(main)

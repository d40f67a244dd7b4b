"""Trains several runs, each on a device of its own, until all have ended.

    python -m towers.queue runs/*.flags --devices=2
    python -m towers.queue --sweep learning_rate=1e-3,1e-2 --sweep model=mlp,cnn

A file has flags of towers.train, such as the flags.txt of a run. Flags of towers.train
that are given here are for all runs. A run that fails does not stop the others. Ctrl-C
has all save. Started again with the same command, the queue goes on: runs that have
ended are left alone, others continue from their checkpoints. Where Ray is installed,
Ray Tune starts the runs; otherwise, each device trains one after another.
Exit codes: 0 all runs have ended well; 1 one has failed, or a flag is wrong; 130
stopped by Ctrl-C; 143 by SIGTERM.
"""

import dataclasses
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from towers.processes import signals
from towers.processes.strays import Strays
from towers.program import startup, voice, words
from towers.program.commands import fail
from towers.queue import entry as states
from towers.queue import (
    queue_flags,
    record,
    runs,
    schedule,
    sequential,
    slots,
    table,
)
from towers.queue.entry import Entry
from towers.queue.queue_flags import QueueOptions
from towers.train.settings import DIFFERING

_PROGRAM = "towers.queue"


def main(argv: Sequence[str]) -> int:
    """Runs all, and returns the exit code once the last one has ended."""
    signals.raise_at_ctrl_c()
    # The runs do not end with who reads this, nor with room on the disk.
    sys.stdout, sys.stderr = map(startup.outlive, (sys.stdout, sys.stderr))
    try:
        options = queue_flags.read(argv, __doc__)
        with record.alone(options.queue_dir):
            return _run(options)
    except KeyboardInterrupt:
        return 130  # before there was anything to stop
    except (ValueError, OSError) as error:
        return fail(error, _PROGRAM)


def _run(options: QueueOptions) -> int:
    strays = Strays(name=record.MARK)
    noted = record.Record(options.queue_dir)
    noted.begin(strays)
    entries = schedule.entries(options.runs, noted, options.scheduler)
    environ = {**strays.mark, DIFFERING: ",".join(runs.differing(options.runs))}
    if all(entry.state != states.WAITING for entry in entries):
        options = dataclasses.replace(options, ray_tune=False)
    if options.ray_tune:
        from towers.queue.on_ray import driver  # imports Ray

        share = driver.connect(options)
        queue = driver.RayQueue(entries, share, noted, environ, options, strays)
    else:
        share = slots.of_this_machine(options.devices, options.runs_per_gpu)
        environ = {**os.environ, **environ}
        queue = sequential.Sequential(entries, share, noted, environ)
    share.check(options.runs)
    voice.say(_begin(entries, share, options))
    shown = table.to(sys.stderr)
    schedule.run(queue, strays, signals.listen, shown)
    shown.end()
    print("\n".join(table.final(entries)))
    code = _end(entries, queue.stopped)
    if queue.is_cut_off:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _begin(entries: Sequence[Entry], share: slots.Slots, options: QueueOptions) -> str:
    """Says what will run where."""
    waiting = sum(entry.state == states.WAITING for entry in entries)
    where = ", ".join(map(str, share.devices))
    if options.ray_tune:
        where = f"Ray, {words.count(len(share.devices), 'device')} at once"
    said = f"{words.count(waiting, 'run')} on {where}"
    if options.runs_per_gpu > 1:
        said += f", {options.runs_per_gpu} at once on each"
    if done := len(entries) - waiting:
        said += f"; {words.count(done, 'run')} finished before"
    return f"{said}."


def _end(entries: Sequence[Entry], stopped: int | None) -> int:
    """Says how it has ended, and what to do next; returns the exit code."""
    folder = os.path.commonpath([entry.run.model_dir for entry in entries])
    print(f"TensorBoard: tensorboard --logdir {shlex.quote(table.shown_path(folder))}")
    failed = [entry.run.name for entry in entries if entry.state == states.FAILED]
    left = {entry.state for entry in entries} & {states.WAITING, states.STOPPED}
    if stopped and left:
        by = "Ctrl-C" if stopped == signal.SIGINT else signal.Signals(stopped).name
        fail(
            f"Stopped by {by}: {table.counts(entries)} Start the same command again to "
            "continue.",
            _PROGRAM,
        )
        return 128 + (stopped if stopped == signal.SIGINT else signal.SIGTERM)
    if failed:
        return fail(
            f"{len(failed)} of {words.count(len(entries), 'run')} failed: "
            f"{', '.join(failed)}; start the same command again to try them again.",
            _PROGRAM,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))

"""Trains a model on towers and saves it. Run it again to continue an interrupted run.

    python -m towers.train --model=resnet20 --dataset=tfds:cifar10 --num_gpus=2

--flagfile=FILE reads flags from a file, such as the flags.txt of an earlier run.
Exit codes: 0 done; 1 error; 3 a loss, gradient or variable was not finite; 4 stood
still, with --on_stall=stop; 130 stopped by Ctrl-C; 143 stopped by SIGTERM.
"""

import re

# The command-line door: flags become settings, settings a job, and the job runs.

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.program import startup, voice
    from towers.train import checks, flags

    _settings = startup.begin(
        "towers.train",
        lambda argv: checks.check_model_dir(flags.read(argv, __doc__)),
        stopped="Stopped by Ctrl-C: nothing was saved yet.",
    )

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator

import tensorflow as tf

from towers import input_pipeline
from towers.hosts import group
from towers.hosts.group import HostFailedError, HostsDifferError
from towers.lifecycle.checkpoints.manager import SaveError
from towers.lifecycle.continuing.resume import OtherDataError, ResumeError
from towers.numerics.errors import NotFinite
from towers.processes.signals import Stopped
from towers.program import ending, startup, voice
from towers.program.commands import fail, quieten
from towers.program.features import feature
from towers.program.object_store import StoreError
from towers.tower.errors import ModelError
from towers.train import checks, continued
from towers.train.callbacks import UnknownMonitorError
from towers.train.job import Job, assemble
from towers.train.outputs import files
from towers.train.run import run
from towers.train.settings import Settings

_PROGRAM = "towers.train"
_IN_A_SENTENCE = (
    *(HostsDifferError, ModelError, ResumeError, SaveError, UnknownMonitorError),
    StoreError,
)
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)')
_FIRST = "Traceback (most recent call last):"
_PACKAGES = ("/site-packages/", "/dist-packages/")


def main(settings: Settings) -> int:
    """Runs a job, of checked settings, to its end; returns the exit code."""
    ending.stop_at_sigterm()
    quieten()
    # Where their number is unknown, batches are taken until there are no more.
    warnings.filterwarnings("ignore", "Your input ran out of data")
    job = None
    try:
        startup.end()
        # Only one of several hosts writes: which one this is has to be known.
        group.join_as_started("auto")
        # First of all: what is read of a run is what nobody else changes.
        if settings.eval_only and settings.remote_model_dir:
            copy = feature("lifecycle.remote_run").fetched(settings.remote_model_dir)
            settings = settings.but(model_dir=copy)
        with group.together(), _alone(settings):
            job = assemble(settings)
            with job.data.blaming():
                run(job)
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt as stop:
        return _say_stopped(job, *ending.cause_of(stop))
    except HostFailedError as error:
        voice.end_progress_bar()
        fail(error, _PROGRAM)
        return ending.ANOTHER_FAILED
    except NotFinite as error:
        fail(error, _PROGRAM)
        return 3
    except input_pipeline.BadRecordError as error:
        # What TFDS has prepared, it prepares again; and most are not to be left out.
        skips = settings.skips_bad or "tfds" in (settings.dataset or "") or error.many
        hint = "" if skips else "; to train without it, give --bad_records=skip"
        return fail(f"{str(error).removesuffix('.')}{hint}", _PROGRAM)
    except OtherDataError as error:
        return fail(continued.with_flags(error, settings), _PROGRAM)
    except _IN_A_SENTENCE as error:
        return fail(error, _PROGRAM)
    except (ValueError, OSError, tf.errors.OpError) as error:
        if said := raised_in_graph(str(error)):
            voice.end_progress_bar()
            return fail(f"an error was raised at {said}", _PROGRAM)
        # While setting up, what goes wrong is the user's input, and said in one
        # sentence. Later, it is worth a traceback.
        if job is not None:
            raise
        return fail(error, _PROGRAM)
    finally:
        # All is saved and said. Python ends for some time yet, and a signal then would
        # make a failure of it, or a traceback.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        # A half-read epoch ends here: TensorFlow warns if Python has gone before it.
        gc.collect()
    return 0


@contextlib.contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """Inside, no other run writes to the model_dir, if this process may write there."""
    # Not by `this_host`, which would have TensorFlow make the devices, before it knows
    # which ones.
    hosts = group.joined()
    if settings.eval_only or (hosts is not None and hosts.rank > 0):
        yield
        return
    checks.check_model_dir(settings)
    with files.alone(settings.absolute_model_dir), contextlib.ExitStack() as stack:
        if address := settings.remote_model_dir:
            kept = feature("lifecycle.remote_run").kept
            stack.enter_context(kept(address, settings.absolute_model_dir))
        yield


def _say_stopped(job: Job | None, cause: str, code: int) -> int:
    """Says that a signal has ended the run, and returns the exit code."""
    saved = job and job.checkpoint.latest
    if saved:
        again = f"the last checkpoint is {saved}; run again to continue from it"
    else:
        again = "nothing was saved yet"
    voice.end_progress_bar()
    fail(f"Stopped by {cause}: {again}.", _PROGRAM)
    if job is None:
        # A data set may be on its way, which Python would wait for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def raised_in_graph(message: str) -> str | None:
    """Finds the user's line in the message of an error of TensorFlow's.

    Args:
        message: of the error. TensorFlow writes Python's traceback into it, among its
            own nodes.

    Returns:
        A sentence with file, line and error; None where no user's code has raised one.
    """
    _, begun, rest = message.partition(_FIRST)
    if not begun:
        return None
    frames, error = [], ""
    for line in rest.splitlines():
        if frame := _FRAME.match(line):
            frames.append(frame)
        elif frames and line and not line.startswith((" ", "\t")):
            error = line
            break
    own = [frame for frame in frames if not any(p in frame["path"] for p in _PACKAGES)]
    if not own or not error:
        return None
    path, line, name = own[-1].group("path", "line", "name")
    return f"{path}:{line}, in {name}: {error}"


if __name__ == "__main__":
    startup.leave(main(_settings))

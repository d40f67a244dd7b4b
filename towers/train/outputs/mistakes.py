"""Shows the mistakes of a run's best model: its confusion matrix and worst images.

A run looks for them after it has saved everything else. A run that is killed meanwhile
has lost nothing, and draws them when it is started again.
"""

import contextlib
import os
from typing import Any

import tensorflow as tf
from PIL import Image

from towers.collectives.joined_hosts import this_host
from towers.hosts.group import HostFailedError
from towers.monitoring.tensorboard import AFTER_TRAINING
from towers.monitoring.tensorboard.pictures import (
    MOST_EXAMPLES,
    Classes,
    Mistakes,
    draw_mistakes,
    find_mistakes,
    write_mistakes,
)
from towers.program import voice, whole_file, words
from towers.train.job import Job
from towers.train.parts.training import averaged

NAME = "mistakes.png"


def show(job: Job, best: dict[str, Any] | None) -> str | None:
    """Writes mistakes.png, and the same to TensorBoard.

    All hosts have to call this function, as they predict together.

    Args:
        job: A run that is saved.
        best: Its best model, as summary.json describes it; `None` for the last one.

    Returns:
        Where the picture is, and how many mistakes there are; `None` if the model
        chooses no class, or the mistakes cannot be shown, which is said.
    """
    if not _chooses_class(job):
        return None
    path = os.path.join(job.model_dir, NAME)
    try:
        mistakes = _find(job, best)
        _write(job, path, mistakes)
    except HostFailedError:
        raise
    except Exception as error:  # Any error: the run is done, and saved.
        reason = words.error_line(error).rstrip(".")
        voice.warn(f"The mistakes of the model are not shown in {path}: {reason}.")
        return None
    whose = ", by the best model" if best else ""
    return f"{path}: {_counted(job, mistakes.confusions)}{whose}"


def _chooses_class(job):
    """Tells whether the model chooses one of several classes, of data that we read."""
    task = job.setup.task
    plain = not job.setup.defines("preprocess")
    chooses = task is not None and (task.kind, task.of_classes) == ("class", True)
    return chooses and plain and job.settings.dataset is not None


def _find(job, best) -> Mistakes:
    # Only the first host has checkpoints, and hosts may divide variables.
    path = this_host().send_files(best and best["checkpoint"], job.model_dir)
    with contextlib.ExitStack() as stack:
        if path is not None:
            stack.enter_context(job.checkpoint.as_in(path, job.model))
        stack.enter_context(averaged(job.settings, job.model))
        return find_mistakes(job.parallel.predict_on_batch, job.data.evaluation)


def _write(job, path, mistakes):
    classes = Classes(job.setup.facts.class_names)
    # A run that was killed meanwhile has left one, and perhaps nothing else is written.
    whole_file.remove_unfinished(path)
    with whole_file.opened(path, "wb") as file:
        Image.fromarray(draw_mistakes(mistakes, classes)).save(file, "PNG")
    folder = os.path.join(job.model_dir, "train")
    writer = tf.summary.create_file_writer(folder, filename_suffix=AFTER_TRAINING)
    with writer.as_default(job.step):
        write_mistakes(mistakes, classes)
    writer.close()


def _counted(job, confusions):
    """Says how many mistakes there are, of how many examples."""
    source, split = job.data.evaluated
    size, examples = source.splits[split], confusions.examples
    is_part = size != examples
    if size is None:
        is_part = job.data.eval_batches is not None or examples >= MOST_EXAMPLES
    kind, first, drawn = "validation", "the first " if is_part else "", ""
    if job.data.held_out is None:
        kind, first, drawn = "training", "", ", drawn at random" if is_part else ""
    counted = words.count(examples, f"{kind} example")
    return f"{confusions.mistakes:,} of {first}{counted}{drawn}"

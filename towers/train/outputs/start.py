"""Says what a run is as it begins: what will run where, and on which versions."""

import collections
import os
import platform
import shutil
import subprocess
import unicodedata
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from towers.keras_adapter.variables import bytes_of
from towers.program import words
from towers.program.features import feature
from towers.train import continued
from towers.train.job import BAD_RECORDS, Job
from towers.train.outputs import files
from towers.train.parts.task import described
from towers.train.settings import NAMES, OWN_NAMES, is_given

# Of more groups of classes that may be meant for one, only their number is said.
_MOST_ALIKE = 3
# What Keras lays its summary out for, where there is no terminal.
_WIDTH = 80
_DRIVER = Path("/proc/driver/nvidia/version")


def text(job: Job) -> str:
    """Says what will run where."""
    data, settings = job.data, job.settings
    lines = [
        job.table(),
        f"Model {settings.model}: {size_text(job.model)}.",
        *job.notes,
        _data_line(job),
        _own_line(job),
        *data_notes(job),
    ]
    if data.bad_records:
        path = os.path.join(job.model_dir, BAD_RECORDS)
        lines.append(
            f"Bad records: {data.bad_records:,} passed over, listed in {path}."
        )
    if data.examples is not None and data.examples < job.batch_size:
        lines.append("Note: the batch is larger than the data, so an epoch is a step.")
    lines += continued.text(settings, job.checkpoint, job.model)
    if job.checkpoint.latest and (before := files.read(job, "flags.txt")):
        trains = not (settings.eval_only or job.is_finished)
        names = continued.OF_THE_INPUT if settings.eval_only else NAMES
        lines.append(continued.changed_flags(before, settings, trains, names))
    return "\n".join(filter(None, lines))


def _data_line(job):
    data, setup = job.data, job.setup
    parts = [setup.facts.text(data.examples)]
    if setup.facts.target is not None and setup.facts.target.size:
        parts.append(described(setup.facts.target))
    if setup.task is None:
        parts.append(f"trained by loss of {setup.mine.path.name}")
    elif setup.task.name != "classification":
        # Of this one, the classes tell.
        parts.append(f"task {setup.task.name}")
    if data.note:
        parts.append(data.note)
    return f"Data {setup.facts.name}: {', '.join(parts)}."


def _own_line(job):
    """Says what the user's file defines beside the model."""
    defined = [name for name in OWN_NAMES if job.setup.defines(name)]
    if not defined:
        return None
    text = f"Of {job.setup.mine.path.name}: {', '.join(defined)}"
    if "preprocess" in defined and job.setup.facts.has_images:
        text += "; after preprocess, images that are still bytes become [-1, 1]"
    return f"{text}."


def data_notes(job: Job) -> list[str]:
    """Says what was decided about the data, and which flags change nothing."""
    target, notes = job.setup.facts.target, [*job.data.notes()]
    if target is not None and (target.kind, target.size) == ("class", 1):
        notes.append("Note: All labels are of one class, so any model is always right.")
    notes += _alike_notes((target and target.class_names) or ())
    if job.data.held_out is None:
        notes.append(
            f"There is no validation data, so {_evaluated_text(job)} evaluated, and "
            f"the best epoch has the {continued.best_text(job.settings)}; "
            + ("--eval_dataset names" if job.settings.dataset else "eval_data gives")
            + " validation data."
        )
    elif job.settings.dataset is not None:
        notes += _validation_notes(job, *job.data.held_out)
    return notes if job.settings.dataset is None else notes + _idle_notes(job)


def _evaluated_text(job):
    """Says how much of the training data is evaluated, up to the verb."""
    batches = job.data.eval_batches
    if batches is None:
        return "the training data is"
    most = words.count(batches * job.batch_size, "training example")
    drawn = ", drawn at random," if job.settings.dataset is not None else ""
    return f"{most} at most{drawn} are"


def _alike_notes(names):
    """Says which names of classes may be meant for one."""
    by_form = collections.defaultdict(list)
    for name in names:
        form = unicodedata.normalize("NFC", " ".join(name.split()))
        by_form[form.casefold()].append(repr(name))
    alike = [some for some in by_form.values() if len(some) > 1]
    lines = [
        f"The classes {', '.join(some[:-1])} and {some[-1]} differ only in upper and "
        "lower case, in spaces, or in how an accent is written; if they are one class, "
        "give it one name."
        for some in alike[:_MOST_ALIKE]
    ]
    if more := len(alike) - len(lines):
        lines.append(f"So do {words.count(more, 'more group')} of classes.")
    return lines


def _validation_notes(job, held_out, split):
    notes = []
    if job.settings.eval_dataset is not None:
        notes += [f"{held_out.name}: {note}" for note in held_out.notes]
        names = job.data.source.class_names, held_out.class_names
        if names.count(None) == 1:
            first = (names[0] or names[1])[0]
            notes.append(
                "Note: Only one of training and validation data has names of "
                f"classes, so {first!r} in one is taken for label 0 in the other."
            )
    examples = words.counted(held_out.splits[split], "example")
    steps, batch = job.settings.eval_steps, job.batch_size
    if steps is not None:
        examples += f", of which the first {steps * batch:,} at most are evaluated"
    return [*notes, f"Validation {held_out.name}: {examples}."]


def _idle_notes(job):
    """Says which flags change nothing."""
    source, settings = job.data.source, job.settings
    idle = []
    if not settings.uses_data_dir:
        idle.append(("data_dir", "only digits and tfds: keep files there"))
    if not source.has_buffer:
        idle.append(("shuffle_mb", "the records are shuffled completely"))
    notes = [
        f"Note: {settings.as_flag(name)} changes nothing, as {why}."
        for name, why in idle
        if is_given(settings, name)
    ]
    folder = settings.cache_dir and os.path.expanduser(settings.cache_dir)
    if folder and not source.note.endswith(f"kept in {folder}"):
        notes.append(f"Note: {settings.as_flag('cache_dir')} changes nothing here.")
    return notes


def size_text(model: keras.Model) -> str:
    """Returns the number of a model's parameters, and the memory that they take."""
    size = sum(map(bytes_of, model.weights))
    return f"{words.count(model.count_params(), 'parameter')} ({words.size(size)})"


def summary_text(model: keras.Model) -> str:
    """Returns a model's size and Keras's summary, as lines for a font of one width."""
    # Keras counts the optimizer's variables among the parameters.
    lines = [size_text(model)]
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    model.summary(line_length=width, print_fn=lines.append)
    return "\n".join(lines)


def versions() -> dict[str, str]:
    """Returns versions by what they are of; what is not there is left out."""
    built = feature("doctor.gpus.built").of_tensorflow()
    found = {
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "NumPy": np.__version__,
        # What TensorFlow was built for.
        "CUDA": built.get("cuda_version", ""),
        "cuDNN": built.get("cudnn_version", ""),
        "NVIDIA driver": _first_line(_DRIVER),
        "System": platform.platform(),
        "Host": platform.node(),
        "Commit": _commit(),
    }
    return {name: version for name, version in found.items() if version}


def _first_line(path):
    return path.read_text().partition("\n")[0] if path.exists() else ""


def _commit():
    """The commit of the working directory, where that is under version control."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""

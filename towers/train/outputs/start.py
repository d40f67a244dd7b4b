"""The first lines of a run: what will run where, and what was decided for it."""

import os

from towers import devices
from towers.input_pipeline.sources.base import StreamSource
from towers.program import words
from towers.train import continued
from towers.train.job import BAD_RECORDS, Job
from towers.train.outputs import files, model_size
from towers.train.settings import DEFAULTS


def text(job: Job) -> str:
    """Says what will run where."""
    data, settings = job.data, job.settings
    lines = [
        devices.table(job.devices, job.sizes),
        f"Model {settings.model}: {model_size.size_text(job.model)}.",
        *job.notes,
        _data_line(job),
        *data_notes(job),
    ]
    if data.bad_records:
        path = os.path.join(job.model_dir, BAD_RECORDS)
        lines.append(
            f"Bad records: {data.bad_records:,} passed over, listed in {path}."
        )
    if data.examples is not None and data.examples < settings.batch_size:
        lines.append("Note: the batch is larger than the data, so an epoch is a step.")
    lines += continued.text(settings, job.checkpoint, job.model)
    if job.checkpoint.latest and not settings.eval_only:
        before = files.read(job, "flags.txt")
        trains = not job.is_finished
        lines.append(before and continued.changed_flags(before, settings, trains))
    return "\n".join(filter(None, lines))


def _data_line(job):
    source, shape = job.data.source, job.data.image_shape
    what = "training image", f" of {'x'.join(map(str, shape))}"
    if len(shape) == 1:
        what = "row", f" of {words.count(shape[0], 'number')} to train on"
    return (
        f"Data {source.name}: {counted(job.data.examples, what[0])}{what[1]}, "
        f"{words.count(source.num_classes, 'class', 'classes')}"
        f"{source.note and f', {source.note}'}."
    )


def counted(number: int | None, noun: str) -> str:
    """Says how many there are, or that this is unknown."""
    if number is None:
        return f"an unknown number of {noun}s"
    return words.count(number, noun)


def data_notes(job: Job) -> list[str]:
    """Says what was decided about the data, and which flags change nothing."""
    source = job.data.source
    notes = [*source.notes]
    if source.num_classes == 1:
        notes.append("Note: All labels are of one class, so any model is always right.")
    if job.data.held_out is None:
        notes.append(
            "There is no validation data, so the training data is evaluated, and the "
            f"best epoch has the {continued.best_text(job.settings)}; --eval_dataset "
            "names validation data."
        )
    else:
        notes += _validation_notes(job, *job.data.held_out)
    return notes + _idle_notes(job)


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
    examples = counted(held_out.splits[split], "example")
    return [*notes, f"Validation {held_out.name}: {examples}."]


def _idle_notes(job):
    """Which flags change nothing."""
    source, settings = job.data.source, job.settings
    idle = []
    if not settings.uses_data_dir:
        idle.append(("data_dir", "only digits and tfds: keep files there"))
    if not isinstance(source, StreamSource):
        idle.append(("shuffle_mb", "the records are shuffled completely"))
    if settings.bad_records != "skip":
        idle.append(("max_bad_records", "no bad record is skipped"))
    notes = [
        f"Note: {settings.as_flag(name)} changes nothing, as {why}."
        for name, why in idle
        if getattr(settings, name) != getattr(DEFAULTS, name)
    ]
    folder = settings.cache_dir and os.path.expanduser(settings.cache_dir)
    if folder and not source.note.endswith(f"kept in {folder}"):
        notes.append(f"Note: {settings.as_flag('cache_dir')} changes nothing here.")
    return notes

"""Continues a run of towers.train: what it restores, and what has changed."""

import functools
import os
import warnings
from collections.abc import Collection

import keras

from towers.layers.variables import steps_done
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.saved_model import OtherModelError, check_checkpoint
from towers.lifecycle.continuing import resume
from towers.lifecycle.continuing.resume import OtherDataError
from towers.program import words
from towers.program.features import feature
from towers.program.flags import command_line
from towers.train.outputs import preprocessing
from towers.train.parts.setup import Setup
from towers.train.parts.task import better
from towers.train.settings import DEFAULTS, NAMES, Settings, is_given

# What has to stay the same within an epoch, and the flags that decide it; the first one
# is named even if it is not given.
_DECIDE = {
    "dataset": ("dataset",),
    "files": ("dataset", "data_dir", "eval_dataset"),
    "bytes": ("dataset", "data_dir", "eval_dataset"),
    "split": ("train_split",),
    "examples": (
        *("dataset", "train_split", "eval_split", "eval_dataset", "eval_fraction"),
        *("sequence_length", "packing", "tokenizer"),
    ),
    "seed": ("seed",),
    "kept in memory": ("cache", "data_service"),
    "shuffle_mb": ("shuffle_mb",),
    "grouped by length": ("group_by_length",),
    "steps_per_epoch": ("steps_per_loop",),
}
# The number of towers, which decides the batch where each tower has its own.
_TOWERS = ("num_gpus", "gpu_indices", "gpu_split", "stages", "share_gpus")

# What a target has, if a run has to go on with the same.
_NOUNS = {
    "class": ("class", "classes"),
    "mask": ("class", "classes"),
    "numbers": ("number", "numbers"),
    "labels": ("label", "labels"),
}


def make_checkpoint(setup: Setup, folder: str, validates: bool) -> Checkpoint:
    """Makes the callback that saves the run.

    Raises:
        ValueError: --monitor names a metric of validation data that are missing.
    """
    settings = setup.settings
    monitor, mode = _monitor(settings, validates)
    checkpoint = Checkpoint(
        folder,
        save_steps=settings.save_steps,
        save_minutes=settings.save_minutes,
        keep_checkpoints=settings.keep_checkpoints,
        monitor=monitor,
        mode=mode,
        on_save_error=settings.on_save_error,
    )
    if settings.remote_model_dir:
        remote_run = feature("lifecycle.remote_run")
        checkpoint.run.checkpoints.after_save = functools.partial(
            remote_run.store, settings.absolute_model_dir
        )
    return checkpoint


def best_text(settings: Settings) -> str:
    """Returns which loss is the best without validation data: "lowest loss"."""
    monitor, mode = _monitor(settings, validates=False)
    best = {"min": "lowest", "max": "highest"}.get(mode, "best")
    return f"{best} {monitor}"


def _monitor(settings, validates):
    monitor = settings.monitored_log or ("val_loss" if validates else "loss")
    if monitor.startswith("val_") and not validates:
        raise ValueError(
            f"Received --monitor={monitor}, but there is no validation data; expected "
            f"{monitor.removeprefix('val_')}, or an --eval_dataset."
        )
    mode = settings.monitor_mode
    # Of some other metrics, Keras knows.
    return monitor, better(monitor) if mode == "auto" else mode


def restore(
    settings: Settings, checkpoint: Checkpoint, folder: str, model: keras.Model
) -> None:
    """Restores the checkpoint that --checkpoint names, if there is any.

    Raises:
        ValueError: One is needed and there is none, or it is not of this model.
    """
    which = settings.checkpoint
    if which.endswith(".keras"):
        if not settings.eval_only:
            raise ValueError(
                f"Received --checkpoint={which}, a model from which no run can go on; "
                "expected last, best or a folder in checkpoints/, or --eval_only as "
                "well."
            )
        try:
            with warnings.catch_warnings():
                # Nobody needs an optimizer to evaluate.
                warnings.filterwarnings("ignore", "Skipping variable loading")
                model.load_weights(os.path.expanduser(which))
        except (OSError, ValueError, KeyError) as error:
            # Keras announces an example, and then gives it.
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next((line for line in lines if line[-1] != ":"), "unknown")
            reason = reason.removesuffix(".")
            raise ValueError(
                f"Cannot read the weights of --checkpoint={which}: {reason}; expected "
                f"a model that was saved with --model={settings.model}."
            ) from error
        return
    if checkpoint.restore(model, which) or not (settings.eval_only or which != "last"):
        return
    what = "evaluate" if settings.eval_only else "go on from"
    raise ValueError(
        f"There is no checkpoint in {folder} to {what}; train first, or name the "
        "model_dir of an earlier run."
    )


def check_model(folder: str, model: keras.Model) -> None:
    """Checks that a checkpoint, if there is any, is of this model."""
    try:
        check_checkpoint(folder, model)
    except OtherModelError as error:
        said = str(error).removesuffix(".")
        raise OtherModelError(f"{said}, or start over with --clean.") from error


def check_classes(folder: str, setup: Setup) -> None:
    """Checks that task and classes are those that a run has been trained on.

    Raises:
        ResumeError: They are others.
    """
    before = _task_before(os.path.dirname(folder)) if store.find(folder) else None
    now = setup.task and setup.task.name
    if before and now and before != now:
        raise resume.ResumeError(
            f"The run {os.path.dirname(folder)} began with --task={before}, but "
            f"received data and flags of --task={now}; expected the same, so correct "
            "them, or start over with --clean."
        )
    for path in store.find(folder):
        try:
            about = store.load_about(path)
        except store.DamagedError:
            continue
        target = setup.facts.target
        if target is None or target.kind not in _NOUNS:
            return
        now = [*target.names] if target.names else target.size
        before = (about.get("data") or {}).get("classes")
        return resume.check_classes(path, before, now, _NOUNS[target.kind])


def _task_before(model_dir: str) -> str | None:
    """Returns the task of a run, if its files tell."""
    try:
        return preprocessing.read(model_dir, lambda content: content.get("task"))
    except preprocessing.FAULTS:
        return None


def with_flags(error: OtherDataError, settings: Settings) -> OtherDataError:
    """Names the flags by which data are others than those that a run has begun with.

    Args:
        error: Says what of the data is another.
        settings: As they were given.
    """
    changes, causes = error.changes, {}
    for name in changes:
        if name == "steps_per_epoch" and len(changes) > 1:
            continue  # follows from the others
        flags = _batch_flags(settings) if name == "batch size" else _DECIDE.get(name)
        given = [
            settings.as_flag(flag) for flag in flags or () if is_given(settings, flag)
        ]
        if flags and (given or settings.dataset is not None):
            causes[name] = ", ".join(given or [f"--{flags[0]}"])
    return OtherDataError(error.run, changes, causes)


def _batch_flags(settings):
    if settings.batch_per_tower or settings.batch_at_start:
        return "batch_size", "elastic_batch", *_TOWERS
    return ("batch_size",)


def text(settings: Settings, checkpoint: Checkpoint, model: keras.Model) -> list[str]:
    """Says where the run goes on, and which training is given up for it.

    Args:
        settings: What was asked for.
        checkpoint: Which is restored.
        model: As it was restored.
    """
    if settings.checkpoint.endswith(".keras"):
        return [f"Evaluating {settings.checkpoint}."]
    if not checkpoint.latest:
        return []
    position = checkpoint.position
    batches = words.count(position.batch, "batch", "batches")
    within = f" and {batches}" if position.batch else ""
    best = checkpoint.find_best(model) if settings.checkpoint == "best" else None
    doing = "Evaluating" if settings.eval_only else "Continuing from"
    step = f"step {steps_done(model)}"
    good = f", the best by {best.monitor}: {best.value:.4g}" if best else ""
    lines = [
        f"{doing} {checkpoint.latest}: after epoch {position.epoch}{within}, {step}"
        f"{good}."
    ]
    if checkpoint.discarded and not settings.eval_only:
        names = ", ".join(map(os.path.basename, reversed(checkpoint.discarded)))
        lines.append(
            f"The training after it is given up: {names} will be removed when the "
            "next checkpoint is saved."
        )
    return lines


# What an evaluation has to share with the training, or it gets other numbers.
OF_THE_INPUT = (
    *("dtype", "image_size", "recipe", "image_column", "text_column", "label_column"),
    *("feature_columns", "missing", "scale", "tokenizer", "sequence_length", "packing"),
)


def changed_flags(
    before: str,
    settings: Settings,
    trains: bool = True,
    names: Collection[str] = NAMES,
) -> str | None:
    """Says which flags differ from those of the run before.

    Args:
        before: The flags as --flagfile reads them.
        settings: Those of this run.
        trains: Whether anything is left to train, where more is said of the data.
        names: The flags to compare.
    """
    then, ours = _by_name(before), _by_name(settings.as_text())
    changed = []
    for name in sorted(then.keys() | ours.keys()):
        old, new = then.get(name), ours.get(name)
        if old == new or name not in names or name == "model_dir":
            continue
        if name == "learning_rate" and settings.constant_rate:
            continue  # said when it is renewed
        if name == "batch_size" and trains:
            continue  # said when the data are begun anew
        # Of a flag that is new in this version, nothing is known.
        if old is None and new == DEFAULTS.as_flag(name):
            continue
        old = old and (old.partition("=")[2] or old)
        before = f"before {old}" if old else "not given before"
        changed.append(f"{new or f'no --{name}'} ({before})")
    return f"Changed since the last run: {'; '.join(changed)}." if changed else None


def _by_name(text):
    """Returns the flags of a text by name, old flags as those that replace them."""
    try:
        argv = ["towers.train", *text.splitlines()]
        text = command_line.read_given(Settings, argv, quiet=True)[0].as_text()
    except ValueError:
        pass  # of another version, whose flags are compared as they are
    by_name = {}
    for line in text.splitlines():
        name = line.removeprefix("--").partition("=")[0]
        by_name[name if name in NAMES else name.removeprefix("no")] = line
    return by_name

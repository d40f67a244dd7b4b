"""Continues a run of towers.train: what it restores, and what has changed."""

import os
import warnings

import keras
from absl import flags

from towers import input_pipeline
from towers._deprecated import rename_flags
from towers.lifecycle import resume
from towers.lifecycle.checkpoint import Checkpoint
from towers.lifecycle.checkpoints import store
from towers.program import words
from towers.train.flags import MONITORS

FLAGS = flags.FLAGS


def make_checkpoint(folder: str, validates: bool) -> Checkpoint:
    """Makes the callback that saves the run, as the flags say.

    Args:
        folder: Where the checkpoints lie.
        validates: Whether there is validation data.

    Raises:
        ValueError: --monitor names a metric of validation data that are missing.
    """
    monitor, mode = _monitor(validates)
    return Checkpoint(
        folder,
        save_steps=FLAGS.save_steps,
        save_minutes=FLAGS.save_minutes,
        keep=FLAGS.keep_checkpoints,
        monitor=monitor,
        mode=mode,
        on_save_error=FLAGS.on_save_error,
    )


def best_text() -> str:
    """Returns which loss is the best without validation data: "lowest loss"."""
    monitor, mode = _monitor(validates=False)
    return f"{'lowest' if mode == 'min' else 'highest'} {monitor}"


def _monitor(validates):
    known = [name for name in MONITORS if validates or not name.startswith("val_")]
    monitor = FLAGS.monitor or known[0]
    if monitor not in known:
        raise ValueError(
            f"Received --monitor={monitor}, but there is no validation data; expected "
            f"one of {', '.join(known)}, or an --eval_dataset."
        )
    mode = FLAGS.monitor_mode
    if mode == "auto":
        mode = "min" if monitor.endswith("loss") else "max"
    return monitor, mode


def restore(checkpoint: Checkpoint, folder: str, model: keras.Model) -> None:
    """Restores the checkpoint that --checkpoint names, if there is any.

    Raises:
        ValueError: One is needed and there is none, or it is not of this model.
    """
    which = FLAGS.checkpoint
    if which.endswith(".keras"):
        if not FLAGS.eval_only:
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
                f"a model that was saved with --model={FLAGS.model}."
            ) from error
        return
    if checkpoint.restore(model, which) or not (FLAGS.eval_only or which != "last"):
        return
    what = "evaluate" if FLAGS.eval_only else "go on from"
    raise ValueError(
        f"There is no checkpoint in {folder} to {what}; train first, or name the "
        "model_dir of an earlier run."
    )


def check_classes(folder: str, source: input_pipeline.Source) -> None:
    """Checks that the classes are those that a run has been trained on.

    Args:
        folder: Where its checkpoints lie.
        source: What it is to go on with.

    Raises:
        ResumeError: They are others.
    """
    for path in store.find(folder):
        try:
            about = store.load_about(path)
        except store.DamagedError:
            continue
        classes = source.class_names or source.num_classes
        now = [*classes] if isinstance(classes, tuple | list) else classes
        before = (about.get("data") or {}).get("classes")
        return resume.check_classes(path, before, now)


def text(checkpoint: Checkpoint, model: keras.Model) -> list[str]:
    """Says where the run goes on, and which training is given up for it.

    Args:
        checkpoint: Which is restored.
        model: As it was restored.
    """
    if FLAGS.checkpoint.endswith(".keras"):
        return [f"Evaluating {FLAGS.checkpoint}."]
    if not checkpoint.latest:
        return []
    position = checkpoint.position
    batches = words.count(position.batch, "batch", "batches")
    within = f" and {batches}" if position.batch else ""
    best = checkpoint.find_best(model) if FLAGS.checkpoint == "best" else None
    doing = "Evaluating" if FLAGS.eval_only else "Continuing from"
    step = f"step {int(model.optimizer.iterations)}"
    good = f", the best by {best.monitor}: {best.value:.4g}" if best else ""
    lines = [
        f"{doing} {checkpoint.latest}: after epoch {position.epoch}{within}, {step}"
        f"{good}."
    ]
    if checkpoint.discarded and not FLAGS.eval_only:
        names = ", ".join(map(os.path.basename, reversed(checkpoint.discarded)))
        lines.append(
            f"The training after it is given up: {names} will be removed when the "
            "next checkpoint is saved."
        )
    return lines


def changed_flags(before: str, now: str, trains: bool = True) -> str | None:
    """Says which flags differ from those of the run before.

    Args:
        before: The flags as --flagfile reads them.
        now: The same of this run.
        trains: Whether anything is left to train, where more is said of the data.
    """
    then, ours = _by_name(before), _by_name(now)
    changed = []
    for name in sorted(then.keys() | ours.keys()):
        old, new = then.get(name), ours.get(name)
        known = name in FLAGS and name != "model_dir"
        if name == "learning_rate" and FLAGS.lr_schedule == "constant":
            continue  # said when it is renewed
        if name == "batch_size" and trains:
            continue  # said when the data are begun anew
        # Of a flag that is new in this version, nothing is known.
        if old == new or not known or (old is None and FLAGS[name].using_default_value):
            continue
        old = old and (old.partition("=")[2] or old)
        before = f"before {old}" if old else "not given before"
        changed.append(f"{new or f'no --{name}'} ({before})")
    return f"Changed since the last run: {'; '.join(changed)}." if changed else None


def _by_name(text):
    found = {}
    lines, _ = rename_flags(text.splitlines(), FLAGS)
    for line in lines:
        name = line.removeprefix("--").partition("=")[0]
        found[name if name in FLAGS else name.removeprefix("no")] = line
    return found

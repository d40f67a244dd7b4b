"""A job from its first line to its last: it trains, evaluates, saves and sums up."""

import math
import os
import shlex
import sys
import textwrap
from typing import Any

from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.best import last_logs
from towers.monitoring.lines import EvaluationProgress, in_order
from towers.numerics.errors import NotFinite
from towers.program import small_file, voice, words
from towers.program.features import feature
from towers.train import callbacks
from towers.train.callbacks import BatchSizeChange, Watch
from towers.train.job import Job
from towers.train.outputs import files, start
from towers.train.parts.training import averaged, scale_rate


def run(job: Job) -> None:
    """Trains, evaluates, saves and sums up; or evaluates, if that is all."""
    print(words.wrapped(start.text(job)), flush=True)
    if job.settings.eval_only:
        print(values_text(evaluate(job)))
        return
    with files.alone(job.model_dir):
        if job.settings.clean:
            files.remove_run(job.model_dir)
        renew_learning_rate(job)
        job, watch = train(job)
        _end(job, watch, evaluate(job))


def _end(job, watch, values):
    """Saves and sums up; `values` are those of the evaluation."""
    figures = summarise(job, values, watch)
    loss = figures["train_loss" if job.data.held_out is None else "val_loss"]
    if not math.isfinite(loss):
        raise NotFinite(
            f"The loss is {loss} after epoch {job.epoch}, so model.keras is not "
            "written; start over with --clean and a smaller --learning_rate."
        )
    files.end(job, figures)
    mistakes = feature("train.outputs.mistakes").show(job, figures["best"])
    print(closing_lines(figures, trained=watch is not None, mistakes=mistakes))


def renew_learning_rate(job: Job) -> None:
    """Gives a run that goes on the learning rate that is asked for now."""
    asked, optimizer = job.settings.learning_rate, job.model.optimizer
    if job.settings.batch_per_tower:
        asked *= job.batch_size / job.settings.batch_size
    before = float(optimizer.learning_rate)
    # A schedule is no variable, so it is not restored.
    constant = job.settings.constant_rate and not job.setup.defines("optimizer")
    if constant and not math.isclose(before, asked, rel_tol=1e-6):
        optimizer.learning_rate = asked
        print(f"Learning rate: {asked:g}, after {before:g}.")


def train(job: Job) -> tuple[Job, Watch | None]:
    """Fits the model, from where its checkpoint ends.

    Returns:
        The job, whose batches may be others now. What has measured it; `None` if
        nothing is left to train.
    """
    if job.is_finished:
        has, more = words.count(job.epoch, "epoch"), "--train_epochs"
        if job.stopped_early:
            print(_stopped_early(job))
            more = "--early_stopping"
        elif job.epoch < job.settings.train_epochs:
            has, more = words.count(job.step, "step"), "--max_train_steps"
        print(
            f"Nothing left to train: {job.model_dir} has {has} already. Give more "
            f"{more}, or --clean to start over. Nothing new was measured."
        )
        return job, None
    job, watch = _fit(job)
    if job.stopped_early:
        print(_stopped_early(job))
    return job, watch


def _fit(job):
    """Fits, and goes on with other batches where towers have a batch each.

    Returns:
        The job, and what has measured it.
    """
    while True:
        watch = callbacks.make_watch(job)
        try:
            _fit_batches(job, watch)
            return job, watch
        except BatchSizeChange as change:
            job = _with_batches_of(job, change.size)


def _with_batches_of(job, size):
    """Changes the batch, and the learning rate in proportion; says it if it is news."""
    one, before = job.settings.batch_size, job.batch_size
    scale_rate(job.model, size / before)
    if job.step == 0:
        return job.with_batches_of(size)
    now = words.count(size // one, "tower")
    rate = float(job.model.optimizer.learning_rate)
    line = (
        f"Step {job.step:,}: With {now}, a batch has {size} examples from here on, "
        f"after {before}, and the learning rate is {rate:g}. The numbers are no longer "
        "those of a run whose towers stay."
    )
    voice.end_progress_bar()
    voice.say(line)
    job.generations.marks.append(line)
    return job.with_batches_of(size)


def _fit_batches(job, watch):
    terminal = sys.stdout.isatty()
    job.parallel.fit(
        job.data.training,
        validation_data=None if job.data.held_out is None else job.data.evaluation,
        epochs=job.settings.train_epochs,
        steps_per_epoch=job.data.steps_per_epoch(),
        callbacks=callbacks.make(job, watch, lines=not terminal),
        verbose=1 if terminal else 0,
        shuffle=False,  # the pipeline has shuffled already
        class_weight=job.class_weight,
    )


def _stopped_early(job):
    count = words.count(job.settings.early_stopping, "epoch")
    name = job.checkpoint.monitor.name
    return f"Stopped early: {name} has not been better for {count}."


def evaluate(job: Job) -> dict[str, float]:
    """Evaluates the model on validation data, or on the training data if none is given.

    Returns:
        The loss and the metrics, such as `val_loss` and `val_accuracy`, as Keras calls
        them; of the training data `train_loss` and `train_accuracy`.
    """
    prefix = "train" if job.data.held_out is None else "val"
    with averaged(job.settings, job.model):
        data, shown = job.data.evaluation, EvaluationProgress(job.data.evaluation)
        with shown.around_fit():
            logs = job.parallel.evaluate(
                data, verbose=0, return_dict=True, callbacks=[shown]
            )
    values = {f"{prefix}_{name}": float(value) for name, value in logs.items()}
    return values | job.task_logs(values)


def summarise(
    job: Job, values: dict[str, float], watch: Watch | None
) -> dict[str, Any]:
    """Collects what summary.json holds.

    Args:
        job: The run.
        values: What its evaluation gave.
        watch: What has measured it; `None` if it had nothing left to train.
    """
    return {
        **values,
        **(measured(watch) if watch else measured_before(job.model_dir)),
        "task": job.setup.task and job.setup.task.name,
        "class_names": job.setup.facts.class_names,
        "bad_records": job.data.bad_records,
        "parameters": job.model.count_params(),
        "epochs": job.epoch,
        "steps": job.step,
        "towers": job.towers,
        "generations": job.generations.as_json(),
        "batch_size": job.batch_size,
        "model": os.path.join(job.model_dir, "model.keras"),
        "checkpoint": job.checkpoint.latest,
        "best": best_model(job),
        "last": last_epoch(job),
        "model_dir": job.model_dir,
    }


def best_model(job: Job) -> dict | None:
    """Returns metric, value and paths of the best model; `None` without one."""
    if (best := job.checkpoint.find_best(job.model)) is None:
        return None
    return {
        "monitor": best.monitor,
        "value": best.value,
        "epoch": best.epoch,
        "logs": best.logs,
        "model": os.path.join(job.model_dir, "best.keras"),
        "checkpoint": best.path,
    }


def last_epoch(job: Job) -> dict | None:
    """Returns number and logs of the last epoch; `None` if the run ended within one."""
    path = job.checkpoint.latest
    logs = last_logs(store.load_about(path)) if path is not None else {}
    return {"epoch": job.epoch, "logs": logs} if logs else None


def measured(watch: Watch) -> dict:
    """Returns what this run has measured."""
    return {
        "examples_per_sec": watch.throughput.examples_per_sec,
        "tokens_per_sec": watch.throughput.tokens_per_sec,
        "step_ms": watch.starvation.split and watch.starvation.split.parts_ms,
        "waiting": watch.starvation.waiting,
        "utilization": watch.devices.utilization() or None,
        "verdict": watch.starvation.verdict and str(watch.starvation.verdict),
        "measured": watch.text(),
    }


def measured_before(model_dir: str) -> dict:
    """Returns what the last run that has trained here had measured, if it is known."""
    summary = {}
    try:
        path = os.path.join(model_dir, "summary.json")
        summary = small_file.read_json(path, dict)
    except FileNotFoundError:
        pass
    except small_file.FileError as error:
        voice.warn(
            f"{path} cannot be read ({error}); what it has measured is not known."
        )
    names = "examples_per_sec", "tokens_per_sec", "step_ms", "waiting", "utilization"
    return {name: summary.get(name) for name in (*names, "verdict", "measured")}


def closing_lines(
    summary: dict, trained: bool = True, mistakes: str | None = None
) -> str:
    """Says how the run ended, and where its files are.

    Args:
        summary: See `summarise`.
        trained: Whether the figures were measured now, not by an earlier run.
        mistakes: Where the picture of mistakes is, and how many there are.
    """
    bad, best = summary["bad_records"], summary["best"]
    figures = _values_lines(summary)
    if trained:
        figures.append(textwrap.indent(summary["measured"], "  "))
    return "\n".join(
        [
            f"Done: {words.count(summary['epochs'], 'epoch')}, "
            f"{words.count(summary['steps'], 'step')} on "
            f"{words.count(len(summary['towers']), 'tower')}.",
            words.wrapped("\n".join(figures)),
            # These lines stay whole, so that a path or a command can be copied.
            f"  model        {summary['model']}",
            *([f"  best model   {best['model']}"] if best else []),
            *([f"  mistakes     {mistakes}"] if mistakes else []),
            f"  checkpoint   {summary['checkpoint']}",
            f"  TensorBoard  tensorboard --logdir {shlex.quote(summary['model_dir'])}",
            *([f"  bad records  {bad:,} passed over"] if bad is not None else []),
        ]
    )


def _values_lines(summary):
    """Names the metrics of the best epoch and of the last one."""
    best, last, lines = summary["best"], summary["last"], []
    evaluated = {
        name: value
        for name, value in summary.items()
        if name.startswith(("val_", "train_"))
    }
    logs = last["logs"] if last is not None else {}
    # The same evaluation, in another order of adding, differs by rounding.
    if not all(
        math.isclose(value, logs.get(name, math.nan), rel_tol=1e-4, abs_tol=1e-4)
        for name, value in evaluated.items()
    ):
        # The last model was evaluated on other data, or within an epoch.
        several = best and best["epoch"] != summary["epochs"]
        after = f" (model.keras, after epoch {summary['epochs']})" if several else ""
        lines.append(f"  {values_text(summary)}{after}")
    if best:
        is_last = last is not None and last["epoch"] == best["epoch"]
        place = f"{best['epoch']}, the last," if is_last else f"{best['epoch']},"
        head = f"best epoch {place} by {best['monitor']}"
        lines.append(f"  {head}: {_metrics(best['logs'])}")
    if last and not (best and best["epoch"] == last["epoch"]):
        lines.append(f"  last epoch {last['epoch']}: {_metrics(last['logs'])}")
    return lines


def _metrics(logs):
    return ", ".join(
        f"{name} {_value(logs[name])}"
        for name in in_order(logs)
        if name != "examples_per_sec"
    )


def _value(value):
    """Formats a metric by four decimals, or by four digits if that shows too little."""
    fits = value == 0 or 0.001 <= abs(value) < 1000
    return f"{value:.4f}" if fits else words.figure(value)


def values_text(values: dict) -> str:
    """Says what an evaluation gave."""
    return ", ".join(
        f"{part} {name.removeprefix(prefix).replace('_', ' ')} {_value(value)}"
        for prefix, part in (("val_", "validation"), ("train_", "train"))
        for name, value in values.items()
        if name.startswith(prefix)
    )

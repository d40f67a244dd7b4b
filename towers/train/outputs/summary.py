"""The figures of a run, for summary.json and its last lines."""

import os
import shlex
import textwrap
from typing import Any

from towers._deprecated import rename_keys
from towers.monitoring.watch import Watch
from towers.program import small_file, words
from towers.program.voice import warn
from towers.train.job import Job


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


def measured(watch: Watch) -> dict:
    """Returns what this run has measured."""
    return {
        "examples_per_sec": watch.throughput.examples_per_sec,
        "tokens_per_sec": watch.throughput.tokens_per_sec,
        "step_ms": watch.starvation.split and watch.starvation.split.parts_ms,
        "waiting": watch.starvation.waiting,
        "utilization": watch.devices.utilization() or None,
        "verdict": watch.starvation.verdict,
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
        warn(f"{path} cannot be read ({error}); what it has measured is not known.")
    known = rename_keys(summary)
    names = "examples_per_sec", "tokens_per_sec", "step_ms", "waiting", "utilization"
    return {name: known.get(name) for name in (*names, "verdict", "measured")}


def text(summary: dict, trained: bool = True) -> str:
    """Says how the run ended, and where things lie.

    Args:
        summary: See `summarise`.
        trained: Whether the figures were measured now, not by an earlier run.
    """
    bad, best = summary["bad_records"], summary["best"]
    named = best and "{model}, {monitor} {value:.4f} after epoch {epoch}".format(**best)
    values, of_best = values_text(summary), ""
    if best and best["epoch"] != summary["epochs"]:
        # Two models, so it is said of which one each number is.
        values += f" (model.keras, after epoch {summary['epochs']})"
        of_best = values_text(best["logs"])
    return "\n".join(
        [
            f"Done: {words.count(summary['epochs'], 'epoch')}, "
            f"{words.count(summary['steps'], 'step')} on "
            f"{words.count(len(summary['towers']), 'tower')}.",
            f"  {values}",
            *([textwrap.indent(summary["measured"], "  ")] if trained else []),
            f"  model        {summary['model']}",
            *([f"  best model   {named}"] if named else []),
            *([f"               {of_best}"] if of_best else []),
            f"  checkpoint   {summary['checkpoint']}",
            f"  TensorBoard  tensorboard --logdir {shlex.quote(summary['model_dir'])}",
            *([f"  bad records  {bad:,} passed over"] if bad is not None else []),
        ]
    )


def values_text(values: dict) -> str:
    """Says what an evaluation gave."""
    return ", ".join(
        f"{part} {name.removeprefix(prefix).replace('_', ' ')} {value:.4f}"
        for prefix, part in (("val_", "validation"), ("train_", "train"))
        for name, value in values.items()
        if name.startswith(prefix)
    )

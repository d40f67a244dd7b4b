"""The files of a run, in its model_dir."""

import contextlib
import csv
import glob
import io
import os
from collections.abc import Iterator
from typing import Any

from towers.elastic import requests
from towers.input_pipeline.records import quarantine
from towers.lifecycle.checkpoints import store
from towers.lifecycle.checkpoints.manager import SaveError
from towers.program import locks, small_file, whole_file
from towers.program.progress import Progress
from towers.program.voice import warn
from towers.train.job import BAD_RECORDS, Job
from towers.train.outputs import preprocessing
from towers.train.parts.model import NOT_FINITE
from towers.train.parts.training import averaged, kept_rate
from towers.train.settings import ARCHITECTURE, PREPROCESSING

# Of --log_csv.
LOG = "log.csv"
# By `towers report` and `towers resize`, also while a run has the folder.
_WRITTEN_BY_OTHERS = {"report.html", *requests.FILES}
FILES = (
    *("model.keras", "best.keras", "unfinished.keras", "summary.json", "flags.txt"),
    *("mistakes.png", "log.csv", "variable_update.json", "report.html"),
    *(PREPROCESSING, preprocessing.CLASSES, ARCHITECTURE, requests.RATIOS, BAD_RECORDS),
    *(NOT_FINITE, *requests.FILES),
)
FOLDERS = (
    *("checkpoints", "train", "train/plugins", "train/plugins/profile", "validation"),
    preprocessing.TOKENIZER,
)


@contextlib.contextmanager
def alone(model_dir: str) -> Iterator[None]:
    """Inside, no other run writes to the model_dir, which is made.

    If nothing is written there, it is gone afterwards.

    Raises:
        SaveError: If another one does already, or nothing can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locks.made_folder(model_dir))
            # While a run has the lock, it has checked them.
            if not requests.is_running(model_dir):
                _check_links(model_dir)
            stack.enter_context(requests.locked(model_dir))
        except BlockingIOError as error:
            raise SaveError(
                f"Another run writes to {model_dir}; expected one at a time, so wait "
                "for its end, or choose another --model_dir."
            ) from error
        except OSError as error:
            raise SaveError(
                f"Cannot write to the model_dir {model_dir}: {error}; expected a "
                "folder that can be written to, so choose another --model_dir, or "
                "correct that."
            ) from error
        yield


def describe(job: Job) -> None:
    """Writes what describes the run, in place of what described an earlier one.

    Raises:
        SaveError: If that cannot be written.
    """
    with _written(job):
        # Of an earlier run; this one has found nothing yet.
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(job.model_dir, NOT_FINITE))
        for path in written_files(job.model_dir):
            if os.path.basename(path) not in _WRITTEN_BY_OTHERS:
                whole_file.remove_unfinished(path)
        flags = os.path.join(job.model_dir, "flags.txt")
        whole_file.write_text(flags, job.settings.as_text())
        preprocessing.write_model_files(job)
        _forget_epochs_after(os.path.join(job.model_dir, LOG), job.epoch)
        if job.data.bad_records is not None:
            path = os.path.join(job.model_dir, BAD_RECORDS)
            quarantine.write(job.data.quarantines, path)


def log_columns(path: str) -> list[str] | None:
    """Returns the columns of a log beside the epoch; `None` if there is none yet."""
    return (_rows(path) or [[""]])[0][1:] or None


def _rows(path: str) -> list[list[str]]:
    """Reads the rows of a log, its head first; none if there is no log.

    Raises:
        SaveError: It is none of ours, so nothing can be added to it.
    """
    try:
        text = small_file.read_text(path)
        rows = [*csv.reader(io.StringIO(text, newline=""))]
        if not all(row and row[0].isdecimal() for row in rows[1:]):
            raise small_file.FileError("it has a line that begins with no epoch")
        return rows
    except FileNotFoundError:
        return []
    except (small_file.FileError, csv.Error) as error:
        raise SaveError(
            f"Cannot go on with {path} ({error}); expected a log as --log_csv writes "
            "it, so move it away."
        ) from error


def _forget_epochs_after(path, epochs):
    """Leaves out what a log says of epochs that are trained again."""
    header, *rows = _rows(path) or [[]]
    kept = [row for row in rows if int(row[0]) < epochs]
    if kept != rows:
        with whole_file.opened(path, newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([header, *kept])


def end(job: Job, summary: dict[str, Any]) -> None:
    """Saves the model, the best one, and the summary.

    Raises:
        SaveError: If they cannot be written.
    """
    with _written(job), Progress(f"Saving the model in {job.model_dir}"):
        _save_model(job, summary["model"])
        if (best := summary["best"]) is not None:
            with job.checkpoint.as_in(best["checkpoint"], job.model):
                _save_model(job, best["model"])
        path = os.path.join(job.model_dir, "summary.json")
        whole_file.write_json(path, summary)


def read(job: Job, name: str) -> str | None:
    """Reads a file in model_dir; `None` if there is none."""
    path = os.path.join(job.model_dir, name)
    try:
        return small_file.read_text(path, errors="surrogateescape")
    except FileNotFoundError:
        return None
    except small_file.FileError as error:
        warn(f"{path} cannot be read ({error}), so nothing is compared with it.")
        return None


def remove_run(model_dir: str) -> None:
    """Removes what a run writes from model_dir, and nothing else."""
    store.remove_all(os.path.join(model_dir, "checkpoints"))
    for pattern in (
        "train/events.out.tfevents.*",
        "train/plugins/profile",
        "validation/events.out.tfevents.*",
        preprocessing.TOKENIZER,
        *FILES,
    ):
        written = os.path.join(glob.escape(model_dir), pattern)
        # Beside it, what a process that was killed leaves; see `whole_file`.
        ends = "", ".unfinished", ".[0-9]*.unfinished"
        for path in {path for end in ends for path in glob.glob(written + end)}:
            whole_file.remove(path)
    for name in ("checkpoints", "train/plugins", "train", "validation"):
        path = os.path.join(model_dir, name)
        if os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)


def _save_model(job: Job, path: str) -> None:
    """Saves the model; the file gets its name only once it is whole."""
    unfinished = os.path.join(job.model_dir, "unfinished.keras")
    with averaged(job.settings, job.model), kept_rate(job.model.optimizer):
        job.model.save(unfinished)
    whole_file.rename(unfinished, path)


@contextlib.contextmanager
def _written(job: Job) -> Iterator[None]:
    """Says of files that cannot be written what was saved before."""
    try:
        yield
    except OSError as error:
        saved = "nothing was saved yet"
        if job.checkpoint.latest:
            saved = f"the last checkpoint is {job.checkpoint.latest}"
        raise SaveError(
            f"Cannot write to the model_dir {job.model_dir}: {error}; {saved}, so make "
            "room and run again."
        ) from error


def _check_links(model_dir: str) -> None:
    """Checks that a run writes inside of its model_dir, which anybody may have made.

    Its folder itself may be a link to another disk.

    Raises:
        SaveError: A file or a folder is a link that leads out of it, or something else.
    """
    for name in FOLDERS:
        path = os.path.join(model_dir, name)
        _check_link(model_dir, path, "folder", os.path.isdir(path))
    for path in written_files(model_dir):
        _check_link(model_dir, path, "regular file", os.path.isfile(path))


def _check_link(model_dir, path, kind, is_one):
    inside = os.path.join(os.path.realpath(model_dir), "")
    target = os.path.realpath(path)
    if os.path.islink(path) and not target.startswith(inside):
        raise SaveError(
            f"{path} is a link to {target}, and the run would write there; expected "
            "all of a run in its model_dir, so remove the link, or give a folder there "
            "as --model_dir."
        )
    if os.path.lexists(path) and not is_one:
        raise SaveError(
            f"{path} is no {kind}, and the run writes one of this name; expected none, "
            "so remove it."
        )


def written_files(model_dir: str) -> list[str]:
    """Returns the paths of all files that a run writes anew.

    In the tokenizer's folder, their names depend on the tokenizer.
    """
    paths = [os.path.join(model_dir, name) for name in (*FILES, requests.LOCK)]
    folder = os.path.join(model_dir, preprocessing.TOKENIZER)
    if os.path.isdir(folder):
        paths += [os.path.join(folder, name) for name in os.listdir(folder)]
    return paths

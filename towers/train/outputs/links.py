"""Checks that no file of a model_dir leads a run to write outside of it."""

import os

from towers.elastic import balance, requests
from towers.lifecycle.checkpoints.manager import SaveError
from towers.program.voice import say
from towers.train.job import BAD_RECORDS
from towers.train.outputs import model_files
from towers.train.parts.model import NOT_FINITE
from towers.train.settings import ARCHITECTURE, PREPROCESSING

FILES = (
    *("model.keras", "best.keras", "unfinished.keras", "summary.json", "flags.txt"),
    *("log.csv", "variable_update.json", "report.html"),
    *(PREPROCESSING, model_files.CLASSES, ARCHITECTURE, balance.FILE, BAD_RECORDS),
    *(NOT_FINITE, *requests.FILES),
)
FOLDERS = ("checkpoints", "train", "validation", model_files.TOKENIZER)


def check(model_dir: str) -> None:
    """Checks that a run writes inside of its model_dir, which anybody may have made.

    A folder may be a link, such as to another disk. A line says so.

    Raises:
        SaveError: A name that the run writes is a link out of the folder, or no file.
    """
    inside = os.path.join(os.path.realpath(model_dir), "")
    for name in (*FILES, requests.LOCK, *_of_tokenizer(model_dir)):
        path = os.path.join(model_dir, name)
        target = os.path.realpath(path)
        if os.path.islink(path) and not target.startswith(inside):
            raise SaveError(
                f"{path} is a link to {target}, which the run would write to; expected "
                "files in the model_dir, so remove the link."
            )
        if os.path.lexists(path) and not os.path.isfile(path):
            raise SaveError(
                f"{path} is no regular file, and the run writes one of this name; "
                "expected none, so remove it."
            )
    for name in FOLDERS:
        path = os.path.join(model_dir, name)
        if os.path.islink(path):
            say(f"Note: {path} is a link; the run writes to {os.path.realpath(path)}.")


def _of_tokenizer(model_dir):
    """Returns the files in the tokenizer's folder; the tokenizer names them."""
    folder = os.path.join(model_dir, model_files.TOKENIZER)
    if not os.path.isdir(folder):
        return []
    return [os.path.join(model_files.TOKENIZER, name) for name in os.listdir(folder)]

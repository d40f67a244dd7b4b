"""Checks that no file of a model_dir leads a run to write outside of it."""

import os

from towers.elastic import balance, requests
from towers.lifecycle.checkpoints.manager import SaveError
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
FOLDERS = (
    *("checkpoints", "train", "train/plugins", "train/plugins/profile", "validation"),
    model_files.TOKENIZER,
)


def check(model_dir: str) -> None:
    """Checks that a run writes inside of its model_dir, which anybody may have made.

    Its folder itself may be a link to another disk.

    Raises:
        SaveError: A file or a folder is a link that leads out of it, or something else.
    """
    for name in FOLDERS:
        path = os.path.join(model_dir, name)
        _check(model_dir, path, "folder", os.path.isdir(path))
    for path in files(model_dir):
        _check(model_dir, path, "regular file", os.path.isfile(path))


def _check(model_dir, path, kind, is_one):
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


def files(model_dir: str) -> list[str]:
    """Returns the paths of all files that a run writes anew.

    In the tokenizer's folder, their names depend on the tokenizer.
    """
    paths = [os.path.join(model_dir, name) for name in (*FILES, requests.LOCK)]
    folder = os.path.join(model_dir, model_files.TOKENIZER)
    if os.path.isdir(folder):
        paths += [os.path.join(folder, name) for name in os.listdir(folder)]
    return paths

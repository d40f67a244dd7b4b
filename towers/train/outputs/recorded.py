"""Reads preprocessing.json, of which each checkpoint of a run has a copy."""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

from towers.lifecycle.checkpoints import store
from towers.program import small_file, voice
from towers.train.outputs.json_files import write_json
from towers.train.settings import PREPROCESSING

T = TypeVar("T")
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors of a file that is lost or damaged."""


def read(model_dir: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads the file; where it is lost or damaged, makes it anew from a checkpoint.

    Args:
        model_dir: The folder of the run.
        parse: Makes a value of what the file has.

    Returns:
        What `parse` returns.

    Raises:
        FAULTS: The file is lost or damaged, and no checkpoint has a copy.
    """
    path = os.path.join(model_dir, PREPROCESSING)
    try:
        return parse(small_file.read_json(path, dict))
    except FAULTS as error:
        fault = error
    for checkpoint in store.find(os.path.join(model_dir, "checkpoints")):
        try:
            copy = store.load_about(checkpoint)["preprocessing"]
            # `parse` may change what it is given.
            value = parse(json.loads(json.dumps(copy)))
        except FAULTS:
            continue
        _make_anew(path, copy, checkpoint, fault)
        return value
    raise fault


def _make_anew(path, copy, checkpoint, fault):
    reason = "is lost" if isinstance(fault, FileNotFoundError) else "is damaged"
    try:
        write_json(path, copy)
        what = "it is made anew from"
    except OSError as error:
        what = f"it cannot be made anew ({error.strerror}), so it is read in"
    voice.say(f"{path} {reason}; {what} {checkpoint}.")

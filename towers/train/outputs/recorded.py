"""Reads preprocessing.json, of which each checkpoint of a run has a copy."""

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

from towers.lifecycle.checkpoints import store
from towers.program import small_file, voice
from towers.train.settings import PREPROCESSING

T = TypeVar("T")
FAULTS = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""The errors of a file that is lost or damaged."""
# A run reads the file for its data, and again for its scaling.
_say_once = functools.cache(voice.say)


def read(model_dir: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Reads the file, or a checkpoint's copy if the file is lost or damaged.

    Nothing is written, because a reader has no lock of the folder. A run that trains
    there writes the file anew.

    Args:
        model_dir: The folder of the run.
        parse: Makes a value of what the file has.

    Returns:
        The value that `parse` returns.

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
            # Each call reads a copy of its own, which `parse` may change.
            value = parse(store.load_about(checkpoint)["preprocessing"])
        except FAULTS:
            continue
        reason = "is lost" if isinstance(fault, FileNotFoundError) else "is damaged"
        _say_once(
            f"{path} {reason}; the copy in {checkpoint} is read, and a run that trains "
            "there writes the file anew."
        )
        return value
    raise fault

"""Stores measurements and choices of a run as JSON in its model_dir."""

import os
from typing import Any

from towers.program import small_file, voice, whole_file


def write(file: str, content: dict[str, Any]) -> None:
    """Writes a file, which gets its name once it is complete.

    Raises:
        OSError: The file cannot be written.
    """
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    whole_file.write_json(file, content)


def read(file: str) -> dict[str, Any]:
    """Reads a file; returns an empty dict if it does not exist or is not ours."""
    try:
        return small_file.read_json(file, dict)
    except FileNotFoundError:
        return {}
    except small_file.FileError as error:
        voice.warn(f"{file} cannot be read ({error}), so it is measured again.")
        return {}

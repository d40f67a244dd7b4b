"""Writes files of JSON that people can read, too."""

import json
from typing import Any

from towers.program import whole_file


def write_json(path: str, content: Any) -> None:
    """Writes a file, unless it has the content already.

    Raises:
        OSError: It cannot be written.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False)
    whole_file.write_text(path, f"{text}\n")

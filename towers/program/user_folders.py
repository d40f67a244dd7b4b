"""Folders of the user's that several runs share."""

import os


def cache_folder(*parts: str) -> str:
    """Returns a folder for what may be lost, below `~/.cache/towers`.

    Args:
        parts: The names of the folders that lead to it. They need not exist.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(os.path.abspath(cache), "towers", *parts)

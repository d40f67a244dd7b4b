"""Reads what a program shows on a terminal."""

import os


def read_all(terminal: int) -> str:
    """Reads all that was written to a terminal, and closes it."""
    shown = b""
    try:
        while part := os.read(terminal, 65536):
            shown += part
    except OSError:
        pass  # how the end of a terminal reads
    os.close(terminal)
    return shown.decode()

"""Reads JSON files of this package, from a disk or an object store."""

from typing import Any

import tensorflow as tf

from towers.program import small_file


def read(path: str, kind: type) -> Any:
    """Reads a file of JSON.

    Args:
        path: Its name or address.
        kind: The type of its content: `dict` or `list`.

    Raises:
        FileError: The file is missing, or is not one of this package.
        OpError: The file is far away, and cannot be read.
    """
    if "://" not in path:
        try:
            return small_file.read_json(path, kind)
        except FileNotFoundError as error:
            raise small_file.FileError("it is not there") from error
    with tf.io.gfile.GFile(path, "rb") as file:
        return small_file.parse_json(file.read(small_file.MOST_BYTES), kind)

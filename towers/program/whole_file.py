"""Writes a file that gets its name once it is whole, and the disk keeps it."""

import contextlib
import errno
import glob
import json
import os
import shutil
import threading
from collections.abc import Iterator
from typing import IO, Any

from towers.program import small_file


@contextlib.contextmanager
def opened(
    path: str, mode: str = "w", follows_link: bool = False, **options: Any
) -> Iterator[IO]:
    """Opens a file to write to.

    Whoever reads it sees all of it, or what was there before, also where the machine
    loses its power. Threads and processes of a machine that write the same file use
    different names until then, and the last one to end wins. If writing fails, nothing
    is left; a process that is killed leaves PATH.ID.unfinished, with its thread's ID.

    Args:
        path: Its name, in any file system. The folder has to be there.
        mode: "w", or "wb" for bytes.
        follows_link: Whether a link stays, and what it leads to is written, as for a
            file that a user has named. In a folder, which may come from anybody, the
            link is replaced.
        options: Further ones of `open`, for a file of this machine.

    Raises:
        OSError: It cannot be written.
    """
    remote = _is_remote(path)
    if follows_link and not remote:
        path = os.path.realpath(path)
    unfinished = unfinished_name(path)
    try:
        with (
            _gfile().GFile(unfinished, mode)
            if remote
            else _open_new(unfinished, mode, **options) as file
        ):
            yield file
        rename(unfinished, path)
    finally:
        if not remote:
            with contextlib.suppress(OSError):
                os.remove(unfinished)


def unfinished_name(path: str) -> str:
    """Returns the name of a file or a folder until it is whole, for this thread."""
    return f"{path}.{threading.get_native_id()}.unfinished"


def remove_unfinished(path: str) -> None:
    """Removes what killed processes have left of a file, which nobody writes now."""
    for left in glob.glob(f"{glob.escape(path)}.[0-9]*.unfinished"):
        with contextlib.suppress(OSError):
            remove(left)


def _open_new(path: str, mode: str, **options: Any) -> IO:
    # A link of that name could lead to anybody's file; a killed process leaves a file.
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, mode.replace("w", "x"), **options)


def write_text(path: str, text: str) -> None:
    """Writes a file of text in UTF-8, unless it has that text already.

    Args:
        path: Its name. The folder has to be there.
        text: What it is to have; bytes of a path that are no UTF-8 stay as they are.

    Raises:
        OSError: It cannot be written.
    """
    content = text.encode("utf-8", "surrogateescape")
    if not _has(path, content):
        with opened(path, "wb") as file:
            file.write(content)


def write_json(path: str, content: Any) -> None:
    """Writes a file of JSON that people can read, unless it has that content already.

    Args:
        path: Its name. The folder has to be there.
        content: What `json.dumps` takes.

    Raises:
        OSError: It cannot be written.
    """
    text = f"{json.dumps(content, indent=2, ensure_ascii=False)}\n"
    # Of a path that is no UTF-8, JSON has escapes.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())


def save_figure(path: str, figure: Any) -> None:
    """Writes a figure of Matplotlib's, of the kind that the file's name ends with.

    Args:
        path: Its name, which a user gives. The folder has to be there.
        figure: The figure.

    Raises:
        OSError: It cannot be written.
    """
    with opened(path, "wb", follows_link=True) as file:
        figure.savefig(file, format=os.path.splitext(path)[1][1:])


def rename(unfinished: str, path: str) -> None:
    """Gives a file that is whole its name, once the disk has it.

    Args:
        unfinished: Its name until now, in the same file system.
        path: Its name from now on; a file of that name is replaced.

    Raises:
        OSError: The disk cannot keep it.
    """
    if _is_remote(path):
        # Such file systems keep what is closed.
        _gfile().rename(unfinished, path, overwrite=True)
        return
    flush(unfinished)
    os.replace(unfinished, path)
    flush(os.path.dirname(path))


def remove(path: str) -> None:
    """Removes a file, a folder or a link; what a link leads to stays.

    Raises:
        OSError: It cannot be removed, or nothing is there.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def flush(path: str) -> None:
    """Waits until the disk has what was written to a file or a folder.

    Raises:
        OSError: It cannot keep that.
    """
    if _is_remote(path):
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems flush files only.
        if error.errno != errno.EINVAL or not os.path.isdir(path or "."):
            raise
    finally:
        os.close(descriptor)


def flush_all(folder: str) -> None:
    """Waits until the disk has all files and folders in a folder, and itself.

    Raises:
        OSError: It cannot keep them.
    """
    for parent, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            flush(os.path.join(parent, name))
        flush(parent)


def _raise(error: OSError) -> None:
    raise error


def _has(path: str, content: bytes) -> bool:
    try:
        return small_file.read_bytes(path, len(content)) == content
    except (FileNotFoundError, small_file.FileError):
        return False


def _is_remote(path: str) -> bool:
    return "://" in path


def _gfile() -> Any:
    # Late: programs read their flags before they import TensorFlow.
    import tensorflow as tf

    return tf.io.gfile

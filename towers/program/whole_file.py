"""Writes files that get their names only when they are complete and on disk."""

import contextlib
import errno
import glob
import json
import os
import shutil
import threading
from collections.abc import Iterator
from typing import IO, Any

from towers.program import object_store, small_file


@contextlib.contextmanager
def opened(
    path: str, mode: str = "w", follows_link: bool = False, **options: Any
) -> Iterator[IO]:
    """Opens a file to write to, which gets its name when it is complete.

    Readers see the complete file, or the previous one, even if the machine loses power.
    Threads and processes of a machine that write the same file use different names
    until then, and the last one to finish wins. If writing fails, no file is left; a
    process that is killed leaves PATH.ID.unfinished, with its thread's ID.

    Args:
        path: The file, in any file system, in an existing folder.
        mode: "w", or "wb" for bytes.
        follows_link: Whether to keep a link and write its target, as for a file that a
            user has named. In a folder, which may come from anyone, the link is
            replaced.
        options: Further arguments of `open`, for a local file.

    Raises:
        OSError: The file cannot be written.
    """
    remote = _is_remote(path)
    if follows_link and not remote:
        path = os.path.realpath(path)
    unfinished = unfinished_name(path)
    try:
        with (
            _opened_far(unfinished, mode)
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
    """Returns this thread's name of a file or folder until it is complete."""
    return f"{path}.{threading.get_native_id()}.unfinished"


def remove_unfinished(path: str) -> None:
    """Removes what killed processes have left of a file that no process writes now."""
    for left in glob.glob(f"{glob.escape(path)}.[0-9]*.unfinished"):
        with contextlib.suppress(OSError):
            remove(left)


def _open_new(path: str, mode: str, **options: Any) -> IO:
    # A link of that name could lead to any file; a killed process leaves a file.
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, mode.replace("w", "x"), **options)


def write_text(path: str, text: str) -> None:
    """Writes a text file in UTF-8, unless it has that content already.

    Args:
        path: The file, in an existing folder.
        text: The content; bytes of a path that are not UTF-8 are kept.

    Raises:
        OSError: The file cannot be written.
    """
    content = text.encode("utf-8", "surrogateescape")
    if not _has(path, content):
        with opened(path, "wb") as file:
            file.write(content)


def write_json(path: str, content: Any) -> None:
    """Writes a readable JSON file, unless it has that content already.

    Args:
        path: The file, in an existing folder.
        content: The content, as `json.dumps` takes it.

    Raises:
        OSError: The file cannot be written.
    """
    text = f"{json.dumps(content, indent=2, ensure_ascii=False)}\n"
    # JSON has escapes for bytes of a path that are not UTF-8.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())


def save_figure(path: str, figure: Any) -> None:
    """Saves a figure of Matplotlib, in the format of the file name's extension.

    Args:
        path: The file, which the user names, in an existing folder.
        figure: The figure.

    Raises:
        OSError: The file cannot be written.
    """
    with opened(path, "wb", follows_link=True) as file:
        figure.savefig(file, format=os.path.splitext(path)[1][1:])


def rename(unfinished: str, path: str) -> None:
    """Renames a complete file to its final name, once it is on disk.

    Args:
        unfinished: Its current name, in the same file system.
        path: Its final name; an existing file is replaced.

    Raises:
        OSError: The file cannot be written to disk.
    """
    if _is_remote(path):
        # Remote file systems store files as they are closed.
        with _as_os_errors():
            _gfile(path).rename(unfinished, path, overwrite=True)
        return
    flush(unfinished)
    os.replace(unfinished, path)
    flush(os.path.dirname(path))


def remove(path: str) -> None:
    """Removes a file, a folder or a link, but not the target of a link.

    Raises:
        OSError: It cannot be removed, or does not exist.
    """
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def flush(path: str) -> None:
    """Waits until the content of a file or a folder is on disk.

    Raises:
        OSError: It cannot be written to disk.
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
    """Waits until all files and folders in a folder, and the folder, are on disk.

    Raises:
        OSError: They cannot be written to disk.
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


@contextlib.contextmanager
def _opened_far(path: str, mode: str) -> Iterator[IO]:
    with _as_os_errors(), _gfile(path).GFile(path, mode) as file:
        yield file


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    """Makes an `OSError` of an error of TensorFlow's."""
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, error.message) from error


def _gfile(path: str) -> Any:
    # Imported late: programs read their flags before they import TensorFlow.
    import tensorflow as tf

    object_store.prepare(path)
    return tf.io.gfile

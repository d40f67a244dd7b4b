"""Reads and writes addresses such as `s3://bucket/name`, by fsspec.

TensorFlow reads `gs://` itself, in C++, and what it knows is left to it.

Files of data are read in ranges here, without a cache on the disk, which is the work of
`input_pipeline.local_store`. fsspec has caches of whole files and of blocks. They do
not replace it, by reading their code: a cached block has no checksum, a folder that
processes share has no limit, and nothing is fetched before it is asked for. So fsspec
moves the bytes, and the store orders, checks and keeps them.
"""

import datetime
import os
import re
from typing import IO, Any

from towers.program.extras import install_command
from towers.program.user_folders import cache_folder

# The extra [cloud] brings the packages of these.
_SCHEMES = "s3, gs, az, abfs or https"
_CHANGED = ("LastModified", "last_modified", "mtime", "created", "updated")


class StoreError(OSError):
    """A store cannot be read or written to; the message names the address."""


def scheme(path: str) -> str:
    """Returns the scheme of an address, such as "s3"; empty for a local path."""
    match = re.match(r"([a-z][a-z0-9+.-]*)://", path)
    return match.group(1) if match else ""


def working_folder(path: str) -> str:
    """Returns the folder of this machine where a run works.

    Args:
        path: A folder, or an address. Runs with one address have one folder.

    Raises:
        ValueError: The address has parts that lead elsewhere.
    """
    if not (name := scheme(path)):
        return os.path.abspath(os.path.expanduser(path))
    parts = path.partition("://")[2].rstrip("/").split("/")
    if {"", ".", ".."} & {*parts}:
        raise ValueError(
            f"Received {path}; expected an address without empty parts, . and .., such "
            f"as {name}://bucket/run."
        )
    return cache_folder(name, *parts)


def file_system(path: str) -> Any:
    """Returns fsspec's file system of an address.

    Raises:
        ValueError: The scheme is unknown, or its package is missing.
    """
    import fsspec  # few runs need it

    name = scheme(path)
    try:
        return fsspec.filesystem(name)
    except ImportError as error:
        raise ValueError(
            f"Received {path}, and the package that reads {name}:// is not installed "
            f"({error}); {install_command('cloud')}, or give a local path."
        ) from error
    except ValueError as error:
        raise ValueError(
            f"Received {path}, whose scheme is unknown ({error}); expected a local "
            f"path, or an address with {_SCHEMES} before ://."
        ) from error


def without_scheme(path: str) -> str:
    """Returns an address as its file system lists it."""
    import fsspec

    return fsspec.core.url_to_fs(path)[1].rstrip("/")


def prepare(text: str) -> None:
    """Lets TensorFlow read and write the addresses in a text; others are left alone.

    Args:
        text: A path, or several, such as `folder:s3://bucket/pictures`.

    Raises:
        ValueError: A scheme is unknown, or its package is missing.
    """
    for address in re.findall(r"[a-z][a-z0-9+.-]*://[^,]*", text):
        from towers.keras_adapter import file_systems  # imports TensorFlow

        if not file_systems.is_known(scheme(address)):
            file_system(address)
            file_systems.register(scheme(address), _Files())


class _Files:
    """The files at all addresses; see `RemoteFiles`."""

    def size(self, path: str) -> int:
        return _info(path)["size"]

    def read(self, path: str, begin: int, end: int) -> bytes:
        return file_system(path).cat_file(path, start=begin, end=end)

    def open_to_write(self, path: str, mode: str) -> IO[bytes]:
        return file_system(path).open(path, mode)

    def remove(self, path: str) -> None:
        file_system(path).rm_file(path)

    def remove_folder(self, path: str) -> None:
        # Most stores have none, and the folder was gone with its files.
        if (system := file_system(path)).isdir(path):
            system.rmdir(path)

    def rename(self, old: str, new: str) -> None:
        system = file_system(old)
        if system.isdir(old):  # a slash means what is in it
            system.mv(f"{old.rstrip('/')}/", f"{new.rstrip('/')}/", recursive=True)
        else:
            system.mv(old, new)

    def copy(self, old: str, new: str) -> None:
        file_system(old).cp_file(old, new)

    def stat(self, path: str) -> tuple[int, int, bool]:
        known = _info(path)
        is_folder = known["type"] == "directory"
        return 0 if is_folder else known["size"] or 0, _changed_ns(known), is_folder

    def names_in(self, path: str) -> list[str]:
        if _info(path)["type"] != "directory":
            raise NotADirectoryError("it is no folder")
        system = file_system(path)
        own = without_scheme(path)
        listed = [entry["name"].rstrip("/") for entry in system.ls(path, detail=True)]
        # Some stores list the folder itself.
        return sorted(os.path.basename(name) for name in listed if name != own)


def _info(path: str) -> dict[str, Any]:
    return file_system(path).info(path)


def _changed_ns(known: dict[str, Any]) -> int:
    changed = next((known[key] for key in _CHANGED if known.get(key)), 0)
    if isinstance(changed, str):
        changed = datetime.datetime.fromisoformat(changed)
    if isinstance(changed, datetime.datetime):
        changed = changed.timestamp()
    return int(changed * 1e9)

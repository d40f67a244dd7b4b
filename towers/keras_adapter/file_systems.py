"""Gives TensorFlow file systems that are written in Python.

TensorFlow has an interface in C for file systems that others add: structures of
functions (`tensorflow/c/experimental/filesystem/filesystem_interface.h`). It is usually
given to a library that TensorFlow loads. Here, ctypes fills it in with functions of
Python. So all that takes a path takes these, too: `tf.io.gfile`, operations of a graph,
`tf.data`. The functions of the interface are public; the one that registers them is
exported, but has no name in C.
"""

import ctypes
import functools
import glob
import itertools
import os
import threading
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint64
from ctypes import c_void_p as pointer
from typing import IO, Any, Protocol

import tensorflow as tf

# Registers the structures: `RegisterFilesystemPluginImpl` of C++.
_REGISTER = (
    "_ZN10tensorflow23filesystem_registration28RegisterFilesystemPluginImpl"
    "EPK23TF_FilesystemPluginInfo"
)
_LIBRARY = "libtensorflow_cc*"
# What is read from front to back is fetched in ranges of this size.
_AHEAD_BYTES = 4 * 2**20
# TensorFlow's codes of errors; the most special class of Python comes first.
_CODES = {
    FileNotFoundError: tf.errors.NOT_FOUND,
    FileExistsError: tf.errors.ALREADY_EXISTS,
    PermissionError: tf.errors.PERMISSION_DENIED,
    IsADirectoryError: tf.errors.FAILED_PRECONDITION,
    NotADirectoryError: tf.errors.FAILED_PRECONDITION,
    NotImplementedError: tf.errors.UNIMPLEMENTED,
    ValueError: tf.errors.INVALID_ARGUMENT,
    Exception: tf.errors.UNAVAILABLE,
}
_registering = threading.Lock()
# TensorFlow calls these functions until the process ends.
_KEPT: list[Any] = []


class _Statistics(ctypes.Structure):
    _fields_ = [("length", c_int64), ("mtime_nsec", c_int64), ("is_folder", c_bool)]


_CleanUp = ctypes.CFUNCTYPE(None, POINTER(pointer))
_Read = ctypes.CFUNCTYPE(
    c_int64, POINTER(pointer), c_uint64, c_size_t, pointer, pointer
)
_Append = ctypes.CFUNCTYPE(None, POINTER(pointer), pointer, c_size_t, pointer)
_Tell = ctypes.CFUNCTYPE(c_int64, POINTER(pointer), pointer)
_OfAFile = ctypes.CFUNCTYPE(None, POINTER(pointer), pointer)
_Init = ctypes.CFUNCTYPE(None, pointer, pointer)
_End = ctypes.CFUNCTYPE(None, pointer)
_Open = ctypes.CFUNCTYPE(None, pointer, c_char_p, POINTER(pointer), pointer)
_OfAPath = ctypes.CFUNCTYPE(None, pointer, c_char_p, pointer)
_OfTwoPaths = ctypes.CFUNCTYPE(None, pointer, c_char_p, c_char_p, pointer)
_Stat = ctypes.CFUNCTYPE(None, pointer, c_char_p, POINTER(_Statistics), pointer)
_Translate = ctypes.CFUNCTYPE(pointer, pointer, c_char_p)
_Children = ctypes.CFUNCTYPE(c_int, pointer, c_char_p, POINTER(pointer), pointer)


class _ReadableOps(ctypes.Structure):
    _fields_ = [("cleanup", _CleanUp), ("read", _Read)]


class _WritableOps(ctypes.Structure):
    _fields_ = [
        *(("cleanup", _CleanUp), ("append", _Append), ("tell", _Tell)),
        *(("flush", _OfAFile), ("sync", _OfAFile), ("close", _OfAFile)),
    ]


class _FileSystemOps(ctypes.Structure):
    # TensorFlow has a way of its own for those that stay empty, which have no type.
    _fields_ = [
        *(("init", _Init), ("cleanup", _End)),
        ("new_random_access_file", _Open),
        ("new_writable_file", _Open),
        ("new_appendable_file", _Open),
        ("new_read_only_memory_region_from_file", pointer),
        *(("create_dir", _OfAPath), ("recursively_create_dir", _OfAPath)),
        *(("delete_file", _OfAPath), ("delete_dir", _OfAPath)),
        ("delete_recursively", pointer),
        *(("rename_file", _OfTwoPaths), ("copy_file", _OfTwoPaths)),
        *(("path_exists", _OfAPath), ("paths_exist", pointer)),
        *(("stat", _Stat), ("is_directory", pointer), ("get_file_size", pointer)),
        *(("translate_name", _Translate), ("get_children", _Children)),
        ("get_matching_paths", pointer),
        # Caches, transactions and options.
        ("others", pointer * 13),
    ]


class _PluginOps(ctypes.Structure):
    _fields_ = [
        ("scheme", pointer),
        *(("abi", c_int), ("api", c_int), ("size", c_size_t)),
        ("file_system", POINTER(_FileSystemOps)),
        *(
            ("readable_abi", c_int),
            ("readable_api", c_int),
            ("readable_size", c_size_t),
        ),
        ("readable", POINTER(_ReadableOps)),
        *(
            ("writable_abi", c_int),
            ("writable_api", c_int),
            ("writable_size", c_size_t),
        ),
        ("writable", POINTER(_WritableOps)),
        *(("region_abi", c_int), ("region_api", c_int), ("region_size", c_size_t)),
        ("region", pointer),
    ]


class _PluginInfo(ctypes.Structure):
    _fields_ = [
        ("num_schemes", c_size_t),
        ("ops", POINTER(_PluginOps)),
        ("allocate", pointer),
        ("free", pointer),
    ]


class _ReturnedStatus(ctypes.Structure):
    # A status of C++ has 8 bytes, and is returned in memory that the caller gives, as
    # C returns all that is large.
    _fields_ = [("status", pointer), ("padding", pointer * 3)]


class RemoteFiles(Protocol):
    """What TensorFlow needs of the files at some addresses."""

    def size(self, path: str) -> int:
        """Returns the bytes of a file; raises an `OSError` if there is none."""

    def read(self, path: str, begin: int, end: int) -> bytes:
        """Returns a range of a file."""

    def open_to_write(self, path: str, mode: str) -> IO[bytes]:
        """Opens a file that is there once it is closed; the mode is "wb" or "ab"."""

    def remove(self, path: str) -> None:
        """Removes a file."""

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder, if the store has such."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file or a folder."""

    def copy(self, old: str, new: str) -> None:
        """Copies a file."""

    def stat(self, path: str) -> tuple[int, int, bool]:
        """Returns bytes, nanoseconds of the last change, and whether it is a folder."""

    def names_in(self, path: str) -> list[str]:
        """Returns the names in a folder."""


def is_known(scheme: str) -> bool:
    """Tells whether TensorFlow takes addresses of a scheme."""
    return scheme in tf.io.gfile.get_registered_schemes()


def register(scheme: str, files: RemoteFiles) -> None:
    """Lets TensorFlow read and write addresses; one that it knows is left to it.

    Args:
        scheme: What stands before the colon, such as "s3".
        files: The files there; several threads use them.

    Raises:
        ValueError: This version of TensorFlow takes no file systems of others.
    """
    with _registering:
        if is_known(scheme):
            return
        register = getattr(_library(), _REGISTER, None)
        if register is not None:
            register.argtypes, register.restype = [pointer], _ReturnedStatus
            register(_plugin_info(scheme, files))
        if not is_known(scheme):
            raise ValueError(
                f"TensorFlow {tf.__version__} takes no file systems of others, such as "
                f"{scheme}://; expected a folder of this machine, or another version."
            )


@functools.cache
def _library() -> ctypes.CDLL | None:
    names = glob.glob(os.path.join(tf.sysconfig.get_lib(), _LIBRARY))
    return ctypes.CDLL(names[0]) if names else None


def _plugin_info(scheme: str, files: RemoteFiles) -> Any:
    structures = system, readable, writable = _structures(files)
    _KEPT.append(structures)
    plugin = _PluginOps(
        scheme=_allocated(scheme.encode()),
        size=ctypes.sizeof(system),
        file_system=_copied(system),
        readable_size=ctypes.sizeof(readable),
        readable=_copied(readable),
        writable_size=ctypes.sizeof(writable),
        writable=_copied(writable),
    )
    allocate, free = (ctypes.cast(f, pointer) for f in (_c().malloc, _c().free))
    return ctypes.byref(_PluginInfo(1, _copied(plugin), allocate, free))


def _copied(structure: ctypes.Structure) -> Any:
    """Returns a copy that TensorFlow frees."""
    size = ctypes.sizeof(structure)
    copy = _c().malloc(size)
    ctypes.memmove(copy, ctypes.byref(structure), size)
    return ctypes.cast(copy, POINTER(type(structure)))


@functools.cache
def _c() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.argtypes, library.malloc.restype = [c_size_t], pointer
    library.free.argtypes, library.free.restype = [pointer], None
    return library


def _allocated(content: bytes) -> int:
    """Returns the address of a copy that TensorFlow frees."""
    address = _c().malloc(len(content) + 1)
    ctypes.memmove(address, content, len(content) + 1)
    return address


class _Handles:
    """Objects of Python, by numbers that TensorFlow keeps for them."""

    def __init__(self):
        self._numbers, self._objects = itertools.count(1), {}

    def add(self, value: Any) -> int:
        number = next(self._numbers)
        self._objects[number] = value
        return number

    def __getitem__(self, file: Any) -> Any:
        return self._objects[file[0]]

    def remove(self, file: Any) -> None:
        self._objects.pop(file[0], None)


class _Readable:
    """A file that is read in ranges, by several threads."""

    def __init__(self, files: RemoteFiles, path: str):
        self.path, self._files = path, files
        self._lock = threading.Lock()
        self._begin, self._piece, self._end = 0, b"", -1

    @functools.cached_property
    def _size(self) -> int:
        return self._files.size(self.path)

    def read(self, begin: int, length: int) -> bytes:
        """Returns a range, up to the end of the file."""
        end = min(begin + length, self._size)
        with self._lock:
            at, piece, in_order = self._begin, self._piece, begin == self._end
            self._end = end
        if begin >= end:
            return b""
        if at <= begin and end <= at + len(piece):
            return piece[begin - at : end - at]
        # A reader that goes on from where it ended will go further.
        ahead = min(begin + max(length, _AHEAD_BYTES), self._size) if in_order else end
        piece = self._files.read(self.path, begin, ahead)
        with self._lock:
            self._begin, self._piece = begin, piece
        return piece[: end - begin]


def _structures(
    files: RemoteFiles,
) -> tuple[_FileSystemOps, _ReadableOps, _WritableOps]:
    """Fills in the structures."""
    library, opened = _library(), _Handles()
    library.TF_SetStatus.argtypes = [pointer, c_int, c_char_p]
    library.TF_SetStatus.restype = None

    def run(status, path, body):
        """Runs a function; returns its result, and `None` after an error."""
        try:
            result = body()
        except Exception as error:
            code = next(code for of, code in _CODES.items() if isinstance(error, of))
            text = f"{path}; {str(error) or type(error).__name__}"
            library.TF_SetStatus(status, code, text.encode())
            return None
        library.TF_SetStatus(status, tf.errors.OK, b"")
        return result

    def of_a_path(body):
        def call(_, path, status):
            run(status, path.decode(), lambda: body(path.decode()))

        return _OfAPath(call)

    def of_two_paths(body):
        def call(_, old, new, status):
            run(status, old.decode(), lambda: body(old.decode(), new.decode()))

        return _OfTwoPaths(call)

    def opens(open_path):
        def call(_, path, file, status):
            path = path.decode()
            file[0] = run(status, path, lambda: opened.add(open_path(path))) or 0

        return _Open(call)

    def read(file, begin, length, buffer, status):
        readable = opened[file]
        data = run(status, readable.path, lambda: readable.read(begin, length))
        if data is None:
            return 0
        ctypes.memmove(buffer, data, len(data))
        if len(data) < length:
            library.TF_SetStatus(status, tf.errors.OUT_OF_RANGE, b"the file ends")
        return len(data)

    def append(file, buffer, length, status):
        data = ctypes.string_at(buffer, length)
        run(status, "the file", lambda: opened[file].write(data))

    def tell(file, status):
        position = run(status, "the file", lambda: opened[file].tell())
        return -1 if position is None else position

    def close(file, status):
        run(status, "the file", lambda: opened[file].close())

    def nothing(_, status):
        run(status, "", lambda: None)

    def clean_up(file):
        opened.remove(file)

    def stat(_, path, statistics, status):
        known = run(status, path.decode(), lambda: files.stat(path.decode()))
        if known is not None:
            statistics[0] = _Statistics(*known)

    def children(_, path, entries, status):
        names = run(status, path.decode(), lambda: files.names_in(path.decode()))
        if names is None:
            return -1
        addresses = (pointer * len(names))(
            *(_allocated(name.encode()) for name in names)
        )
        entries[0] = _allocated(bytes(addresses))
        return len(names)

    # A store has no folders; they are there with their files.
    make_folder = of_a_path(lambda _: None)
    system = _FileSystemOps(
        init=_Init(nothing),
        cleanup=_End(lambda _: None),
        new_random_access_file=opens(lambda path: _Readable(files, path)),
        new_writable_file=opens(lambda path: files.open_to_write(path, "wb")),
        new_appendable_file=opens(lambda path: files.open_to_write(path, "ab")),
        create_dir=make_folder,
        recursively_create_dir=make_folder,
        delete_file=of_a_path(files.remove),
        delete_dir=of_a_path(files.remove_folder),
        rename_file=of_two_paths(files.rename),
        copy_file=of_two_paths(files.copy),
        path_exists=of_a_path(files.stat),
        stat=_Stat(stat),
        translate_name=_Translate(lambda _, name: _allocated(name)),
        get_children=_Children(children),
    )
    readable = _ReadableOps(cleanup=_CleanUp(clean_up), read=_Read(read))
    # A store has a file once it is closed, so there is nothing to flush.
    writable = _WritableOps(
        cleanup=_CleanUp(clean_up),
        append=_Append(append),
        tell=_Tell(tell),
        flush=_OfAFile(nothing),
        sync=_OfAFile(nothing),
        close=_OfAFile(close),
    )
    return system, readable, writable

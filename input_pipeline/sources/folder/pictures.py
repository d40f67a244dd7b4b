"""Finds the files of a folder that are pictures for TensorFlow, or texts."""

import collections
import concurrent.futures
import os
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

from towers.input_pipeline.images import ignored
from towers.input_pipeline.specs import PICTURES, TEXTS
from towers.program import progress, words

# Files with these names are taken; reading reports faults.
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".gif", ".webp")
# The content decides about other names.
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a")
_PICTURES = (*SUFFIXES, ".bmp", ".dib", ".tif", ".tiff", ".heic", ".avif", ".jp2")
# Folders to list at once: a far file system answers several requests.
_AT_ONCE, _AHEAD = 16, 128
# Files that file managers leave behind.
_LITTER = ("thumbs.db", "desktop.ini", "icon\r")
# A palette ends here, at the latest.
_HEADER = 54 + 4 * 256


class Sorted:
    """Sorts the files of folders into pictures, or texts, and others.

    Args:
        texts: whether texts are wanted: files that end with .txt.

    Attributes:
        what: the kind of file that is wanted, in messages.
        left_out: number of other files of each kind, such as ".tiff".
        folders: folders that are not searched.
        more: further sentences for the user.
    """

    def __init__(self, texts: bool = False):
        self._texts, self.what = texts, TEXTS if texts else PICTURES
        self._suffixes = (TEXTS,) if texts else SUFFIXES
        self.left_out: collections.Counter[str] = collections.Counter()
        self.folders: list[str] = []
        self.more: list[str] = []

    def files(self, folder: str, names: Sequence[str] | None = None) -> list[str]:
        """Returns the wanted files directly in a folder, sorted, and notes the others.

        Args:
            folder: the path of the folder.
            names: the names in it, sorted, if they are known.
        """
        names, prefix = names or names_in(folder), os.path.join(folder, "")
        # There may be a million: most are taken by their names alone.
        paths = [
            prefix + name
            for name in names
            if name.lower().endswith(self._suffixes) and name[0] != "."
        ]
        if len(paths) < len(names):
            by_name = {*paths}
            others = [name for name in names if prefix + name not in by_name]
            paths = sorted([*paths, *self._others(others, prefix)])
        return paths

    def _others(self, names: Iterable[str], prefix: str) -> list[str]:
        """Returns the files whose content makes them pictures; notes the others."""
        paths = []
        for name in names:
            path = prefix + name
            if name.lower() in _LITTER or not _is_seen(name):
                continue
            if tf.io.gfile.isdir(path):
                if name[0] != ".":
                    self.folders.append(path)
            elif name[0] == ".":
                self.left_out[f"hidden {_suffix(name)}"] += 1
            elif (fault := "" if self._texts else _fault(path)) is not None:
                self.left_out[f"{_suffix(name)}{fault}"] += 1
            else:
                paths.append(path)
        return paths

    def walk(self, folder: str) -> list[str]:
        """Returns the wanted files in a folder and below it, and notes the others.

        Links to folders are not followed, as they may lead back.
        """
        before = len(self.folders)
        paths, below = self.files(folder), self.folders[before:]
        self.folders[before:] = filter(os.path.islink, below)
        for path in below:
            if not os.path.islink(path):
                paths += self.walk(path)
        return paths

    def loose(self, folder: str) -> None:
        """Notes the files beside class folders."""
        for name, _ in entries(folder):
            if name.lower().endswith(self._suffixes if self._texts else _PICTURES):
                self.left_out[f"{_suffix(name)} beside the class folders"] += 1

    def notes(self) -> list[str]:
        """Describes what was left out, a sentence each."""
        notes = []
        if count := self.left_out.total():
            listed = ", ".join(f"{n:,} {kind}" for kind, n in _ordered(self.left_out))
            notes.append(
                f"{words.count(count, 'file')} left out: {listed}; files are read if "
                f"they are {self.what}{' files' * self._texts}."
            )
        if self.folders:
            count = words.count(len(self.folders), "folder")
            notes.append(f"{count} left out, such as {self.folders[0]}.")
        return [*notes, *self.more]


def entries(folder: str) -> list[tuple[str, str]]:
    """Returns names and paths in a folder that are not hidden, sorted."""
    return [
        (name, os.path.join(folder, name))
        for name in names_in(folder)
        if name[0] != "."
    ]


def names_in(folder: str) -> list[str]:
    """Returns the names in a folder, sorted."""
    if not is_remote(folder):
        return sorted(os.listdir(folder))
    # Some file systems end the names of folders with a slash.
    return sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))


def names_in_each(folders: Sequence[str], what: str) -> Iterator[list[str]]:
    """Yields the result of `names_in` for each folder; lists several at once.

    Args:
        folders: the paths of the folders.
        what: the name of the list in a progress bar.
    """
    with (
        progress.Progress(
            f"Listing {what}", len(folders), "folders", progress.EARLY_S
        ) as shown,
        concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        # Not all at once, as their names take memory until they are used.
        for begin in range(0, len(folders), _AHEAD):
            for names in pool.map(names_in, folders[begin : begin + _AHEAD]):
                yield names
                shown.add()


def folders_in(parent: str) -> dict[str, str]:
    """Returns the paths of folders that are not hidden, by their names, sorted."""
    if is_remote(parent):
        paths = dict(entries(parent))
        with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
            are_folders = pool.map(tf.io.gfile.isdir, paths.values())
            return {
                name: paths[name]
                for name, is_folder in zip(paths, are_folders, strict=True)
                if is_folder
            }
    with os.scandir(parent) as listing:
        names = [
            entry.name for entry in listing if entry.name[0] != "." and entry.is_dir()
        ]
    return {name: os.path.join(parent, name) for name in sorted(names)}


def as_tensor(paths: Sequence[str]) -> tf.Tensor:
    """Makes a tensor of paths, also of names without a valid encoding."""
    try:
        return tf.constant(paths)
    except ValueError:
        return tf.constant([*map(os.fsencode, paths)])


def is_remote(path: str) -> bool:
    """Tells whether only TensorFlow can read a path."""
    return "://" in path


def notes_of_content(paths: Sequence[str]) -> list[str]:
    """Describes what reading pictures ignores: a sentence each, with an example.

    Args:
        paths: the paths of pictures, of which a few are checked.
    """
    some = paths[:: len(paths) // ignored.MOST + 1]
    return ignored.notes((path, _head(path)) for path in some)


def _head(path: str) -> bytes:
    try:
        # Names may have no valid encoding.
        with tf.io.gfile.GFile(os.fsencode(path), "rb") as file:
            return file.read(ignored.HEAD)
    # Reading the picture reports the error.
    except tf.errors.OpError:
        return b""


def _is_seen(name: str) -> bool:
    """Tells whether a name is visible, or hides a picture, as no "._" file does."""
    pretends = name.startswith(".") and not name.startswith("._")
    return name[0] != "." or (pretends and name.lower().endswith(_PICTURES))


def _suffix(name: str) -> str:
    return os.path.splitext(name.lstrip("."))[1].lower() or "without a suffix"


def _ordered(counts: collections.Counter[str]) -> Iterable[tuple[str, int]]:
    """Sorts kinds, the most frequent first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _fault(path: str) -> str | None:
    """Returns None for a picture; else the remark for ``left_out`` beside its kind."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            head = file.read(_HEADER)
    except tf.errors.OpError:
        return " (cannot be read)"
    if head.startswith(_BEGINNINGS):
        return None
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return None
    if head[:2] == b"BM" and head[6:10] == bytes(4):
        return _fault_of_bitmap(head)
    return ""


def _fault_of_bitmap(head: bytes) -> str | None:
    """Finds bitmaps with a palette, whose indices TensorFlow takes for grey pixels."""

    def number(offset, size):
        return int.from_bytes(head[offset : offset + size], "little")

    bits, compression = number(28, 2), number(30, 4)
    palette = head[14 + number(14, 4) : number(10, 4)]
    grey = b"".join(bytes([k, k, k]) for k in range(256))
    colors = b"".join(palette[k : k + 3] for k in range(0, len(palette), 4))
    if bits == 8 and compression == 0 and colors == grey:
        return None
    if bits in (24, 32) and compression in (0, 3):
        return None
    return " with a palette" if bits <= 8 else " (compressed)"

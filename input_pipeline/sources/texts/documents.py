"""Documents: files of text, and the parts that are held out."""

import dataclasses
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.file_source import group_by_split
from towers.input_pipeline.sources.files.record import BadRecordError, fault_of

# The parts of the standard library that text:python leaves out: tests, tables, and
# files that differ between machines.
_NOT_READ = ("encodings", "ensurepip", "idlelib", "pydoc_data", "test", "tests")
_NOT_ALIKE = ("config-", "_sysconfigdata")
_PACKAGES = ("site-packages", "dist-packages", "__pycache__")
# With fewer files, one file would be too much or too little to hold out.
_MANY = 10


@dataclasses.dataclass(frozen=True)
class Documents:
    """Files of text, each a document.

    Attributes:
        files: the paths of each split, sorted; the same in both, if the end of each
            file is held out.
        fraction: the fraction of each file that is held out, or 0.
        notes: sentences on what was decided.
    """

    files: dict[str, list[str]]
    fraction: float = 0.0
    notes: tuple[str, ...] = ()

    def read(self, path: str, split: str) -> bytes:
        """Reads the part of a file that belongs to a split.

        Raises:
            BadRecordError: the file cannot be read.
        """
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                content = file.read()
        except tf.errors.OpError as error:
            raise BadRecordError(f"{path}: {fault_of(error)}") from error
        if not self.fraction:
            return content
        # Whole lines, if it has some: a cut within a character is no text.
        position = round(len(content) * (1 - self.fraction))
        position = content.rfind(b"\n", 0, position) + 1 or _character(
            content, position
        )
        return content[:position] if split == "train" else content[position:]


def _character(content: bytes, position: int) -> int:
    """Returns the first byte of the character that a byte belongs to, in UTF-8."""
    while 0 < position < len(content) and content[position] & 0xC0 == 0x80:
        position -= 1
    return position


def find(
    pattern: str,
    eval_fraction: float | None,
    fault: Callable[[bytes], str] | None = None,
) -> Documents:
    """Finds files, and decides what is held out.

    Files are held out by their names, as those of ``FileSource``; otherwise some of
    many files are held out, or the end of each of few files.

    Args:
        pattern: glob of files, or a folder, for all files in it; or ``python``.
        eval_fraction: the fraction to hold out; None for a tenth.
        fault: describes why the content of a file is bad, or returns "", if bad files
            are left out: these do not count, and all files are read to find them. None:
            there are no bad files.

    Raises:
        ValueError: there is no file, or a fraction although files are held out.
    """
    if pattern == "python":
        files, notes = {"train": python_sources()}, (_of_python(),)
    else:
        files, notes = group_by_split("text", pattern)
    if "train" not in files or "test" in files:
        if eval_fraction:
            raise splits.held_out_by_name(eval_fraction, f"text:{pattern}", files)
        return Documents(files, notes=notes)
    fraction, paths = splits.check_fraction(eval_fraction), files["train"]
    if not fraction:
        return Documents(files, notes=notes)
    bad = _bad(Documents(files), fault) if fault is not None else set()
    held = splits.every_nth(paths, fraction, bad.__contains__)
    if held and len(paths) - len(bad) >= _MANY:
        notes += (splits.note(fraction, "files", len(held)),)
        train = sorted({*paths} - {*held})
        return Documents({"train": train, "test": held}, notes=notes)
    notes += (splits.note(fraction, "text, at the end of each file,", None),)
    return Documents({"train": paths, "test": paths}, fraction, notes)


def _bad(documents: Documents, fault: Callable[[bytes], str]) -> set[str]:
    """Returns the paths of bad files, of those for training."""

    def is_bad(path):
        try:
            return bool(fault(documents.read(path, "train")))
        except BadRecordError:
            return True

    return {*filter(is_bad, documents.files["train"])}


def python_sources() -> list[str]:
    """Returns the files of Python's standard library that all machines have.

    Raises:
        ValueError: this Python has none.
    """
    root = sysconfig.get_path("stdlib")
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _is_read(name, _PACKAGES + _NOT_READ)]
        paths += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and _is_read(name)
        ]
    if not paths:
        raise ValueError(
            f"text:python reads the sources of Python's standard library, but {root} "
            "has none: expected another Python, or files by text:GLOB"
        )
    return sorted(paths)


def _is_read(name: str, others: Sequence[str] = ()) -> bool:
    return name not in others and not name.startswith(_NOT_ALIKE)


def _of_python() -> str:
    version = sysconfig.get_python_version()
    return (
        f"The text is the standard library of Python {version}, without "
        f"{', '.join(_NOT_READ)}."
    )


def chunks(content: bytes, size: int, whole_lines: bool) -> Iterator[bytes]:
    """Cuts a long document, which tokenizers take at once, after ends of lines.

    Args:
        content: the content of the document.
        size: approximate bytes of a piece.
        whole_lines: whether to cut only there; a line of any length stays whole.
    """
    begin = 0
    while begin < len(content):
        end = begin + size
        if whole_lines and end < len(content):
            end = content.find(b"\n", end) + 1 or len(content)
        yield content[begin:end]
        begin = end

"""Documents: files of text, and which part of them is held out."""

import dataclasses
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.file_source import group_by_split
from towers.input_pipeline.sources.files.record import BadRecordError, fault_of

# What text:python leaves out of the standard library: tests, tables, and what is not
# alike on all machines.
_NOT_READ = ("encodings", "ensurepip", "idlelib", "pydoc_data", "test", "tests")
_NOT_ALIKE = ("config-", "_sysconfigdata")
_PACKAGES = ("site-packages", "dist-packages", "__pycache__")
# Of fewer files, one would be too much or too little to hold out.
_MANY = 10


@dataclasses.dataclass(frozen=True)
class Documents:
    """Files of text, each a document.

    Attributes:
        files: paths of each split, sorted; the same ones in both, if the end of each is
            held out.
        fraction: which is, or 0.
        notes: what was decided.
    """

    files: dict[str, list[str]]
    fraction: float = 0.0
    notes: tuple[str, ...] = ()

    def read(self, path: str, split: str) -> bytes:
        """Reads what a file has of a split.

        Raises:
            BadRecordError: it cannot be read.
        """
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                content = file.read()
        except tf.errors.OpError as error:
            raise BadRecordError(f"{path}: {fault_of(error)}") from error
        if not self.fraction:
            return content
        # Whole lines, if it has some: a cut within a character is no text.
        place = round(len(content) * (1 - self.fraction))
        place = content.rfind(b"\n", 0, place) + 1 or _character(content, place)
        return content[:place] if split == "train" else content[place:]


def _character(content: bytes, place: int) -> int:
    """The first byte of the character that a byte belongs to, in UTF-8."""
    while 0 < place < len(content) and content[place] & 0xC0 == 0x80:
        place -= 1
    return place


def find(
    pattern: str,
    eval_fraction: float | None,
    fault: Callable[[bytes], str] | None = None,
) -> Documents:
    """Finds files, and decides what is held out.

    Files are held out by their names, as those of ``FileSource`` are; else, of many
    files some are, and of few files the end of each.

    Args:
        pattern: glob of files, or a folder, for all files in it; or ``python``.
        eval_fraction: to hold out; None for a tenth.
        fault: says why the content of a file is bad, or "", where bad files are left
            out: these count for nothing, and all files are read to know them. None:
            there is no bad file.

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
    """The paths of whole files for training that are bad."""

    def is_bad(path):
        try:
            return bool(fault(documents.read(path, "train")))
        except BadRecordError:
            return True

    return {*filter(is_bad, documents.files["train"])}


def python_sources() -> list[str]:
    """The files of Python's standard library, as far as all machines have them.

    Raises:
        ValueError: this Python has none.
    """
    root = sysconfig.get_path("stdlib")
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if _is_read(name, _PACKAGES + _NOT_READ)]
        found += [
            os.path.join(folder, name)
            for name in names
            if name.endswith(".py") and _is_read(name)
        ]
    if not found:
        raise ValueError(
            f"text:python reads the sources of Python's standard library, but {root} "
            "has none: expected another Python, or files by text:GLOB"
        )
    return sorted(found)


def _is_read(name: str, others: Sequence[str] = ()) -> bool:
    return name not in others and not name.startswith(_NOT_ALIKE)


def _of_python() -> str:
    version = sysconfig.get_python_version()
    return (
        f"The text is the standard library of Python {version}, without "
        f"{', '.join(_NOT_READ)}."
    )


def chunks(content: bytes, size: int, whole_lines: bool) -> Iterator[bytes]:
    """Cuts a long document, which tokenizers take at once, behind ends of lines.

    Args:
        content: of the document.
        size: bytes of a piece, more or less.
        whole_lines: whether to cut only there; a line of any length stays whole.
    """
    begin = 0
    while begin < len(content):
        end = begin + size
        if whole_lines and end < len(content):
            end = content.find(b"\n", end) + 1 or len(content)
        yield content[begin:end]
        begin = end

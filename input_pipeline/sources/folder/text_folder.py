"""``folder:DIR``: a folder of texts for each class."""

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from towers.input_pipeline.sources.files.record import fault_of
from towers.input_pipeline.sources.folder import classes, pictures
from towers.input_pipeline.sources.texts.encoded import EncodedSource, Example
from towers.input_pipeline.sources.texts.rows import bad_record, check_length
from towers.input_pipeline.sources.texts.tokens import fault_of_text
from towers.input_pipeline.text import Tokenizer, open_tokenizer
from towers.program import progress


class TextFolderSource(EncodedSource):
    """Class folders of .txt files, each a text; otherwise as ``ImageFolderSource``.

    A row is int32 [T], cut off, or padded with 0 at its end. All are kept in memory.

    Args:
        directory: DIR.
        eval_fraction: of the files of each class to hold out, if no folder is; None for
            a tenth.
        tokenizer: a spec of ``open_tokenizer``, or a tokenizer.
        sequence_length: T. None: 128.
        skip_bad: whether to leave out files that cannot be read, or are no text.

    Raises:
        ValueError: see ``ImageFolderSource``; or there are pictures, too, there is no
            such tokenizer, or a file is bad.
    """

    image_fields = ()  # a file is a text

    def __init__(
        self,
        directory: str,
        eval_fraction: float | None = None,
        *,
        tokenizer: str | Tokenizer = "bytes",
        sequence_length: int | None = None,
        skip_bad: bool = False,
    ):
        self.image_shape = (check_length(sequence_length),)
        self.tokenizer = open_tokenizer(tokenizer)
        files = pictures.Sorted(texts=True)
        # Bad texts are known before some are held out; each file is read once.
        read = functools.cache(self._text)
        is_bad = (lambda path: bool(read(path)[1])) if skip_bad else None
        found = classes.find(directory, eval_fraction, files, is_bad)
        if images := sum(files.left_out[each] for each in pictures.SUFFIXES):
            raise classes.mixed(directory, sum(map(len, found.paths.values())), images)
        self.name, self._files = f"folder:{directory}", found.paths
        self.class_names, self.notes = found.names, found.notes
        self.num_classes = len(self.class_names)
        self._read(found, read, skip_bad)
        self.reads = (*self.image_shape, self.tokenizer.fingerprint)

    def _read(
        self,
        found: classes.Found,
        read: Callable[[str], tuple[bytes, str]],
        skip_bad: bool,
    ) -> None:
        """Reads and tokenises all files, but for those that are bad."""
        faults, examples, targets = [], [], []
        self.splits = {}
        for split, paths in found.paths.items():
            before = len(examples)
            of_split = zip(paths, found.labels[split], strict=True)
            for path, label in progress.over(
                of_split, f"Reading {self.name}", len(paths), "texts", progress.EARLY_S
            ):
                text, fault = read(path)
                if fault:
                    faults.append(bad_record(path, "", fault))
                    continue
                examples.append(Example(path, "", text, ()))
                targets.append(label)
            self.splits[split] = len(examples) - before
        self._refuse(faults, skip_bad)
        for split, count in self.splits.items():
            if not count:
                raise ValueError(
                    f"{self.name} has no text in its split {split}; the first bad one "
                    f"is {faults[0]}"
                )
        self._encode(examples, np.array(targets))

    def _text(self, path: str) -> tuple[bytes, str]:
        """What a file says, and what is wrong with it."""
        try:
            with tf.io.gfile.GFile(path, "rb") as file:
                text = file.read()
        except tf.errors.OpError as error:
            return b"", fault_of(error)
        return text, fault_of_text(self.tokenizer, text)

"""Files of text, tokenised once."""

import abc
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping

import numpy as np

from towers.input_pipeline.sources.base import IndexedSource, sizes_and_times
from towers.input_pipeline.sources.targets import Target
from towers.input_pipeline.sources.texts import documents
from towers.input_pipeline.sources.texts.rows import check_length
from towers.input_pipeline.sources.texts.tokens import (
    Tokens,
    fault_of_text,
    tokenise,
)
from towers.input_pipeline.text import Tokenizer, open_tokenizer
from towers.program import words


class TokenisedSource(IndexedSource):
    """Files of text, each a document, in rows of tokens and of the tokens after them.

    ``prepare`` tokenises text once. A subclass makes rows of the tokens.

    Args:
        pattern: glob of files, or a folder, for all files in it; ``python`` for the
            sources of Python's standard library.
        tokenizer: a spec of ``open_tokenizer``, or a tokenizer.
        sequence_length: T. None: 128.
        eval_fraction: fraction to hold out, unless files are held out by their names,
            as those of ``FileSource``: of many files, some; of few files, the end of
            each. None: a tenth.
        cache_dir: folder for a file of the tokens, which later runs use as well; None
            keeps them in memory.
        skip_bad: whether to leave out files that cannot be read, or are no text.

    Attributes:
        bytes_per_token: mean bytes of text of a token, by split.

    Raises:
        ValueError: there is no file or tokenizer, or a number is too small.
    """

    encoded = False
    image_fields = ("text",)

    def __init__(
        self,
        pattern: str,
        *,
        tokenizer: str | Tokenizer = "bytes",
        sequence_length: int | None = None,
        eval_fraction: float | None = None,
        cache_dir: str | os.PathLike | None = None,
        skip_bad: bool = False,
    ):
        length = check_length(sequence_length)
        tokenizer = open_tokenizer(tokenizer)
        self.name = f"text:{pattern}"
        self.tokenizer, self.image_shape = tokenizer, (length,)
        self._take_target(Target("tokens", tokenizer.size))
        self.splits = {}
        self._documents = documents.find(
            pattern,
            eval_fraction,
            functools.partial(fault_of_text, tokenizer) if skip_bad else None,
        )
        self.notes = self._documents.notes
        self.reads = (tokenizer.fingerprint, length, self._documents.fraction)
        self._cache_dir = cache_dir and os.path.expanduser(cache_dir)
        self._skip_bad = skip_bad
        self._tokens: Tokens | None = None
        self.bytes_per_token: Mapping[str, float] = {}

    @abc.abstractmethod
    def _take(self, tokens: Tokens) -> dict[str, int]:
        """Keeps the tokens in rows; returns the number of rows of each split."""

    def prepare(self) -> None:
        """Tokenises the documents; does nothing the second time.

        Raises:
            ValueError: a file cannot be read or is no text, or there is too little
                text.
        """
        if self._tokens is not None:
            return
        path = None
        if self._cache_dir:
            path = os.path.join(self._cache_dir, self._cache_name())
        tokens = tokenise(self._documents, self.tokenizer, self._skip_bad, path)
        splits = self._take(tokens)
        where = "kept in memory"
        if path is None or self.has_padding:
            # The rows hold the tokens.
            tokens = dataclasses.replace(tokens, ids=np.zeros([0], tokens.ids.dtype))
        else:
            where = f"kept in {self._cache_dir}"
        for split, rows in splits.items():
            if rows < 1:
                raise ValueError(
                    f"{self.name} has {words.count(tokens.count[split], 'token')} in "
                    f"its split {split}: expected more than a row, so give more text, "
                    f"or a smaller --sequence_length than {self.image_shape[0]}"
                )
        self.splits, self._tokens = splits, tokens
        self.bytes_per_token = {s: tokens.size[s] / n for s, n in tokens.count.items()}
        count = words.count(sum(tokens.count.values()), "token")
        self.note = f"{count}, {where}"
        if tokens.empty:
            empty = words.count(len(tokens.empty), "file")
            self._note(f"{empty} left out as empty, such as {tokens.empty[0]}.")

    def _cache_name(self) -> str:
        """Returns a name that changes with the tokens, whatever the length of rows."""
        files = [
            (split, [*zip(paths, sizes_and_times(paths), strict=True)])
            for split, paths in self._documents.files.items()
        ]
        fraction = self._documents.fraction
        facts = (files, fraction, self.tokenizer.fingerprint, self._skip_bad)
        return f"tokens_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"

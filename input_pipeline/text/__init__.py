"""Text as whole numbers: tokenizers, a fixed length, batches of similar lengths.

Id 0 is padding everywhere. All of it runs inside of ``Dataset.map``.
"""

from towers.input_pipeline.text.hub import HubTokenizer
from towers.input_pipeline.text.ids import (
    BYTE_IDS,
    bucket_batches,
    byte_ids,
    pad_ids,
)
from towers.input_pipeline.text.opening import load, open_tokenizer
from towers.input_pipeline.text.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    WordTokenizer,
)

__all__ = [
    "BYTE_IDS",
    "ByteTokenizer",
    "HubTokenizer",
    "Tokenizer",
    "WordTokenizer",
    "bucket_batches",
    "byte_ids",
    "load",
    "open_tokenizer",
    "pad_ids",
]

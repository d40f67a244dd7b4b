"""Names of tokenizers; needs no TensorFlow."""

import difflib
import importlib.util
import os

from towers.program.extras import install_command

FORMS = {
    "bytes": "bytes",
    "sentencepiece": "sentencepiece:FILE",
    "wordpiece": "wordpiece:FILE",
    "words": "words:FILE",
    "hf": "hf:FILE",
}
# What a kind needs: the module, its distribution, and the extra that installs it.
_TF_TEXT = "tensorflow_text", "tensorflow-text", "text"
_PACKAGES = {
    "sentencepiece": _TF_TEXT,
    "wordpiece": _TF_TEXT,
    "hf": ("tokenizers", "tokenizers", "tokenizers"),
}


def check(spec: str) -> tuple[str, str]:
    """Checks a tokenizer's name, that its file exists, and its package.

    Returns:
        Its kind, and the path of its file, or "".

    Raises:
        ValueError: there is no such tokenizer, file or package.
    """
    kind, _, path = spec.partition(":")
    # All but "bytes" need a file.
    if kind not in FORMS or bool(path) == (kind == "bytes"):
        near = difflib.get_close_matches(kind, FORMS, n=1)
        hint = f"did you mean {FORMS[near[0]]}? " if near else ""
        raise ValueError(
            f"unknown tokenizer {spec!r}: {hint}expected one of "
            f"{', '.join(FORMS.values())}"
        )
    if path and "://" not in path and not os.path.isfile(os.path.expanduser(path)):
        raise ValueError(
            f"the tokenizer {spec!r} has no file {path!r}: expected a vocabulary, so "
            "check the path"
        )
    module, package, extra = _PACKAGES.get(kind, (None, "", ""))
    if module is not None and importlib.util.find_spec(module) is None:
        raise ValueError(
            f"the tokenizer {spec!r} needs {package}, which is not installed: "
            f"{install_command(extra)}"
        )
    return kind, path

"""Sources of folders: a class for each picture or text, or for each pixel."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.folder import classes
from towers.input_pipeline.sources.folder.image_folder import ImageFolderSource
from towers.input_pipeline.sources.folder.mask_folder import MaskFolderSource, has_masks
from towers.input_pipeline.sources.folder.text_folder import TextFolderSource
from towers.input_pipeline.text import Tokenizer


def open_folder(
    directory: str,
    target: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    eval_fraction: float | None = None,
    skip_bad: bool = False,
    tokenizer: str | Tokenizer | None = None,
    sequence_length: int | None = None,
    local_store: LocalStore | None = None,
    findings: str | None = None,
) -> Source:
    """Opens a folder of pictures or texts.

    Args:
        directory: the path of the folder.
        target: "class" of each folder's files, or "mask". None: masks, if there are
            folders ``images`` and ``masks`` in it, or in its folder ``train``. In class
            folders, .txt files are texts if most files are.
        num_classes: see ``MaskFolderSource``; the number of class folders.
        class_names: see ``MaskFolderSource``; the names of class folders.
        eval_fraction: see ``ImageFolderSource``.
        skip_bad: see ``MaskFolderSource`` and ``TextFolderSource``.
        tokenizer: for texts; see ``TextFolderSource``.
        sequence_length: for texts; see ``TextFolderSource``.
        local_store: the store that keeps far pictures, if any.
        findings: for masks; see ``MaskFolderSource``.

    Raises:
        ValueError: the folder has other contents.
    """
    root = os.path.expanduser(directory)
    of_masks = has_masks(root) or has_masks(os.path.join(root, "train"))
    if target == "mask" and not of_masks:
        raise ValueError(
            f"{directory} has no folders images and masks: expected both, with a PNG "
            "of the same name in masks for each picture in images"
        )
    if target not in (None, "class", "mask"):
        raise ValueError(f"target is {target!r}: expected class or mask for a folder")
    of_text = {"tokenizer": tokenizer, "sequence_length": sequence_length}
    of_text = {name: value for name, value in of_text.items() if value is not None}
    if of_masks and target != "class" and not of_text:
        return MaskFolderSource(
            *(directory, eval_fraction, num_classes, class_names, skip_bad),
            local_store=local_store,
            findings=findings,
        )
    source = _open_classes(directory, eval_fraction, skip_bad, of_text, local_store)
    if num_classes not in (None, source.num_classes):
        raise ValueError(
            f"num_classes is {num_classes}, but {directory} has {source.num_classes} "
            "class folders: expected as many, so leave it out"
        )
    return source


def _open_classes(
    directory: str,
    eval_fraction: float | None,
    skip_bad: bool,
    of_text: Mapping[str, Any],
    local_store: LocalStore | None,
) -> Source:
    """Opens class folders, of texts or of pictures, by their contents."""
    if classes.are_texts(directory):
        source = TextFolderSource(
            directory, eval_fraction, skip_bad=skip_bad, **of_text
        )
        if local_store is not None:
            note = f"{source.name} has texts, which are read once: no store is used."
            source.notes = (*source.notes, note)
        return source
    for name in of_text:
        raise ValueError(
            f"received {name} for folder:{directory}, whose class folders have no "
            "texts: expected .txt files there, or leave it out"
        )
    return ImageFolderSource(directory, eval_fraction, local_store)

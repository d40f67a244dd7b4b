"""Sources of folders of pictures: with a class for each, or for each of its pixels."""

import os
from collections.abc import Sequence

from towers.input_pipeline.sources.base import Source
from towers.input_pipeline.sources.folder.image_folder import ImageFolderSource
from towers.input_pipeline.sources.folder.mask_folder import MaskFolderSource, has_masks


def open_folder(
    directory: str,
    target: str | None = None,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    eval_fraction: float | None = None,
    skip_bad: bool = False,
) -> Source:
    """Opens a folder of pictures.

    Args:
        directory: of the folder.
        target: "class" of each folder's pictures, or "mask". None: masks, if there are
            folders ``images`` and ``masks`` in it, or in its folder ``train``.
        num_classes: see ``MaskFolderSource``; of class folders, as many as there are.
        class_names: see ``MaskFolderSource``; of class folders, their names.
        eval_fraction: see ``ImageFolderSource``.
        skip_bad: see ``MaskFolderSource``.

    Raises:
        ValueError: the folder has something else.
    """
    root = os.path.expanduser(directory)
    of_masks = has_masks(root) or has_masks(os.path.join(root, "train"))
    if target == "mask" and not of_masks:
        raise ValueError(
            f"{directory} has no folders images and masks: expected both, with a PNG "
            "of the same name in masks for each picture in images"
        )
    if target not in (None, "class", "mask"):
        raise ValueError(
            f"target is {target!r}: expected class or mask for a folder of pictures"
        )
    if of_masks and target != "class":
        return MaskFolderSource(
            directory, eval_fraction, num_classes, class_names, skip_bad
        )
    source = ImageFolderSource(directory, eval_fraction)
    if num_classes not in (None, source.num_classes):
        raise ValueError(
            f"num_classes is {num_classes}, but {directory} has {source.num_classes} "
            "class folders: expected as many, so leave it out"
        )
    return source

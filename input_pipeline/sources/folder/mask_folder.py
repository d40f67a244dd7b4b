"""``folder:DIR`` with ``images`` and ``masks``: a class for each pixel of a picture."""

import functools
import itertools
import os
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from towers.input_pipeline.choices import IGNORED
from towers.input_pipeline.images import masks
from towers.input_pipeline.local_store.store import LocalStore
from towers.input_pipeline.sources import label_counts
from towers.input_pipeline.sources.base import IndexedSource, sizes_and_times
from towers.input_pipeline.sources.files import splits
from towers.input_pipeline.sources.files.record import (
    FAULTS,
    BadRecordError,
    Record,
    fault_of,
)
from towers.input_pipeline.sources.folder import pictures
from towers.input_pipeline.sources.folder.stored_folder import StoredFolder
from towers.input_pipeline.sources.label_counts import LabelCounts
from towers.input_pipeline.sources.targets import Target
from towers.program import words
from towers.program.progress import EARLY_S, Progress

IMAGES, MASKS = "images", "masks"
# Pairs whose sizes are compared.
_ASKED = 16
# Masks whose classes are counted at once.
_READ_AT_ONCE = 64
_NAMES = "classes.txt"


class MaskFolderSource(StoredFolder, IndexedSource):
    """Pictures in ``images``, and in ``masks`` a PNG of the same stem for each.

    A mask has the number of a class for each pixel, as grey values or as places in a
    palette; 255 is a pixel to ignore. With DIR/train and one of DIR/validation, valid,
    val or test, which hold both folders, those are the splits. Otherwise every tenth
    picture, in sorted order, is held out.

    Args:
        directory: DIR.
        eval_fraction: of the pictures to hold out, if no folder is; None for a tenth.
        num_classes: None for as many as classes.txt names in DIR, one a line, or else
            the largest number in a mask plus one, for which all masks are read.
        class_names: None for those of classes.txt, if it is there.
        skip_bad: whether masks that cannot be read are left out of that.
        local_store: where to keep files that lie far away, if anywhere.
        findings: a file, without its suffix, for the numbers in all masks, which later
            runs use. None: each run reads the masks.

    Raises:
        ValueError: no picture, one without a mask, or a fraction although a folder is
            held out.
    """

    label_field = "mask"

    def __init__(
        self,
        directory: str,
        eval_fraction: float | None = None,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        skip_bad: bool = False,
        local_store: LocalStore | None = None,
        findings: str | None = None,
    ):
        root = os.path.expanduser(directory)
        self.name = f"folder:{directory}"
        self.image_shape = (None, None, 3)
        # The mask of each picture, in a fixed order.
        self._masks = self._find(root, eval_fraction)
        self.splits = {split: len(pairs) for split, pairs in self._masks.items()}
        paths = [path for of in self._masks.values() for path in of]
        self._note(*pictures.notes_of_content(paths))
        pairs = [*itertools.chain(*(of.items() for of in self._masks.values()))]
        self._note(*_notes_of_sizes(pairs))
        self._store(local_store, [*itertools.chain(*pairs)])
        names = class_names or _read_names(os.path.join(root, _NAMES))
        if names and num_classes not in (None, len(names)):
            raise ValueError(
                f"num_classes is {num_classes}, but {self.name} has the names of "
                f"{len(names)} classes: expected as many, so leave it out"
            )
        size = num_classes or len(names) or self._count_classes(skip_bad, findings)
        self._take_target(Target("mask", size, tuple(names) or None))

    @property
    def reads(self) -> tuple:
        """See ``Source``: the masks, which are files, too."""
        paths = [*itertools.chain(*(of.values() for of in self._masks.values()))]
        states = sizes_and_times(paths)
        return tuple((path, *of) for path, of in zip(paths, states, strict=True))

    def files(self, split: str) -> list[str]:
        """Paths of one split's pictures."""
        return list(self._masks[split])

    def parse(self, records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Paths of pictures and of masks; files are read one by one, in parallel."""
        images, of_them = self._tensors
        return tf.gather(images, records), tf.gather(of_them, records)

    def load(self, image: tf.Tensor) -> tf.Tensor:
        """See ``Source.load``."""
        return self._read_file(image)

    def load_mask(self, mask: tf.Tensor) -> tf.Tensor:
        """See ``Source.load_mask``."""
        return self._read_file(mask)

    def _paths_of(self, numbers: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return self.parse(numbers)

    def walk(self, path: str, split: str | None = None) -> Iterator[Record]:
        """One record: a file is a picture here."""
        number = self._numbers[path]
        yield Record(path, "", number, tf.constant(number, tf.int64))

    @functools.cached_property
    def _tensors(self) -> tuple[tf.Tensor, tf.Tensor]:
        pairs = [pair for of in self._masks.values() for pair in of.items()]
        # On the CPU, which is where tf.data runs.
        with tf.init_scope(), tf.device("/CPU:0"):
            images, of_them = zip(*pairs, strict=True)
            return pictures.as_tensor(images), pictures.as_tensor(of_them)

    @functools.cached_property
    def _numbers(self) -> dict[str, int]:
        paths = itertools.chain.from_iterable(self._masks.values())
        return {path: number for number, path in enumerate(paths)}

    def _find(
        self, root: str, eval_fraction: float | None
    ) -> dict[str, dict[str, str]]:
        """The masks by their pictures, for each split."""
        if has_masks(root):
            taken = splits.check_fraction(eval_fraction)
            pairs = self._pairs(root)
            held = {*splits.every_nth([*pairs], taken)}
            found = {"train": {}, "test": {}}
            for picture, mask in pairs.items():
                found["test" if picture in held else "train"][picture] = mask
            if found["test"]:
                self._note(splits.note(taken, "pictures", len(found["test"])))
            return {split: pairs for split, pairs in found.items() if pairs}
        folders = dict(pictures.entries(root))
        test = splits.held_out(
            [name for name, path in folders.items() if has_masks(path)]
        )
        found = {"train": self._pairs(os.path.join(root, "train"))}
        if test:
            found["test"] = self._pairs(folders[test])
            if eval_fraction:
                raise ValueError(
                    f"eval_fraction is {eval_fraction}, but {folders[test]} is held "
                    "out by its name: leave it out, or name the folder train alone"
                )
        return found

    def _pairs(self, folder: str) -> dict[str, str]:
        """The masks of a folder, by their pictures."""
        images, of_them = (os.path.join(folder, name) for name in (IMAGES, MASKS))
        found = pictures.Sorted()
        paths = found.files(images)
        by_stem = {
            os.path.splitext(name)[0]: path for name, path in pictures.entries(of_them)
        }
        missing = [path for path in paths if _stem(path) not in by_stem]
        if missing:
            raise ValueError(
                f"{words.count(len(missing), 'picture')} of {len(paths)} in {images} "
                f"without a mask, such as {os.path.basename(missing[0])}: expected "
                f"{os.path.join(of_them, _stem(missing[0]))}.png, so add it or remove "
                "the picture"
            )
        pairs = {path: by_stem.pop(_stem(path)) for path in paths}
        if not pairs:
            raise ValueError(
                f"{images} has no pictures: expected {pictures.PICTURES} files, with a "
                "mask for each in the folder masks"
            )
        self._note(*found.notes())
        if by_stem:
            count = words.count(len(by_stem), "mask")
            example = os.path.basename(next(iter(by_stem.values())))
            self._note(f"{count} in {of_them} left out, without a picture: {example}.")
        return pairs

    def _count_classes(self, skip_bad: bool, findings: str | None) -> int:
        """Returns the largest number in a mask, plus one."""
        masks_of = {split: [*of.values()] for split, of in self._masks.items()}
        counts, are_known = label_counts.kept(
            f"{findings}.json" if findings and not skip_bad else None,
            masks_of,
            "mask",
            lambda: {"all": LabelCounts(self._read_classes(skip_bad), [])},
        )
        if are_known:
            self._note(f"The masks of {self.name} are known from an earlier run.")
        classes = counts["all"].classes
        largest = int(classes[classes != IGNORED].max(initial=0))
        if not largest:
            raise ValueError(
                f"the masks of {self.name} have no class but 0"
                f"{f' and {IGNORED}, which is ignored' * (IGNORED in classes)}: "
                "expected numbers of classes, such as 0 and 1; write those, or give "
                "the number of classes by --num_classes (in Python, num_classes)"
            )
        return largest + 1

    @tf.autograph.experimental.do_not_convert
    def _read_classes(self, skip_bad: bool) -> np.ndarray:
        """Reads all masks for the numbers in them."""

        def used(path):
            values = tf.reshape(masks.decode(self.load_mask(path)), [-1])
            counts = tf.math.bincount(tf.cast(values, tf.int32), minlength=256)
            return counts > 0

        paths = [path for of in self._masks.values() for path in of.values()]
        with tf.device("/CPU:0"):
            found = tf.data.Dataset.from_tensor_slices(paths)
            found = found.map(used, tf.data.AUTOTUNE)
            found = found.ignore_errors() if skip_bad else found
            found = found.batch(_READ_AT_ONCE).prefetch(tf.data.AUTOTUNE)
            what, seen = f"Reading the masks of {self.name}", np.zeros(256, bool)
            try:
                with Progress(what, len(paths), "masks", EARLY_S) as shown:
                    for some in found.as_numpy_iterator():
                        seen |= some.any(axis=0)
                        shown.add(len(some))
            except FAULTS as error:
                faults = ((path, mask_fault(tf.io.read_file(path))) for path in paths)
                path, reason = next(filter(all, faults), (self.name, fault_of(error)))
                raise BadRecordError(f"{path}: {reason}") from error
        return np.flatnonzero(seen)


def _notes_of_sizes(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Says that masks have other sizes than their pictures; of some, with an example.

    Args:
        pairs: paths of pictures and masks.
    """
    for picture, mask in pairs[:: len(pairs) // _ASKED + 1]:
        sizes = _size(picture), _size(mask)
        if None not in sizes and sizes[0] != sizes[1]:
            of_picture, of_mask = ("x".join(map(str, size)) for size in sizes)
            return [
                f"Masks are resized to their pictures: {mask} is {of_mask}, and its "
                f"picture {of_picture}."
            ]
    return []


def _size(path: str) -> tuple[int, int] | None:
    """Height and width of a PNG or JPEG file; `None` of others, and of damaged ones."""
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            head = file.read(24)
        if head.startswith(b"\x89PNG") and len(head) == 24:
            width, height = struct.unpack(">II", head[16:])
            return height, width
        if head.startswith(b"\xff\xd8\xff"):
            shape = tf.io.extract_jpeg_shape(tf.io.read_file(path))
            height, width, _ = shape.numpy().tolist()
            return height, width
    except FAULTS:
        pass  # what reads all of it says so
    return None


def has_masks(folder: str) -> bool:
    """Tells whether a folder has pictures and masks, by the names of its folders."""
    return all(
        tf.io.gfile.isdir(os.path.join(folder, name)) for name in (IMAGES, MASKS)
    )


def mask_fault(encoded: tf.Tensor) -> str:
    """Says why bytes cannot be decoded to a mask, a phrase; empty if they can."""
    if reason := masks.fault(encoded.numpy()):
        return reason
    try:
        masks.decode(encoded)
    except FAULTS as error:
        return fault_of(error)
    return ""


def _stem(path: str) -> str:
    return os.path.splitext(os.path.basename(path))[0]


def _read_names(path: str) -> list[str]:
    """The lines of a file of names; none where there is no file."""
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path) as file:
        return [name for line in file.read().splitlines() if (name := line.strip())]

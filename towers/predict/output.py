"""Predictions as rows of a CSV file; masks as pictures."""

import contextlib
import csv
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
from PIL import Image

from towers.program import object_store, whole_file


class PredictionRows:
    """Writes predictions as rows of CSV, and masks as PNG files of class numbers.

    A mask has a palette: the numbers are seen as colours.

    Attributes:
        count: How many were written.
        masks: Folder of the masks; made for the first one.
    """

    def __init__(
        self,
        file: IO,
        masks: str | None,
        as_pictures: bool = False,
        of_all_classes: bool = False,
    ):
        """Takes where to write.

        Args:
            file: An open file.
            masks: Folder for masks, if there may be some.
            as_pictures: Whether each mask gets the size of its picture.
            of_all_classes: Whether each class gets a column with its probability.
        """
        self.count, self.masks, self._as_pictures = 0, masks, as_pictures
        self._of_all_classes = of_all_classes
        self._file, self._names = file, set()
        self._writer: csv.DictWriter | None = None

    def write(self, names: Mapping[str, Any], prediction: Mapping[str, Any]) -> None:
        """Writes one: what tells the example from others, and what is predicted."""
        row = {**names}
        for name, value in self._shown(prediction).items():
            # A number to predict may be called as a file's row is.
            name = f"predicted_{name}" if name in names else name
            if name == "mask":
                row[name] = self._save(value, names["file"])
            elif isinstance(value, Mapping):
                row |= {f"{name}_{key}": _cell(each) for key, each in value.items()}
            else:
                row[name] = _cell(value)
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, [*row], lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow(row)
        self.count += 1

    def _shown(self, prediction):
        """Returns the values to write: of probabilities, those that were asked for.

        Of two classes, the second one's is written, so that rows can be sorted by it.
        """
        chances = prediction.get("probabilities")
        if "class" not in prediction or not isinstance(chances, Mapping):
            return prediction
        if not self._of_all_classes and len(chances) == 2:
            second = [*chances][1]
            chances = {second: chances[second]}
        elif not self._of_all_classes:
            chances = prediction["probability"]
        return {"class": prediction["class"], "probability": chances}

    def _save(self, mask, file):
        stem = os.path.splitext(os.path.basename(file))[0]
        # Two folders may have pictures of one name.
        numbered = (f"{stem}_{k}" for k in itertools.count(self.count + 1))
        others = (name for name in numbered if name not in self._names)
        name = stem if stem not in self._names else next(others)
        self._names.add(name)
        os.makedirs(self.masks, exist_ok=True)
        path = os.path.join(self.masks, f"{name}.png")
        image = Image.fromarray(np.uint8(mask))
        image.putpalette(_PALETTE)
        if self._as_pictures:
            with Image.open(file) as picture:
                image = image.resize(picture.size, Image.Resampling.NEAREST)
        image.save(path)
        return path


def _colour(number):
    """The colour of a class, as Pascal VOC has it: near numbers differ most."""
    bits = [[number >> (3 * k + c) & 1 for k in range(3)] for c in range(3)]
    return [sum(bit << (7 - k) for k, bit in enumerate(each)) for each in bits]


_PALETTE = [value for number in range(256) for value in _colour(number)]


def _cell(value):
    if isinstance(value, float | np.floating):
        return f"{value:.7g}"
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    if isinstance(value, list | tuple):
        return " ".join(str(_cell(each)) for each in value)
    return value


def masks_of(path: str) -> str:
    """The folder of masks beside a file of predictions."""
    name, ending = os.path.splitext(path)
    return name if ending else f"{path}_masks"


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO]:
    """Opens a file to write to, which gets its name only once it is whole.

    Its folder is made. Devices and pipes are written to as they are.

    Raises:
        ValueError: It cannot be written.
    """
    is_named = not path.startswith(("/dev/", "/proc/"))  # as /dev/stdout is not
    is_file = is_named and (not os.path.exists(path) or os.path.isfile(path))
    options = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    try:
        if not object_store.scheme(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with (
            whole_file.opened(path, follows_link=True, **options)
            if is_file
            else open(path, "a", **options)
        ) as file:
            yield file
    except OSError as error:
        place = path if object_store.scheme(path) else os.path.realpath(path)
        raise ValueError(
            f"Cannot write {place}: {error.strerror}; choose another --output."
        ) from error

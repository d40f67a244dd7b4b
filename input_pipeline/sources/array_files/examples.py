"""Arrays of examples as models take them: pictures of uint8, or rows of numbers."""

from collections.abc import Sequence

import numpy as np

# Ranges of pictures other than bytes, and their scale and shift to 0 to 255.
_RANGES = ((0, 1, 255, 0), (-1, 1, 127.5, 127.5), (0, 255, 1, 0))
# The number of examples from which the range of all is inferred.
_SAMPLE = 1000


class Examples:
    """An array of examples, which may be on disk and is read by rows.

    Args:
        name: the array's name in messages.
        array: pictures [N, H, W] or [N, H, W, C], or rows of numbers [N] or [N, F].

    Attributes:
        shape: the shape of an example: (H, W, C) or (F,).
        dtype: the type in which examples are read: uint8 or float64.
        name: the array's name.
        notes: defaults that were chosen, as phrases after the name.

    Raises:
        ValueError: the array has another shape or type.
    """

    def __init__(self, name: str, array: np.ndarray):
        self.name, self._array, self.notes = name, array, []
        self._scale, self._shift = 1, 0
        if array.dtype.kind not in "biuf" or not 1 <= array.ndim <= 4:
            raise self._unexpected("")
        if array.ndim == 1:
            self._array = array[:, None]
        if array.ndim < 3:
            self.shape, self.dtype = self._array.shape[1:], np.dtype(np.float64)
            return
        self.dtype = np.dtype(np.uint8)
        if array.ndim == 3:
            self._array = array[..., None]
            self.notes.append("taken for grey pictures: one channel is added")
        elif array.shape[3] not in (1, 3, 4) and array.shape[1] in (1, 3, 4):
            self._array = np.moveaxis(array, 1, -1)
            self.notes.append(
                "taken to have channels first, which are moved behind the width"
            )
        self.shape = self._array.shape[1:]
        if array.dtype != np.uint8:
            self._choose_range()

    def __len__(self) -> int:
        return len(self._array)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Reads some examples, by their numbers: uint8 pictures, or float64 rows.

        Raises:
            ValueError: a picture has values outside of the inferred range.
        """
        some = np.asarray(self._array[rows])
        if self.dtype == np.float64 or some.dtype == np.uint8:
            return some.astype(self.dtype, copy=False)
        pixels = np.rint(some * np.float64(self._scale) + self._shift)
        good = ((pixels >= 0) & (pixels <= 255)).all(axis=(1, 2, 3))
        if not good.all():
            row = int(np.flatnonzero(~good)[0])
            low, high = some[row].min(), some[row].max()
            first, last = ((at - self._shift) / self._scale for at in (0, 255))
            raise ValueError(
                f"example {rows[row]} of {self.name} has values of {low:g} to "
                f"{high:g}: expected {first:g} to {last:g}, as the others have"
            )
        return pixels.astype(np.uint8)

    def _choose_range(self):
        """Infers from some pictures how their values become bytes."""
        if not len(self):
            return
        rows = np.unique(np.linspace(0, len(self) - 1, _SAMPLE).astype(np.int64))
        some = np.asarray(self._array[rows])
        low, high = some.min(), some.max()
        bits = some.dtype.kind == "b"
        for least, most, self._scale, self._shift in _RANGES:
            whole = some.dtype.kind in "iu" and most == 1
            if not whole and least <= low and high <= most:
                if not bits:
                    self.notes.append(
                        f"{some.dtype} of {least} to {most}, taken for pixels and "
                        "rounded to uint8 of 0 to 255"
                    )
                return
        raise self._unexpected(f" with values of {low:g} to {high:g}")

    def _unexpected(self, values):
        return ValueError(
            f"{self.name} is {self._array.dtype} {[*self._array.shape]}{values}: "
            "expected pictures [N, H, W, C] or [N, H, W], uint8 of 0 to 255 or floats "
            "of 0 to 1, or rows of numbers [N, F]; for other arrays, define train_data "
            "in --model=FILE.py"
        )


def sentences(arrays: Sequence[Examples]) -> list[str]:
    """Describes the defaults for arrays, once for those that are alike."""
    phrases = dict.fromkeys(phrase for array in arrays for phrase in array.notes)
    sentences = []
    for phrase in phrases:
        names = [array.name for array in arrays if phrase in array.notes]
        verb = "is" if len(names) == 1 else "are"
        sentences.append(f"{' and '.join(names)} {verb} {phrase}.")
    return sentences

"""``digits``: 1,797 handwritten digits, as a TFDS data set.

They come with Towers, so this set needs no network, yet takes the whole path of a real
one: written as TFRecord shards, read back in parallel.

They are the test set of "Optical Recognition of Handwritten Digits", by E. Alpaydin and
C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49. Its
license is CC BY 4.0, https://creativecommons.org/licenses/by/4.0/. What was changed:
``scripts/make_digits.py`` took it from scikit-learn, wrote it to ``digits.npz`` as
arrays, and marked a fifth for validation.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

_FILE = Path(__file__).with_name("digits.npz")
_NUM_SHARDS = 4


class TowersDigits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits of the UCI repository, 8 by 8 grey pixels."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of the UCI repository, as in scikit-learn.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), dtype=np.uint8),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        del dl_manager  # nothing to download
        with np.load(_FILE) as digits:
            arrays = dict(digits)
        is_test = arrays["is_test"]
        return {
            "train": self._generate_examples(arrays, np.flatnonzero(~is_test)),
            "test": self._generate_examples(arrays, np.flatnonzero(is_test)),
        }

    def _log_download_bytes(self) -> None:
        # TFDS speaks of a download.
        print(f"Writing the digits to {self.data_dir}.")

    def _log_download_done(self) -> None:
        pass

    def _generate_examples(
        self, arrays: Mapping[str, np.ndarray], indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in indices.tolist():
            # The pixels of the file are 0..16.
            image = np.rint(arrays["images"][index] * (255 / 16)).astype(np.uint8)
            yield index, {"image": image[..., None], "label": arrays["labels"][index]}


def open_digits(
    rest: str, data_dir: str | os.PathLike | None, **options: Any
) -> TFDSSource:
    """Opens the digits; ``prepare()`` writes them to ``data_dir``.

    Nothing follows ``digits:``; the options are those of ``TFDSSource``.
    """
    del rest
    builder = TowersDigits(data_dir=data_dir)
    return TFDSSource(builder, "digits", _NUM_SHARDS, **options)

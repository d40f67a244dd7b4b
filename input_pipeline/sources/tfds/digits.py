"""``digits``: scikit-learn's 1,797 handwritten digits, as a TFDS data set.

They come with scikit-learn's wheel, so this set needs no network, yet takes the whole
path of a real one: written as TFRecord shards, read back in parallel.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from towers.input_pipeline.sources.tfds.tfds_source import TFDSSource

_NUM_SHARDS = 4
_TEST_FRACTION = 0.2


class TowersDigits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits, 8 by 8 grey pixels, from UCI by way of scikit-learn."""

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
        # Imported here, as it takes a second and is needed only once.
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        train, test = train_test_split(
            np.arange(len(digits.target)),
            test_size=_TEST_FRACTION,
            random_state=0,
            stratify=digits.target,
        )
        return {
            "train": self._generate_examples(digits, np.sort(train)),
            "test": self._generate_examples(digits, np.sort(test)),
        }

    def _log_download_bytes(self) -> None:
        # TFDS speaks of a download.
        print(f"Writing the digits to {self.data_dir}.")

    def _log_download_done(self) -> None:
        pass

    def _generate_examples(
        self, digits: Any, indices: np.ndarray
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in indices.tolist():
            # scikit-learn's pixels are 0..16.
            image = np.rint(digits.images[index] * (255 / 16)).astype(np.uint8)
            yield index, {"image": image[..., None], "label": digits.target[index]}


def open_digits(
    rest: str, data_dir: str | os.PathLike | None, **options: Any
) -> TFDSSource:
    """Opens the digits; ``prepare()`` writes them to ``data_dir``.

    Nothing follows ``digits:``; the options are those of ``TFDSSource``.
    """
    del rest
    builder = TowersDigits(data_dir=data_dir)
    return TFDSSource(builder, "digits", _NUM_SHARDS, **options)

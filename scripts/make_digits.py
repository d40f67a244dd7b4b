"""Writes the digits that Towers ships, from those of scikit-learn.

    python -m scripts.make_digits

They are the test set of "Optical Recognition of Handwritten Digits" of the UCI Machine
Learning Repository: E. Alpaydin and C. Kaynak, 1998, doi.org/10.24432/C50P49, under
CC BY 4.0. Only the format is another, and each is marked as for training or testing.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

FILE = Path(__file__).parents[1] / "input_pipeline" / "sources" / "tfds" / "digits.npz"


def arrays() -> dict[str, np.ndarray]:
    """Computes the arrays of the file.

    Returns:
        ``images`` with values from 0 to 16, their ``labels``, and ``is_test``, which
        marks a fifth of each class.
    """
    digits = load_digits()
    indices = np.arange(len(digits.target))
    _, test = train_test_split(
        indices, test_size=0.2, random_state=0, stratify=digits.target
    )
    return {
        "images": digits.images.astype(np.uint8),
        "labels": digits.target.astype(np.uint8),
        "is_test": np.isin(indices, test),
    }


if __name__ == "__main__":
    np.savez_compressed(FILE, **arrays())

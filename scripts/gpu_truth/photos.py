"""Trains ResNet-50 on JPEG files, to see whether the input keeps the GPU busy.

    python -m scripts.gpu_truth.photos --output=DIR

The photographs are parts of the two that scikit-learn has. The run's `summary.json` has
examples per second, the part of the time that towers waited, and a verdict.
"""

import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

FLAGS = flags.FLAGS

flags.DEFINE_string("output", None, "Folder for photographs and run.", required=True)
flags.DEFINE_integer("photos", 2048, "Number of JPEG files to make.", lower_bound=1)

_SIZE = 500, 375
_CLASSES = 8


def make(folder: pathlib.Path, count: int) -> None:
    """Writes JPEG files of usual size, in a folder for each class."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng(0)
    pictures = [Image.fromarray(each) for each in load_sample_images().images]
    for i in range(count):
        picture, part = pictures[i % len(pictures)], random.uniform(0.7, 1.0)
        width, height = (int(part * side) for side in picture.size)
        left = int(random.integers(picture.width - width + 1))
        top = int(random.integers(picture.height - height + 1))
        box = left, top, left + width, top + height
        path = folder / f"class_{i % _CLASSES}" / f"{i:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.resize(_SIZE, box=box).save(path, quality=90)


def main(argv: Sequence[str]) -> None:
    """Makes the photographs, and trains with the flags that are left."""
    output = pathlib.Path(FLAGS.output)
    make(output / "photos", FLAGS.photos)
    command = [
        *(sys.executable, "-m", "towers.train", "--image_size=224", "--model=ResNet50"),
        *(f"--dataset=folder:{output / 'photos'}", "--recipe=imagenet", "--cache=none"),
        *(f"--model_dir={output / 'run'}", *argv[1:]),
    ]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    app.run(main)

"""Decodes JPEG files on the GPU and on the CPU, to see how fast, and how alike.

    python -m scripts.gpu_truth.decoding --output=DIR

Each way decodes photographs for training, with some cores of this machine, without a
model. Then both decode the same batches, whose pixels are compared.
"""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from . import photos

FLAGS = flags.FLAGS

# --output and --photos are those of `photos`.
flags.DEFINE_integer("batch_size", 256, "Images in a batch.", lower_bound=1)
flags.DEFINE_list("cores", ["1", "2", "4"], "Numbers of cores to decode with.")

FIGURES = "decoding.json"
_SIZE = 224
_WAYS = "cpu", "gpu"


def rate(folder: pathlib.Path, way: str, cores: int) -> dict:
    """Returns what `towers benchmark` measures of a way, with so many cores."""
    usable = sorted(os.sched_getaffinity(0))[:cores]
    command = [
        *(sys.executable, "-m", "towers.input_pipeline.benchmark", "--json"),
        *(f"--dataset=folder:{folder}", f"--image_size={_SIZE}", "--recipe=imagenet"),
        *(f"--batch_size={FLAGS.batch_size}", "--cache=none", f"--decode_on={way}"),
        *("--num_gpus=1", f"--examples={FLAGS.photos}"),
    ]
    done = subprocess.run(
        ["taskset", "-c", ",".join(map(str, usable)), *command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    read = json.loads(done.stdout)
    kept = "examples_per_sec", "cpu_cores", "first_batch_s", "stages"
    return {"way": way, "cores": len(usable)} | {name: read[name] for name in kept}


def off(folder: pathlib.Path) -> dict[str, float]:
    """Returns how far apart the pixels of both ways are, for each way to cut."""
    import numpy as np
    import tensorflow as tf

    from towers.input_pipeline import make_dataset, open_source

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # DALI takes some, too.
    source = open_source(f"folder:{folder}", eval_fraction=0)
    source.prepare()
    differences = {}
    for recipe, training in [("imagenet", True), ("imagenet", False), ("none", False)]:
        batches = [
            make_dataset(
                source,
                "train",
                batch_size=min(FLAGS.batch_size, 64),
                image_shape=(_SIZE, _SIZE, 3),
                recipe=recipe,
                training=training,
                decode_on=way,
                most_batches=1,
            )
            for way in _WAYS
        ]
        (one, labels), (other, other_labels) = (next(iter(each)) for each in batches)
        if not np.array_equal(labels, other_labels):
            sys.exit(f"{recipe}: the labels differ.")
        apart = np.abs(np.asarray(one, int) - np.asarray(other, int))
        differences[f"{recipe}, {'training' if training else 'evaluation'}"] = {
            "mean": float(apart.mean()),
            "99%": float(np.percentile(apart, 99)),
        }
    return differences


def main(argv: Sequence[str]) -> None:
    """Makes the photographs, measures, compares and writes."""
    output = pathlib.Path(FLAGS.output)
    folder = output / "photos"
    photos.make(folder, FLAGS.photos)
    figures = {"pixels apart, of 255": off(folder), "rates": []}
    for cores in map(int, FLAGS.cores):
        figures["rates"] += [rate(folder, way, cores) for way in _WAYS]
        (output / FIGURES).write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)

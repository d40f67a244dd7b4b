"""Predicts for files with a model that towers.train has trained, on all devices.

    python -m towers.predict runs/digits_cnn picture.png --output=predictions.csv

The files are pictures, or CSV or Parquet tables with the columns that the model was
trained on, or texts, where each line is one. They are prepared as in training, as
preprocessing.json in the model_dir says. There is a row of output for each example, in
the order of the files. What cannot be read is left out, and said.
Exit codes: 0 done; 1 error, or something was left out; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.predict import arguments
    from towers.program import startup

    _options = startup.begin(
        "towers.predict", lambda argv: arguments.read(argv[1:], __doc__)
    )

import argparse
import contextlib
import csv
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from towers.model.api import multi_gpu_model
from towers.predict import inputs
from towers.predict.trained import Trained, load_model
from towers.program import ending, words
from towers.train.parts.devices import configure_devices

_PROGRAM = "towers.predict"


def predict(options: argparse.Namespace) -> int:
    """Predicts for the files; returns the exit code.

    Raises:
        ValueError: If the model or a file is not as expected.
    """
    devices = configure_devices(options.settings)
    trained = load_model(options.model_dir, options.checkpoint)
    bad = []

    def say_bad(line):
        bad.append(line)
        print(f"{_PROGRAM}: {line}", file=sys.stderr)

    towers = multi_gpu_model(trained.model, gpus=devices.towers)
    size, count = options.batch_size, 0
    batches = inputs.batches(trained, options.files, size, say_bad)
    with _output(options.output) as file:
        for row in _rows(trained, towers, batches):
            if not count:
                writer = csv.DictWriter(file, [*row], lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            count += 1
    done = words.count(count, "prediction")
    if options.output:
        where = f" on {words.count(len(devices.towers), 'tower')}"
        print(f"{options.output}: {done}{where}.")
    if bad:
        left = f"{words.count(len(bad), 'example')} left out, as said above"
        print(f"{_PROGRAM}: {done}, {left}.", file=sys.stderr)
    return 1 if bad else 0


def _rows(trained: Trained, towers: Any, batches: Any) -> Iterator[dict[str, Any]]:
    """Yields a row of the output for each example."""
    for batch in batches:
        found = trained.decode(towers.predict_on_batch(batch.x))
        for names, prediction in zip(batch.names, found, strict=True):
            yield names | dict(_cells(prediction))


def _cells(prediction):
    """The columns of a prediction: numbers and names, or several in one."""
    for name, value in prediction.items():
        if isinstance(value, dict):
            yield from ((f"{name}_{key}", _cell(each)) for key, each in value.items())
        else:
            yield name, _cell(value)


def _cell(value):
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


@contextlib.contextmanager
def _output(path):
    """The file to write to; standard output without one."""
    if path is None:
        yield sys.stdout
        return
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ValueError(
            f"Cannot write {path}: {error.strerror}; choose another --output."
        ) from error


if __name__ == "__main__":
    sys.exit(ending.run(_PROGRAM, lambda: predict(_options)))

"""Runs that have ended, and what is predicted with them."""

import csv

from tests.towers.train.runs import assembled
from towers.predict import __main__ as predict
from towers.predict import arguments
from towers.train.outputs import preprocessing


def finished(*flags, model_dir):
    """The model_dir of a run that has ended, but for its training."""
    job = assembled(*flags, f"--model_dir={model_dir}")
    preprocessing.write_model_files(job)
    job.model.save(model_dir / "model.keras")
    return job


def predicted(model_dir, *names, code=0):
    """What towers.predict writes for files, as rows; flags may be among the names."""
    output = model_dir / "predictions.csv"
    argv = [model_dir, *names, f"--output={output}", "--batch_size=4"]
    assert predict.predict(arguments.read(["", *map(str, argv)], "")) == code
    with open(output, newline="") as file:
        return [*csv.DictReader(file)]

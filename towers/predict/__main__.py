"""Predicts for files with a model that towers.train has trained, on all devices.

    python -m towers.predict runs/digits_cnn picture.png --output=predictions.csv

The files are pictures, or CSV or Parquet tables with the columns that the model was
trained on, or texts, where each line is one, or arrays in .npy and .npz files. They are
prepared as in training, as preprocessing.json in the model_dir says. There is a row of
output for each example, in the order of the files. What cannot be read is left out, and
said.
Exit codes: 0 done; 1 error, or something was left out; 130 stopped by Ctrl-C; 143 by
SIGTERM.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.predict import arguments
    from towers.program import startup

    _options = startup.begin(
        "towers.predict", lambda argv: arguments.read(argv, __doc__)
    )

import contextlib
import sys

from towers.model.api import multi_gpu_model
from towers.predict import inputs, output
from towers.predict.arguments import PredictOptions
from towers.predict.trained import load_model
from towers.program import ending, progress, startup, words
from towers.program.progress import Progress
from towers.train.parts.devices import configure_devices

_PROGRAM = "towers.predict"


def predict(options: PredictOptions) -> int:
    """Predicts for the files; returns the exit code.

    Raises:
        ValueError: If the model or a file is not as expected.
    """
    devices = configure_devices(options.settings)
    with Progress(f"Loading the model of {options.model_dir}"):
        trained = load_model(options.local_dir, options.checkpoint, options.model)
    bad = []

    def say_bad(line):
        bad.append(line)
        print(f"{_PROGRAM}: {line}", file=sys.stderr)

    towers = multi_gpu_model(trained.model, gpus=devices.towers)
    path, size, kept = options.output, options.batch_size, options.kept_columns
    batches = inputs.batches(trained, options.files, size, say_bad, kept)
    with output.opened(path) if path else contextlib.nullcontext(sys.stdout) as file:
        masks = path and output.masks_of(path)
        whole = trained.preprocessing.is_of_whole_pictures
        rows = output.PredictionRows(file, masks, whole, options.probabilities)
        # Rows on a terminal show how far it is.
        if path or not sys.stdout.isatty():
            batches = progress.over(batches, "Predicting", None, "batches")
        for batch in batches:
            found = trained.decode(towers.predict_on_batch(batch.x), batch.x)
            for names, prediction in zip(batch.names, found, strict=True):
                rows.write(names, prediction)
    done = words.count(rows.count, "prediction")
    if path:
        print(f"{path}: {done} on {words.count(len(devices.towers), 'tower')}.")
    if not rows.count and not bad:
        print(f"{_PROGRAM}: The files have no example.", file=sys.stderr)
    if bad:
        left = f"{words.count(len(bad), 'example')} left out, as said above"
        print(f"{_PROGRAM}: {done}, {left}.", file=sys.stderr)
    sys.stdout.flush()
    return 1 if bad or startup.is_lost(sys.stdout) else 0


if __name__ == "__main__":
    ending.stop_at_sigterm()
    startup.leave(ending.run(_PROGRAM, lambda: predict(_options)))

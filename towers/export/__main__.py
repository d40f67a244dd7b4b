"""Writes a SavedModel that takes pictures, rows, texts or arrays as they are.

    python -m towers.export runs/digits_cnn exported

It has what the model needs in its graph: decoding, resizing and scaling before, and
names of classes and probabilities behind. Plain TensorFlow loads it, without this
package and without Keras:

    model = tf.saved_model.load("exported")
    model.serve(tf.constant([open("picture.png", "rb").read()]))

Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.export import arguments
    from towers.program import startup

    _options = startup.begin(
        "towers.export", lambda argv: arguments.read(argv, __doc__)
    )


from towers.export import saved_model
from towers.export.arguments import ExportOptions
from towers.predict.trained import load_model
from towers.program import ending, startup, words
from towers.program.progress import Progress

_PROGRAM = "towers.export"


def export(options: ExportOptions) -> None:
    """Writes the SavedModel of a run.

    Raises:
        ValueError: If the model cannot be loaded.
    """
    with Progress(f"Exporting the model of {options.model_dir}"):
        trained = load_model(options.local_dir, options.checkpoint, options.model)
        takes, returns = saved_model.write(trained, options.folder)
    known = trained.preprocessing
    for signature, names in takes.items():
        of_rows = signature == "serve" and known.input in ("row", "columns")
        of = f" of {words.listed(known.columns)}" if of_rows else ""
        print(f"{options.folder}: {signature} takes {', '.join(names)}{of}.")
    several = known.task == "multilabel" and trained.classes
    of = f" of {words.listed(trained.classes)}" if several else ""
    print(f"{options.folder}: returns {', '.join(returns)}{of}.")


if __name__ == "__main__":
    startup.leave(ending.run(_PROGRAM, lambda: export(_options)))

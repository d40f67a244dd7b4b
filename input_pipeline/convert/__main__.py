"""Converts a data set to TFRecord files, which are the fastest to read.

    python -m towers.input_pipeline.convert folder:my_pictures tfrecord:my_records

Encoded images are kept byte for byte, unless --image_size asks for another size. Small
images of one size become pixels, which need no decoding. Each file contains consecutive
records of a split. A file gets its name once it is written completely and read back. If
you interrupt the conversion, run it again to continue.
Exit codes: 0 done; 1 error; 130 stopped by Ctrl-C.
"""

if __name__ == "__main__":
    # Before TensorFlow is imported, below.
    from towers.input_pipeline.convert import flags as convert_flags
    from towers.program import startup

    startup.begin(
        "towers.input_pipeline.convert", lambda argv: convert_flags.read(argv, __doc__)
    )

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import flags

from towers.input_pipeline import data_flags
from towers.input_pipeline.convert import flags as convert_flags
from towers.input_pipeline.convert.conversion import convert
from towers.input_pipeline.convert.folder import PROGRAM
from towers.input_pipeline.sources import open_source
from towers.input_pipeline.sources.files.record import BadRecordError
from towers.program import startup, words
from towers.program.commands import fail, quieten, read_image_size


def main(argv: Sequence[str]) -> int:
    """Converts the data set of the command line; returns the exit code."""
    values = None
    try:
        startup.end()
        spec, folder, values = convert_flags.read(argv, __doc__)
        _run(spec, folder, values)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the progress bar's line
        fail("stopped by Ctrl-C; run it again to go on", PROGRAM)
        return 130
    except BadRecordError as error:
        skips = values.bad_records == "skip" or error.many
        hint = (
            ""
            if skips
            else "; to convert without it, give --bad_records=skip --overwrite"
        )
        return fail(f"{str(error).removesuffix('.')}{hint}", PROGRAM)
    except (ValueError, OSError, tf.errors.OpError) as error:
        return fail(error, PROGRAM)
    return 0


def _run(spec: str, folder: str, values: flags.FlagValues) -> None:
    source = open_source(
        spec,
        data_dir=os.path.expanduser(values.data_dir),
        skip_bad=values.bad_records == "skip",
        **data_flags.given(values),
    )
    for note in source.notes:
        print(note)
    folder = os.path.expanduser(folder)
    info = convert(
        source,
        folder,
        shards=values.shards,
        image_size=read_image_size(values.image_size),
        raw=values.raw,
        overwrite=values.overwrite,
        bad_records=values.bad_records,
        max_bad_records=values.max_bad_records,
    )
    print(_done(info, folder))


def _done(info: dict[str, Any], folder: str) -> str:
    """Returns a sentence: all is done, and how to train on it."""
    splits = info["splits"]
    records, files, size = (
        sum(split[what] for split in splits.values())
        for what in ("examples", "files", "bytes")
    )
    counts = ", ".join(
        f"{split['examples']:,} in {name}" for name, split in splits.items()
    )
    wanted = " --image_size=224" if None in info["image_shape"] else ""
    return (
        f"Done: {words.count(records, 'record')} ({counts}) in "
        f"{words.count(files, 'file')}, {words.size(size)}, in {folder}; train on "
        f"them: python -m towers.train --dataset={shlex.quote(f'tfrecord:{folder}')}"
        f"{wanted}"
    )


if __name__ == "__main__":
    # GPUs are left to training.
    tf.config.set_visible_devices([], "GPU")
    quieten()
    tf.get_logger().setLevel("ERROR")
    sys.exit(main(sys.argv))

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
    options = None
    try:
        startup.end()
        options = convert_flags.read(argv, __doc__)
        _run(options)
    except KeyboardInterrupt:
        print(file=sys.stderr)  # ends the progress bar's line
        fail("stopped by Ctrl-C; run it again to go on", PROGRAM)
        return 130
    except BadRecordError as error:
        skips = options.skips_bad or error.many
        hint = (
            ""
            if skips
            else "; to convert without it, give --bad_records=skip --overwrite"
        )
        return fail(f"{str(error).removesuffix('.')}{hint}", PROGRAM)
    except (ValueError, OSError, tf.errors.OpError) as error:
        return fail(error, PROGRAM)
    return 0


def _run(options: convert_flags.ConvertOptions) -> None:
    source = open_source(
        options.source,
        data_dir=os.path.expanduser(options.data_dir),
        skip_bad=options.skips_bad,
        **data_flags.given(options),
    )
    for note in source.notes:
        print(note)
    folder = os.path.expanduser(options.folder)
    info = convert(
        source,
        folder,
        shards=options.shards,
        image_size=read_image_size(options.image_size),
        raw=options.raw,
        overwrite=options.overwrite,
        bad_records="skip" if options.skips_bad else "fail",
        max_bad_records=options.max_bad_records,
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

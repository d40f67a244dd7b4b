"""Defines and reads the arguments of towers.input_pipeline.convert."""

from collections.abc import Sequence

from absl import flags

from towers.input_pipeline import data_flags, specs
from towers.input_pipeline.choices import BAD_RECORDS, RAW
from towers.program.commands import check_folder, read_image_size
from towers.program.flags import command_line


def read(argv: Sequence[str], doc: str) -> tuple[str, str, flags.FlagValues]:
    """Reads the command line, as `command_line.read`.

    Returns:
        The source's spec, the folder to write to, and the flags.

    Raises:
        ValueError: If anything is bad.
    """
    # Separate values, as towers.train has flags with the same names.
    values = _define()
    groups = {"Flags": values.flags_by_module_dict()[__name__]}
    _, *names = command_line.read(argv, doc, groups, values=values)
    if len(names) != 2 or not names[1].removeprefix("tfrecord:"):
        raise ValueError(
            f"received {' '.join(names) or 'no arguments'}: expected a source and "
            "tfrecord:FOLDER, see --help"
        )
    spec, target = names
    kind, _, folder = target.partition(":")
    if kind != "tfrecord" or any(sign in folder for sign in "*?["):
        raise ValueError(f"received {target!r}: expected tfrecord:FOLDER")
    specs.check(spec)
    check_folder("folder", folder, "folder")
    read_image_size(values.image_size)
    return spec, folder, values


def _define() -> flags.FlagValues:
    values = flags.FlagValues()
    own = {"flag_values": values, "module_name": __name__}
    flags.DEFINE_integer(
        "shards", 8, "Number of files for each split.", lower_bound=1, **own
    )
    flags.DEFINE_string(
        "image_size",
        None,
        "Size to resize images to: N or HxW pixels. Default: no resizing.",
        **own,
    )
    flags.DEFINE_enum(
        "raw",
        "auto",
        RAW,
        "Whether to write pixels instead of encoded images. auto: for small images "
        "of one size.",
        **own,
    )
    flags.DEFINE_bool("overwrite", False, "Remove an earlier conversion first.", **own)
    flags.DEFINE_string(
        "data_dir", "data", "Folder where digits and tfds: store their files.", **own
    )
    data_flags.define({"module_name": __name__}, values)
    flags.DEFINE_enum(
        "bad_records",
        "fail",
        BAD_RECORDS,
        "What to do with records that cannot be read or decoded. fail: stop at the "
        "first one. skip: list all of them in bad_records.json, and leave them out.",
        **own,
    )
    flags.DEFINE_integer(
        "max_bad_records",
        100,
        "Most records that --bad_records=skip may leave out.",
        lower_bound=0,
        **own,
    )
    flags.DEFINE_integer(
        "verbosity", -1, "0 shows the start-up messages of TensorFlow.", **own
    )
    return values

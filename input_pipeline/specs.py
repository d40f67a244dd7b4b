"""How data sets are named, and which arguments each kind takes."""

FORMS = {
    "digits": "digits",
    "tfds": "tfds:NAME",
    "tfrecord": "tfrecord:GLOB",
    "array_record": "array_record:GLOB",
    "parquet": "parquet:GLOB",
    "csv": "csv:GLOB",
    "folder": "folder:DIR",
    "synthetic": "synthetic:HxWxC:CLASSES[:COUNT]",
}

# What each kind understands, of what not all do.
_OF_TFDS = ("data_dir", "train_split", "test_split", "shard", "read_config")
_OF_EXAMPLES = ("image_key", "label_key", "num_classes")
_OF_TABLES = (
    "label_key",
    "label_column",
    "feature_columns",
    "num_classes",
    "class_names",
    "eval_fraction",
)
_TAKES = {
    "digits": _OF_TFDS,
    "tfds": _OF_TFDS,
    "tfrecord": _OF_EXAMPLES,
    "array_record": _OF_EXAMPLES,
    "parquet": ("image_key", *_OF_TABLES),
    "csv": _OF_TABLES,
    "folder": ("eval_fraction",),
    "synthetic": (),
}


def takes(spec: str, name: str) -> bool:
    """Tells whether an argument of ``open_source`` applies to a data set.

    Args:
        spec: of the data set.
        name: of the argument, one of those that not all data sets understand.

    Returns:
        Whether it does; True of an unknown data set, which is said elsewhere.
    """
    return name in _TAKES.get(spec.partition(":")[0], (name,))


def kinds_with(name: str) -> str:
    """The kinds of data sets to which an argument of ``open_source`` applies."""
    found = [kind for kind in FORMS if takes(kind, name)]
    return ", ".join(kind if kind == "digits" else f"{kind}:" for kind in found)

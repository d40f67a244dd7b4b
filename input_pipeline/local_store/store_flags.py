"""Defines --local_store and --local_store_gb, and checks them without TensorFlow."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from towers.input_pipeline import specs
from towers.input_pipeline.local_store import places
from towers.program.commands import check_folder

LIMIT_GB = 50.0

HELPS = {
    "local_store": (
        "Folder on a disk for what is read of remote files, such as gs://, of "
        "tfrecord:, folder:, csv: and parquet:. Later epochs and other runs read "
        "it there; what comes next is read ahead of use."
    ),
    "local_store_gb": (
        "What --local_store may take, in GB. What does not fit is read from where "
        "it lies, evenly over an epoch."
    ),
}


def define(group: Mapping[str, str]) -> None:
    """Defines the flags, for programs without settings.

    The flags appear below the heading that `group` has as ``module_name``.
    """
    flags.DEFINE_string("local_store", None, HELPS["local_store"], **group)
    flags.DEFINE_float("local_store_gb", LIMIT_GB, HELPS["local_store_gb"], **group)


def check(settings: Any, named: Sequence[str]) -> None:
    """Checks that there are data to store, and a place for them.

    Args:
        settings: has the flags as its attributes.
        named: the data sets, as for ``open_source``.

    Raises:
        ValueError: there are none.
    """
    folder, limit_gb = settings.local_store, settings.local_store_gb
    if not 0 < limit_gb < math.inf:
        raise ValueError(
            f"Received --local_store_gb={limit_gb}; expected a number above 0, such as "
            f"--local_store_gb={LIMIT_GB:g}."
        )
    if folder is None:
        if limit_gb != LIMIT_GB:
            raise ValueError(
                f"Received --local_store_gb={limit_gb:g} without --local_store; "
                "expected a folder to keep data in, such as --local_store=/data/store."
            )
        return
    if "://" in folder:
        raise ValueError(
            f"Received --local_store={folder}; expected a folder of this machine, or "
            "of a disk that machines share."
        )
    if settings.data_service:
        raise ValueError(
            f"Received --local_store={folder} with --data_service, whose workers read "
            "the files themselves; expected one of the two."
        )
    if not any(specs.takes(name, "local_store") for name in named):
        data = " and ".join(named) or "data of your own"
        raise ValueError(
            f"Received --local_store={folder} for {data}; expected it only for "
            f"{specs.kinds_with('local_store')}, so leave it out."
        )
    if settings.text_column is not None:
        raise ValueError(
            f"Received --local_store={folder} with --text_column, whose texts are read "
            "once; expected one of the two."
        )
    check_folder("local_store", folder, "--local_store")
    if any("gs://" in name for name in named):
        places.read_small_blocks()  # while TensorFlow is not imported

"""Defines --local_store, and checks it without TensorFlow."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from towers.input_pipeline import specs
from towers.input_pipeline.local_store import places
from towers.program.commands import check_folder
from towers.program.flags.table import About, flag

LIMIT_GB = 50.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreFlags:
    """The flag --local_store, and its parts."""

    local_store: str | None = flag(
        None,
        "Input pipeline",
        "Folder on a disk for what is read of remote files, such as gs://, of "
        "tfrecord:, folder:, csv: and parquet:. Later epochs and other runs read it "
        "there; what comes next is read ahead of use. The folder may take 50 GB, or "
        "as many as 200:DIR says; what does not fit is read from where it lies, "
        "evenly over an epoch.",
        about=About.HOST,
        defined_by=("train_data",),
    )

    @property
    def store_folder(self) -> str | None:
        """The folder of --local_store, if it is given."""
        return _parts(self.local_store)[1]

    @property
    def store_gb(self) -> float:
        """The maximum size of the folder, in GB."""
        return _parts(self.local_store)[0]


def _parts(text: str | None) -> tuple[float, str | None]:
    """Returns the limit, NaN if it is malformed, and the folder of --local_store."""
    limit, folder = re.fullmatch("(?:([^/:]*):)?(.*)", text or "", re.DOTALL).groups()
    if limit is None or "://" in (text or ""):
        return LIMIT_GB, text or None
    is_number = re.fullmatch(r"\d+(\.\d*)?|\.\d+", limit)
    return float(limit) if is_number else math.nan, folder or None


def check(settings: Any, named: Sequence[str]) -> None:
    """Checks that there are data to store, and a place for them.

    Args:
        settings: has the flags as its attributes.
        named: the data sets, as for ``open_source``.

    Raises:
        ValueError: there are none.
    """
    folder, limit_gb = settings.store_folder, settings.store_gb
    if settings.local_store is None:
        return
    if folder is None or not 0 < limit_gb < math.inf:
        raise ValueError(
            f"Received --local_store={settings.local_store}; expected a folder, or how "
            "many GB it may take and a folder, such as --local_store=200:/data/store."
        )
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

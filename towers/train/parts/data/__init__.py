"""The data of a run, as settings describe them."""

from towers.train.parts.data.examples import Data, Opened, open_data
from towers.train.parts.data.opening import (
    check_same_kind,
    choose_image_shape,
    open_source,
    open_sources,
)

__all__ = [
    "Data",
    "Opened",
    "check_same_kind",
    "choose_image_shape",
    "open_data",
    "open_source",
    "open_sources",
]

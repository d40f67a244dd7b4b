from . import quarantine as quarantine
from .augment import normalize as normalize
from .cache import CACHES as CACHES
from .cache import cached as cached
from .cache import free_memory as free_memory
from .checks import (
    blame_records as blame_records,
)
from .checks import (
    find_bad_record as find_bad_record,
)
from .checks import (
    scan_labels as scan_labels,
)
from .mix import Mix as Mix
from .pipeline import Pipeline as Pipeline
from .pipeline import make_dataset as make_dataset
from .recipes import RECIPES as RECIPES
from .report import ADVICE as ADVICE
from .sources import Source as Source
from .sources import open_source as open_source
from .sources.arrays import ArraySource as ArraySource
from .sources.base import BadRecordError as BadRecordError

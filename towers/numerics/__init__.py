"""Steps that are not finite: where that began."""

from towers._deprecated import finds_old_names
from towers.program import lazy

# As in `towers`.
_find, __dir__, __all__ = lazy.attach(__name__, __file__)
__getattr__ = finds_old_names(__name__, _find)

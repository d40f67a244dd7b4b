from .errors import NotFiniteStep as NotFiniteStep
from .search import NonFiniteOrigin as NonFiniteOrigin
from .search import locate as locate

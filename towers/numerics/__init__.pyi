from .not_finite import NotFiniteStep as NotFiniteStep
from .search import Finding as Finding
from .search import locate as locate

from .facts import Facts as Facts
from .images.applications import imagenet_weights as imagenet_weights
from .registry import build as build
from .spec import check as check
from .spec import names as names

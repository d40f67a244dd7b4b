"""Models by name; see `models.registry`."""

from towers.models.registry import build, check, names

__all__ = ["build", "check", "names"]

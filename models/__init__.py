"""Models by name; see `models.registry`."""

from models.registry import build, check, names

__all__ = ["build", "check", "names"]

"""Hosts that come and go: the launcher has their coordinator, and starts others."""

from towers.launch.elastic.launcher import Launcher

__all__ = ["Launcher"]

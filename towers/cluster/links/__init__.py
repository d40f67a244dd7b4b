"""Connections between hosts, over which collectives exchange bytes."""

from towers.cluster.links.greeting import LinkError
from towers.cluster.links.links import Links, Message

__all__ = ["LinkError", "Links", "Message"]

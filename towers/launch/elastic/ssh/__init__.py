"""Hosts on machines that ssh reaches."""

from towers.launch.elastic.ssh.machines import Machines

__all__ = ["Machines"]

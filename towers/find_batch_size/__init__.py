"""Finds the largest global batch that the devices take, and the fastest one."""

"""Finds the bottleneck of a run."""

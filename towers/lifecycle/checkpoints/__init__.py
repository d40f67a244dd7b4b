"""Checkpoints on the disk."""

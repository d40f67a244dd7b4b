"""Continues a run in its data, and past the batches that are done."""

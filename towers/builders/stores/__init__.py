"""Stores say where variables live: one for each synchronous way to update variables."""

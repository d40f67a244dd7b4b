"""The steps of a model on towers, and the ways to update its variables."""

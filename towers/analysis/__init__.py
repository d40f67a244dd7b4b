"""Finds out from the graph of a traced step how its tensors depend on examples."""

"""Reads in the graph of a traced step how its tensors depend on the examples."""

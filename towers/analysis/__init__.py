"""Reads from the graph of a traced step how each tensor depends on the examples."""

"""Asynchronous training: towers update the variables without waiting for each other."""

"""Cuts batches for the towers, sends values to towers and adds their results."""

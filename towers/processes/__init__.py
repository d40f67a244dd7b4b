"""Processes that a program starts: how they begin, hear signals and end."""

"""Parsers of the flags of programs."""

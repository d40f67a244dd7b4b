"""Keeps parts of far files in a local store."""

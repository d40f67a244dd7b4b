"""Finds the bad records of a source, and passes them over."""

"""Measures a run, and shows it."""

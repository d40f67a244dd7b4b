"""Saves a run's state and position, and continues the run."""

"""Measures how training scales with the number of towers, and says how many pay."""

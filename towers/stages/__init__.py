"""A tower on several devices: its graph cut into phases, and their schedule."""

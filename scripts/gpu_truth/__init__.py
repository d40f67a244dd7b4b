"""Measures on GPUs what Towers claims of them; see `__main__`."""

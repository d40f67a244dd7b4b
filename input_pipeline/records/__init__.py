"""Which records of a source are bad, and what becomes of them."""

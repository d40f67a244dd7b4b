"""Variables that several hosts divide: optimizer slots and embedding tables."""

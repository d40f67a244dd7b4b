"""Partitions any function of a batch over several towers, as on one device."""

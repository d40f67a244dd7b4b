"""Functions of a batch on several devices, which loops of users call."""

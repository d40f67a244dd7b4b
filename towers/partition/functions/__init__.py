"""Functions of a batch on several devices, for training loops of users."""

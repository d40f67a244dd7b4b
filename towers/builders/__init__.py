"""The builders: one file for each way to update the variables."""

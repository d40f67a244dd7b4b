"""Starts the hosts of a run, and starts them anew when one fails."""

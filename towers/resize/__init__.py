"""Gives a run that trains other towers."""

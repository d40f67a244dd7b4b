"""Cuts batches for the towers, sends values to them and adds up what they return."""

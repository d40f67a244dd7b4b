"""Runs whose devices change while they train."""

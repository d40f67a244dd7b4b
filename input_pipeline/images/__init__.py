"""Prepares images on their way into a batch."""

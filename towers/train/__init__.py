"""Trains a model on towers: python -m towers.train."""

"""Predicts with a model that towers.train has trained."""

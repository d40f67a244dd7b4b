"""Writes text with a language model that towers.train has trained."""

"""Towers that do not wait for one another."""

"""Runs that do not depend on one another, each on a device of its own."""

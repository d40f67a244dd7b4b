"""Decides where each operation of a traced function runs."""

"""Connects the hosts that train together: how they meet, and their collectives."""

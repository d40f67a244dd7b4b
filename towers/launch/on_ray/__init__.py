"""Hosts on the workers of Ray Train, which chooses their nodes and starts them anew."""

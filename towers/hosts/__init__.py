"""The group of hosts that train together, without the code that connects hosts."""

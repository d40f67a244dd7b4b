"""What this process may use of the machine: a container has a part of it only."""

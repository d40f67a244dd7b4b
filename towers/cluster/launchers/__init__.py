"""What launchers of others say of a process's place among hosts."""

"""What a run writes and says: its files, its first lines and its last ones."""

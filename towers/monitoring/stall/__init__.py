"""What a run waits for, if it stands still."""

"""Where variables live: the stores, one for each way to update variables."""

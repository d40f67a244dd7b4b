"""Variables of which each of several hosts has a part: optimizer slots and tables."""

"""Networks for pictures."""

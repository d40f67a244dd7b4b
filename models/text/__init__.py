"""Networks for tokens."""

"""How programs read their flags."""

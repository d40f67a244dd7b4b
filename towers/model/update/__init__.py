"""How variables are updated, by which towers: chosen, made, and made anew."""

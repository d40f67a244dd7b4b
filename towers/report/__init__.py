"""One page that says how a run went."""

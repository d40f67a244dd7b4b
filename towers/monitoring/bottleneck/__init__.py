"""What a run is bound by."""

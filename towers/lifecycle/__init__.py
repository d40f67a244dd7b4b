"""Where a run is, how it is saved, and how it goes on."""

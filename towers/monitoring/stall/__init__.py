"""Reports what a stalled run waits for."""

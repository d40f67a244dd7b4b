"""How long tests wait for what has to come."""

# Only what hangs takes that long, even on a busy machine. A test is ended after 900 s.
HANG_S = 800

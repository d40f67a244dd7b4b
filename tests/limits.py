"""How long tests wait for what has to come."""

# Only what hangs takes that long, also where other work keeps the machine busy.
HANG_S = 600

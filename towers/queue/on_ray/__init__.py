"""Has Ray Tune start the runs of a queue, on the nodes of its cluster."""

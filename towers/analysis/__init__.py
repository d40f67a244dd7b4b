"""What the graph of a traced step tells: how its tensors depend on the examples."""

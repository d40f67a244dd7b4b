"""What the graph of a traced tower tells about a model."""

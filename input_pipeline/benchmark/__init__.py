"""Says how fast the input pipeline is: python -m towers.input_pipeline.benchmark."""

"""Measures the input pipeline: python -m towers.input_pipeline.benchmark."""

"""Writes a source as TFRecord files: python -m towers.input_pipeline.convert."""

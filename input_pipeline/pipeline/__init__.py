"""The tf.data stages between a source and the training loop."""

from towers.input_pipeline.pipeline.pipeline import Pipeline, make_dataset

__all__ = ["Pipeline", "make_dataset"]

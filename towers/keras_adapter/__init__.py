"""Everything of Keras and TensorFlow that has no public name."""

"""Sources of TensorFlow Datasets."""

"""Sources of tf.Examples: TFRecord and ArrayRecord files."""

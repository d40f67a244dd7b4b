"""The function that Keras calls for each batch, or for several batches at once."""

"""The train function that Keras calls for one or several batches, and its timers."""

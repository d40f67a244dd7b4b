"""What Keras calls for each batch, or for several at once."""

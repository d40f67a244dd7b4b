"""The Keras door: a model that trains on towers."""

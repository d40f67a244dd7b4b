"""`multi_gpu_model`, and the proxy of a Keras model that trains on towers."""

from towers.program import lazy

# As in `towers`.
__getattr__, __dir__, __all__ = lazy.attach(__name__, __file__)

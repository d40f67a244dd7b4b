"""Files of NumPy's arrays, ``.npz`` and ``.npy``."""

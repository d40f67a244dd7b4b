"""NVIDIA's GPUs: what keeps TensorFlow from using them, and who does use them."""

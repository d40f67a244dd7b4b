"""How a program starts, reads its flags and speaks. Nothing here needs TensorFlow."""

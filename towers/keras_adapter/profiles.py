"""The files that TensorFlow's profiler writes."""

from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

__all__ = ["XSpace"]

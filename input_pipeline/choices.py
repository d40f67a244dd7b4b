"""Values of flags, for programs that check them before they import TensorFlow."""

# What becomes of images; recipes.py says how.
RECIPES = ("none", "imagenet", "cifar")
# Where examples are kept; see cache/.
CACHES = ("auto", "memory", "disk", "none")
# Whether `convert` writes pixels.
RAW = ("auto", "true", "false")
# How rows of numbers are scaled.
SCALES = ("none", "standard")
# What becomes of bad records.
BAD_RECORDS = ("fail", "skip")
# In a mask: a pixel that has no class, such as the border of an object.
IGNORED = 255
# Names the part of the machine's memory that is this process's, such as 0.5, in the
# environment of runs that share a machine.
MEMORY_SHARE = "TOWERS_MEMORY_SHARE"
# Data sets that are files: KIND:PATH.
FILE_KINDS = ("tfrecord", "array_record", "parquet", "csv", "folder", "text", "conll")

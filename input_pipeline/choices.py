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
# Data sets that are files: KIND:PATH.
ARRAY_KINDS = ("npz", "npy")
FILE_KINDS = (
    *("tfrecord", "array_record", "parquet", "csv", "folder", "text", "conll"),
    *ARRAY_KINDS,
)
# What stands for a number that is missing in a table.
MISSING = ("mean", "median", "fail")

"""Lists values of flags, to check flags before TensorFlow is imported."""

# The preparation of images; see recipes.py.
RECIPES = ("none", "imagenet", "cifar")
# The places where examples are kept; see cache/.
CACHES = ("auto", "memory", "disk", "none")
# The decoders of images: TensorFlow's, or DALI.
DECODE_ON = ("cpu", "gpu")
# Whether `convert` writes pixels.
RAW = ("auto", "true", "false")
# The scaling of rows of numbers.
SCALES = ("none", "standard")
# The treatment of bad records.
BAD_RECORDS = ("fail", "skip")
# In a mask: a pixel without a class, such as the border of an object.
IGNORED = 255
# Data sets in files: KIND:PATH.
ARRAY_KINDS = ("npz", "npy")
FILE_KINDS = (
    *("tfrecord", "array_record", "parquet", "csv", "folder", "text", "conll"),
    *ARRAY_KINDS,
)
# The replacement of missing numbers in a table.
MISSING = ("mean", "median", "fail")

"""What to do about a stage of the pipeline, by the name that `Pipeline` gives it."""

# In the words of the command line. What brings records up to `parse` is "read".
ADVICE = {
    "read": "keep the data in memory (--cache), on a faster disk, or in fewer and "
    "larger files (tfrecord:)",
    "shuffle": "take a smaller --shuffle_mb, or keep the data in memory (--cache)",
    "parse": "keep nothing but image and label in the records, or take a larger "
    "--batch_size",
    "decode": "store the images no larger than needed, as JPEG, take a lighter "
    "--recipe, or have other machines decode (--data_service)",
    "batch": "take a smaller --image_size, to copy less",
    "augment": "take a lighter --recipe, no --randaugment, or a larger --batch_size",
    "service": "start more workers",
    "prefetch": "several steps in a call, such as --steps_per_loop=10, or a larger "
    "--ram_budget_mb",
    "copy": "take fewer towers, a larger --batch_size or a smaller --image_size",
}

# The same of examples that are kept.
OF_KEPT = dict.fromkeys(
    ("read", "parse"), "take a larger --batch_size: the examples are at hand already"
)

# In the words of `cached`, `make_dataset` and Keras.
IN_PYTHON = {
    "read": "keep the data in memory (input_pipeline.cached), on a faster disk, or in "
    "fewer and larger files (TFRecord)",
    "shuffle": "take a smaller shuffle_mb, or keep the data in memory "
    "(input_pipeline.cached)",
    "parse": "keep nothing but image and label in the records, or take a larger "
    "batch_size",
    "decode": "store the images no larger than needed, as JPEG, take a lighter recipe, "
    "or have other machines decode (data_service)",
    "batch": "take a smaller image_shape, to copy less",
    "augment": "take a lighter recipe, no randaugment, or a larger batch_size",
    "service": "start more workers",
    "prefetch": "several steps in a call, such as compile(steps_per_execution=10), or "
    "a larger ram_budget_mb",
    "copy": "take fewer towers, a larger batch_size or a smaller image_shape",
}

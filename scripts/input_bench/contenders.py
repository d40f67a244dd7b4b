"""Who can read: the contenders' names, and the modules that run them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Contender:
    """One contender.

    Attributes:
        label: What tables call it.
        module: The module of this package that runs it.
        dtype: Of its images; float32 ones are normalised.
        works: What it can read; all if empty.
    """

    label: str
    module: str
    dtype: str
    works: tuple[str, ...] = ()


_PHOTOS = ("photos",)
CONTENDERS = {
    "ours": Contender("Ours", "ours", "uint8"),
    "ours_deterministic": Contender("Ours, deterministic", "ours", "uint8"),
    "ours_stream": Contender("Ours, --cache=none", "ours", "uint8"),
    "ours_stream_deterministic": Contender(
        "Ours, --cache=none, deterministic", "ours", "uint8"
    ),
    "naive": Contender("tf.data, naive", "tf_data", "float32"),
    "naive_cast_last": Contender(
        "tf.data, naive, cast after the resize", "tf_data", "float32"
    ),
    "tuned": Contender("tf.data, tuned by hand", "tf_data", "uint8"),
    "tuned_float": Contender("tf.data, tuned by hand", "tf_data", "float32"),
    "keras": Contender("Keras, folder and layers", "keras_folder", "float32", _PHOTOS),
    "dali": Contender("DALI on the CPU", "dali", "uint8", _PHOTOS),
    "grain": Contender("grain, 2 workers", "grain_loader", "uint8", _PHOTOS),
    "torchvision": Contender(
        "torchvision, 2 workers", "torch_loader", "uint8", _PHOTOS
    ),
    "c": Contender("C limit, 2 processes", "limit", "uint8", _PHOTOS),
}

"""What is read: how large the batches are, and how many examples make a round."""

import dataclasses

CLASSES = 10


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work.

    Attributes:
        shape: The shape of an image of a batch.
        batch: Examples in a batch.
        recipe: What our pipeline calls this augmentation.
        warmup: Examples that are read before those of each round.
        examples: Timed examples of a round.
    """

    shape: tuple[int, int, int]
    batch: int
    recipe: str
    warmup: int
    examples: int


WORKS = {
    # Crops of 8 to 100% of a photograph, 3:4 to 4:3, resized, and flipped or not.
    "photos": Work((224, 224, 3), 64, "imagenet", warmup=2048, examples=4096),
    # Whole photographs, resized: what training does by default.
    "whole": Work((224, 224, 3), 64, "none", warmup=2048, examples=4096),
    # TFRecords of pixels, padded by 4, cropped, and flipped or not.
    "small": Work((32, 32, 3), 256, "cifar", warmup=50_000, examples=100_000),
    # The same of arrays in memory.
    "arrays": Work((32, 32, 3), 256, "cifar", warmup=50_000, examples=200_000),
}
# Their TFRecords; arrays have none.
FILES = {"photos": "train-*", "whole": "train-*", "small": "small-*"}
AREA = 0.08, 1.0
RATIO = 3 / 4, 4 / 3
PADDING = 4

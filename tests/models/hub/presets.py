"""Small presets with random weights, as `save_to_preset` of keras-hub writes them."""

from pathlib import Path

import keras
from keras_hub import layers, models

from tests.models.hub.images import RESNET, VIT

LENGTH = 16
CLASSES = 7
# Of the bytes of ASCII, as GPT-2 writes them, and of some pairs. Id 0 is "!".
_LETTERS = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
_MERGES = ["Ġ t", "h e", "Ġt he", "s e", "l f", "se lf"]
END = "<|endoftext|>"
TOKENS = [*_LETTERS, *(pair.replace(" ", "") for pair in _MERGES), END]


def gpt2(folder: Path) -> str:
    """Writes a language model, whose dropout is 0, so that it can be compared."""
    ids = {token: number for number, token in enumerate(TOKENS)}
    tokenizer = models.GPT2Tokenizer(vocabulary=ids, merges=_MERGES)
    backbone = models.GPT2Backbone(
        vocabulary_size=len(TOKENS),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        dropout=0.0,
        max_sequence_length=LENGTH,
    )
    # With GPT-2's first weights, most of the first gradients round to zero.
    weights = backbone.get_weights()
    backbone.set_weights([w * 10 if w.ndim > 1 else w for w in weights])
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, LENGTH)
    return _saved(models.GPT2CausalLM(backbone, preprocessor), folder)


def vit(folder: Path) -> str:
    """Writes a model of pictures that are scaled to [-1, 1] for it."""
    converter = layers.ViTImageConverter(
        image_size=VIT["image_shape"][:2], scale=1 / 127.5, offset=-1
    )
    backbone = models.ViTBackbone(**VIT, mlp_dim=16)
    preprocessor = models.ViTImageClassifierPreprocessor(converter)
    task = models.ViTImageClassifier(backbone, CLASSES, preprocessor)
    return _saved(task, folder)


def resnet(folder: Path) -> str:
    """Writes a model of pictures, each color of which is scaled in another way."""
    converter = layers.ResNetImageConverter(
        image_size=(32, 32), scale=[1 / 58, 1 / 57, 1 / 56], offset=[-2.1, -2.0, -1.8]
    )
    backbone = models.ResNetBackbone(**RESNET)
    preprocessor = models.ResNetImageClassifierPreprocessor(converter)
    task = models.ResNetImageClassifier(backbone, CLASSES, preprocessor)
    return _saved(task, folder)


def _saved(task: keras.Model, folder: Path) -> str:
    task.save_to_preset(str(folder))
    return str(folder)

"""Models of keras-hub from a preset: a backbone with its weights, and a head.

A preset is a name that keras-hub knows and downloads, or a folder that its
`save_to_preset` has written. keras-hub takes seconds to import, and few runs need it.
"""

import difflib
import os
from typing import Any

import keras

from towers.models.facts import Facts
from towers.program import words
from towers.program.extras import import_extra

# How keras-hub names a preset that is somewhere else, such as hf://user/gpt2.
_REMOTE = "://"
# Arguments of a task inside a model, which has the data, the loss and the metrics.
_AS_LAYER = {"preprocessor": None, "compile": False}


@keras.saving.register_keras_serializable(package="towers")
class HubTask(keras.layers.Layer):
    """A task of keras-hub on what data sets give: tokens, or pixels in [-1, 1].

    keras-hub does not write into a model's description that it has LoRA; this layer
    does.

    Args:
        task: A `keras_hub.models.CausalLM` or `ImageClassifier`, without preprocessor.
        lora: Rank of LoRA in the backbone, whose own weights are then frozen; None
            trains them.
        scale: What the preset multiplies pixels in [0, 255] by; None for a model of
            tokens.
        offset: What it then adds to them.
        **kwargs: Of every layer.
    """

    def __init__(
        self,
        task: keras.Model,
        lora: int | None = None,
        scale: float | list[float] | None = None,
        offset: float | list[float] | None = None,
        **kwargs: Any,
    ):
        # bfloat16 cannot tell pixels apart; the task casts as its own policy says.
        super().__init__(**{**kwargs, "dtype": "float32"})
        self.task = task
        self.lora, self.scale, self.offset = lora, scale, offset
        if lora is not None:
            task.backbone.enable_lora(lora)

    def call(self, inputs: Any) -> Any:
        """Returns float32 logits."""
        if self.scale is None:
            # Causal: what is behind a token, padding as well, does not reach it.
            mask = keras.ops.ones_like(inputs, dtype="bool")
            inputs = {"token_ids": inputs, "padding_mask": mask}
        else:
            scale, offset = (
                keras.ops.array(each, "float32") for each in (self.scale, self.offset)
            )
            inputs = (inputs + 1) * 127.5 * scale + offset
        return keras.ops.cast(self.task(inputs), "float32")

    def get_config(self) -> dict[str, Any]:
        """Returns what the layer is made of."""
        task = keras.saving.serialize_keras_object(self.task)
        task["config"] |= _AS_LAYER
        return {
            **super().get_config(),
            "task": task,
            "lora": self.lora,
            "scale": self.scale,
            "offset": self.offset,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "HubTask":
        """Makes the layer of its description."""
        import_extra("keras_hub", "hub")  # registers its classes
        task = keras.saving.deserialize_keras_object(config["task"])
        return cls(**{**config, "task": task})


def build(preset: str, lora: int | None, facts: Facts) -> keras.Model:
    """Builds a language model, or a model of pictures, with the weights of a preset.

    The head of a model of pictures is new.

    Args:
        preset: Its name or folder.
        lora: As for `HubTask`.
        facts: What the data has.

    Returns:
        A model from tokens, or from pixels in [-1, 1], to float32 logits.

    Raises:
        ValueError: keras-hub or the preset is not there, or is for another task.
    """
    hub = import_extra("keras_hub", "hub")
    is_text = facts.task == "language_model"
    if not is_text and (facts.input_kind != "image" or facts.task == "segmentation"):
        raise ValueError(
            f"The model hub:{preset} is for pictures, or for --task=language_model, "
            f"but input_shape={facts.input_shape} with --task={facts.task} was "
            "received; use other data, or a model of your own with keras_hub in it."
        )
    converted = {}
    if is_text:
        task = _load(hub.models.CausalLM, preset, **_AS_LAYER)
        _check_length(preset, task.backbone, facts.sequence_length)
    else:
        task = _load(
            *(hub.models.ImageClassifier, preset),
            num_classes=facts.num_outputs,
            activation=None,
            **_AS_LAYER,
        )
        _check_pictures(preset, task.input_shape[1:], facts.input_shape)
        converter = _load(hub.layers.ImageConverter, preset)
        converted = {"scale": 1.0, "offset": 0.0} | {
            name: [*value] if isinstance(value, list | tuple) else value
            for name in ("scale", "offset")
            if (value := getattr(converter, name)) is not None
        }
    layer = HubTask(task, lora, **converted, name=task.name)
    if not task.backbone.trainable_variables:
        raise ValueError(
            f"Received lora={lora} for hub:{preset}, a {type(task.backbone).__name__}, "
            "which has no attention for LoRA; expected a transformer, so leave lora "
            "out, and freeze layers by --freeze."
        )
    inputs = keras.Input(facts.input_shape, dtype="int32" if is_text else None)
    return keras.Model(inputs, layer(inputs))


def tokenizer(preset: str) -> Any:
    """Returns the tokenizer of a preset, a `keras_hub.tokenizers.Tokenizer`.

    Raises:
        ValueError: keras-hub or the preset is not there, or it has none.
    """
    hub = import_extra("keras_hub", "hub")
    return _load(hub.tokenizers.Tokenizer, preset)


def _check_length(preset, backbone, length):
    most = getattr(backbone, "max_sequence_length", None)
    if most is not None and (length is None or length > most):
        raise ValueError(
            f"The model hub:{preset} reads at most {most} tokens, but rows of "
            f"{length or 'any number of'} tokens were received; give "
            f"--sequence_length={most} or less."
        )


def _check_pictures(preset, takes, shape):
    if any(
        None not in pair and pair[0] != pair[1]
        for pair in zip(takes, shape, strict=True)
    ):
        raise ValueError(
            f"The model hub:{preset} takes pictures of {takes}, but {shape} was "
            "received; give its size by --image_size, and pictures with as many colors."
        )


def _load(cls, preset, **options):
    """Loads a part of a preset."""
    try:
        return cls.from_preset(preset, **options)
    except Exception as error:  # whatever a download or a file raises, of any class
        raise _not_loaded(cls, preset, error) from error


def _not_loaded(cls, preset, error):
    reason = words.error_line(error).rstrip(".")
    if os.path.isdir(preset):
        return ValueError(
            f"The preset in {preset} cannot be loaded ({reason}); expected a folder "
            f"that save_to_preset of keras-hub has written of a {cls.__name__}."
        )
    known = [*cls.presets]
    if preset not in known and _REMOTE not in preset:
        near = difflib.get_close_matches(preset, known) or known[:2]
        return ValueError(
            f"There is no folder {preset!r}, and no {cls.__name__} of that name in "
            "keras-hub; expected a folder that save_to_preset has written, or a name "
            f"such as {' or '.join(near)}."
        )
    return ValueError(
        f"The preset {preset} cannot be downloaded ({reason}); expected a network "
        "connection, or a folder that save_to_preset has written elsewhere, as "
        "--model=hub:FOLDER."
    )

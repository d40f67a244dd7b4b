"""Backbones of keras-hub that take several things, or are made of several parts."""

from typing import Any

import numpy as np
from keras_hub import models as hub
from keras_hub.src.models.blip2.blip2_custom_opt import BLIP2CustomOPT
from keras_hub.src.models.blip2.blip2_qformer import BLIP2QFormer
from keras_hub.src.models.blip2.blip2_vision_encoder import BLIP2VisionEncoder
from keras_hub.src.models.clip.clip_text_encoder import CLIPTextEncoder
from keras_hub.src.models.clip.clip_vision_encoder import CLIPVisionEncoder
from keras_hub.src.models.gemma3.gemma3_vision_encoder import Gemma3VisionEncoder
from keras_hub.src.models.gemma4.gemma4_vision_encoder import Gemma4VisionEncoder
from keras_hub.src.models.metaclip_2.metaclip_2_text_encoder import (
    MetaCLIP2TextEncoder,
)
from keras_hub.src.models.metaclip_2.metaclip_2_vision_encoder import (
    MetaCLIP2VisionEncoder,
)
from keras_hub.src.models.sam.sam_mask_decoder import SAMMaskDecoder
from keras_hub.src.models.sam.sam_prompt_encoder import SAMPromptEncoder
from keras_hub.src.models.sam3.sam3_detr_decoder import SAM3DetrDecoder
from keras_hub.src.models.sam3.sam3_detr_encoder import SAM3DetrEncoder
from keras_hub.src.models.sam3.sam3_geometry_encoder import SAM3GeometryEncoder
from keras_hub.src.models.sam3.sam3_mask_decoder import SAM3MaskDecoder
from keras_hub.src.models.sam3.sam3_text_encoder import SAM3TextEncoder
from keras_hub.src.models.sam3.sam3_vision_encoder import SAM3VisionEncoder
from keras_hub.src.models.siglip.siglip_text_encoder import SigLIPTextEncoder
from keras_hub.src.models.siglip.siglip_vision_encoder import SigLIPVisionEncoder
from keras_hub.src.models.vae.vae_backbone import VAEBackbone

from tests.models.hub.images import IMAGE, MOBILENET_V5, SIDE, VIT
from tests.models.hub.text import BERT, DECODER, STEPS, VOCABULARY

ROWS = 6

_GEMMA3 = DECODER | {
    "head_dim": 4,
    "image_size": 16,
    "use_query_key_norm": True,
    "use_post_ffw_norm": True,
    "use_post_attention_norm": True,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4,
}
_GEMMA4 = DECODER | {
    "head_dim": 4,
    "image_size": 16,
    "use_sliding_window_attention": True,
    "sliding_window_size": 4,
}
_GEMMA3N = {
    "text_vocab_size": VOCABULARY,
    "text_hidden_size": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": [8, 8],
    "hidden_activation": "gelu_approximate",
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
    "rope_theta": 10000.0,
    "max_position_embeddings": STEPS,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 2,
    "altup_num_inputs": 2,
    "laurel_rank": 1,
    "image_token_id": VOCABULARY - 1,
}
_GEMMA_VISION = {
    "image_size": 16,
    "patch_size": 4,
    "pool_size": 2,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "output_dim": 8,
}
_SAM3 = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16, "num_heads": 2}


def _clip(vision, text):
    length = {"max_sequence_length": STEPS}
    return {
        "vision_encoder": vision(8, 8, 2, 2, 16, image_shape=IMAGE, name="vision"),
        "text_encoder": text(VOCABULARY, 8, 8, 2, 2, 16, name="text", **length),
    }


def _blip2():
    sizes = {"num_layers": 2, "num_heads": 2, "dropout": 0.0}
    vision = sizes | {"hidden_dim": 8, "intermediate_dim": 16}
    del vision["dropout"]
    return {
        "vision_encoder": BLIP2VisionEncoder(
            image_size=SIDE,
            patch_size=8,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            layer_norm_epsilon=1e-6,
            initializer_range=0.02,
            **vision,
        ),
        "qformer": BLIP2QFormer(
            num_query_tokens=2,
            hidden_dim=4,
            intermediate_dim=8,
            vision_dim=8,
            cross_attention_frequency=1,
            layer_norm_epsilon=1e-6,
            **sizes,
        ),
        "language_model": BLIP2CustomOPT(
            vocabulary_size=VOCABULARY,
            hidden_dim=4,
            intermediate_dim=8,
            num_query_tokens=2,
            qformer_hidden_dim=4,
            max_sequence_length=16,
            language_projection=None,
            **sizes,
        ),
    }


def _sam():
    return {
        "image_encoder": hub.ViTDetBackbone(
            hidden_size=8,
            num_layers=2,
            intermediate_dim=16,
            num_heads=2,
            global_attention_layer_indices=[1],
            patch_size=16,
            num_output_channels=8,
            window_size=2,
            image_shape=(16, 16, 3),
        ),
        "prompt_encoder": SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(8, 8),
            input_image_size=(16, 16),
            mask_in_channels=4,
        ),
        "mask_decoder": SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    }


def _sam3():
    image = {"image_shape": (28, 28, 3), "patch_size": 14}
    return {
        "vision_encoder": SAM3VisionEncoder(
            **image,
            **_SAM3 | {"num_layers": 2},
            fpn_hidden_dim=8,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(42, 42, 3),
            window_size=2,
            global_attn_indexes=[1],
        ),
        "text_encoder": SAM3TextEncoder(
            vocabulary_size=VOCABULARY, embedding_dim=8, **_SAM3
        ),
        "geometry_encoder": SAM3GeometryEncoder(roi_size=7, **_SAM3, dropout_rate=0.0),
        "detr_encoder": SAM3DetrEncoder(**_SAM3, dropout_rate=0.0),
        "detr_decoder": SAM3DetrDecoder(
            **image, **_SAM3, num_queries=4, dropout_rate=0.0
        ),
        "mask_decoder": SAM3MaskDecoder(
            num_upsampling_stages=3, hidden_dim=8, num_heads=2, dropout_rate=0.0
        ),
    }


def _stable_diffusion():
    return {
        "mmdit_patch_size": 2,
        "mmdit_hidden_dim": 16,
        "mmdit_num_layers": 2,
        "mmdit_num_heads": 2,
        "mmdit_position_size": 192,
        "mmdit_qk_norm": None,
        "mmdit_dual_attention_indices": None,
        "vae": VAEBackbone(
            [32] * 4, [1] * 4, [32] * 4, [1] * 4, sampler_method="mode", name="vae"
        ),
        "clip_l": CLIPTextEncoder(
            VOCABULARY, 8, 8, 2, 2, 16, "quick_gelu", -2, name="clip_l"
        ),
        "clip_g": CLIPTextEncoder(
            VOCABULARY, 8, 8, 2, 2, 16, "gelu", -2, name="clip_g"
        ),
        "image_shape": (64, 64, 3),
    }


SMALL: dict[str, Any] = {
    "BLIP2": _blip2,
    "CLIP": lambda: _clip(CLIPVisionEncoder, CLIPTextEncoder) | {"projection_dim": 8},
    "Flux": {
        "input_channels": 4,
        "hidden_size": 32,
        "mlp_ratio": 2.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [4, 6, 6],
        "theta": 10_000,
        "use_bias": True,
        "guidance_embed": True,
        "image_shape": (4, 8),
        "text_shape": (4, 8),
        "image_ids_shape": (4, 3),
        "text_ids_shape": (4, 3),
        "y_shape": (8,),
    },
    # Text alone; see WITH_PICTURES.
    "Gemma3": _GEMMA3,
    "Gemma3n": _GEMMA3N,
    "Gemma4": _GEMMA4,
    "MetaCLIP2": lambda: (
        _clip(MetaCLIP2VisionEncoder, MetaCLIP2TextEncoder) | {"projection_dim": 8}
    ),
    "Moonshine": {
        "vocabulary_size": VOCABULARY,
        "filter_dim": 16,
        "encoder_num_layers": 1,
        "decoder_num_layers": 1,
        "hidden_dim": 16,
        "intermediate_dim": 16,
        "encoder_num_heads": 2,
        "decoder_num_heads": 2,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "PARSeq": lambda: {
        "image_encoder": hub.ViTBackbone(
            **VIT
            | {
                "mlp_dim": 16,
                "dropout_rate": 0.0,
                "use_class_token": False,
                "name": "e",
            }
        ),
        "vocabulary_size": VOCABULARY,
        "max_label_length": STEPS,
        "decoder_hidden_dim": 8,
        "num_decoder_layers": 1,
        "num_decoder_heads": 2,
        "decoder_mlp_dim": 16,
        "dropout_rate": 0.0,
        "attention_dropout": 0.0,
    },
    "PaliGemma": DECODER
    | {
        "head_dim": 4,
        "image_size": 16,
        "vit_patch_size": 4,
        "vit_num_layers": 2,
        "vit_num_heads": 2,
        "vit_hidden_dim": 8,
        "vit_intermediate_dim": 16,
        # As in its second version.
        "query_head_dim_normalize": True,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "final_logit_soft_cap": 30,
        "attention_logit_soft_cap": 50,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
    },
    "SAM": _sam,
    "SAM3PromptableConcept": _sam3,
    "SigLIP": lambda: _clip(SigLIPVisionEncoder, SigLIPTextEncoder),
    "StableDiffusion3": _stable_diffusion,
    "VideoPrism": {
        "image_shape": (8, 8, 3),
        "num_frames": 2,
        "patch_size": 4,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_heads": 2,
        "num_spatial_layers": 1,
        "num_temporal_layers": 1,
        "num_auxiliary_layers": 1,
        "vocabulary_size": VOCABULARY,
        "num_text_layers": 1,
        "attention_logit_soft_cap": 50.0,
    },
    "Whisper": BERT
    | {
        "max_encoder_sequence_length": STEPS,
        "max_decoder_sequence_length": STEPS,
        "dropout": 0.0,
    },
}

WITH_PICTURES: dict[str, Any] = {
    "Gemma3": lambda: (
        _GEMMA3 | {"vision_encoder": Gemma3VisionEncoder(**_GEMMA_VISION)}
    ),
    "Gemma3n": lambda: (
        _GEMMA3N
        | {
            "vision_encoder_config": hub.MobileNetV5Backbone(
                **MOBILENET_V5
            ).get_config(),
            "vision_hidden_size": 8,
        }
    ),
    "Gemma4": lambda: (
        _GEMMA4
        | {
            "vision_encoder": Gemma4VisionEncoder(
                **_GEMMA_VISION, head_dim=4, num_key_value_heads=2
            )
        }
    ),
}


def _random():
    return np.random.default_rng(2)


def _mask():
    """The second to the fifth token stand for a picture."""
    mask = np.zeros([ROWS, STEPS], bool)
    mask[:, 1:5] = True
    return {
        "vision_mask": mask,
        "vision_indices": np.tile(np.arange(1, 5), [ROWS, 1]),
    }


# Inputs that random numbers of the right shape would not be, by class and name.
INPUTS: dict[str, Any] = {
    "Gemma3": lambda: _mask() | {"images": _random().normal(size=(ROWS, 1, 16, 16, 3))},
    "Gemma3n": lambda: {
        "images": _random().normal(size=(ROWS, 1, *IMAGE)),
        # The last stands for a picture.
        "token_ids": np.tile(np.arange(VOCABULARY - STEPS, VOCABULARY), [ROWS, 1]),
    },
    "Gemma4": lambda: (
        _mask()
        | {
            "pixel_values": _random().normal(size=(ROWS, 1, 16, 48)),
            "pixel_position_ids": np.tile(
                np.stack(np.meshgrid(range(4), range(4)), -1).reshape(16, 2),
                [ROWS, 1, 1, 1],
            ),
        }
    ),
    "Moonshine": lambda: {
        "encoder_input_values": _random().normal(size=(ROWS, 2048, 1)),
        "encoder_padding_mask": np.ones([ROWS, 2048]),
    },
    "SAM": lambda: {
        "points": _random().uniform(size=(ROWS, 1, 2)) * 16,
        "labels": np.ones([ROWS, 1]),
        "boxes": _random().uniform(size=(ROWS, 1, 2, 2)) * 16,
        "masks": np.zeros([ROWS, 0, 16, 16, 1]),
    },
    "SAM3PromptableConcept": lambda: {
        "boxes": _random().uniform(0.2, 0.8, size=(ROWS, 1, 5)),
        "box_labels": np.ones([ROWS, 1]),
    },
}

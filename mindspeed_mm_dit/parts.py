"""The built-in registry entries: where each record is. Tools, integrations and plugins add theirs (``registry.py``)."""

from __future__ import annotations

ENTRIES = {
    "command": {
        name: f"mindspeed_mm_dit.cli.commands:{name.upper().replace('-', '_')}"
        for name in ("train", "sample", "cache-latents", "ema")
    },
    "checkpoint_format": {
        "mindspore": "mindspeed_mm_dit.checkpoint.formats:MINDSPORE",
        "pytorch": "mindspeed_mm_dit.checkpoint.formats:PYTORCH",
    },
    "host": {"standalone": "mindspeed_mm_dit.hosts.registry:STANDALONE"},
    "metrics_logger": {
        "tensorboard": "mindspeed_mm_dit.training.loggers.boards:TENSORBOARD",
        "wandb": "mindspeed_mm_dit.training.loggers.boards:WANDB",
        "swanlab": "mindspeed_mm_dit.training.loggers.boards:SWANLAB",
    },
    "callback": {
        "power_ema": "mindspeed_mm_dit.training.callbacks.power_ema:KIND",
        "profile": "mindspeed_mm_dit.training.callbacks.profile:KIND",
        "lines": "mindspeed_mm_dit.training.callbacks.lines:KIND",
        "validation": "mindspeed_mm_dit.training.callbacks.validation:VALIDATION",
        "best": "mindspeed_mm_dit.training.callbacks.validation:BEST",
        "grids": "mindspeed_mm_dit.training.callbacks.grids:KIND",
    },
    "optimizer": {
        "adam": "mindspeed_mm_dit.optimizers.adam:ADAM",
        "muon": "mindspeed_mm_dit.optimizers.muon:MUON",
    },
    "objective": {
        "gaussian_diffusion": "mindspeed_mm_dit.objectives.gaussian.objective:GAUSSIAN_DIFFUSION",
        "flow_matching": "mindspeed_mm_dit.objectives.flow.objective:FLOW_MATCHING",
        "wan_flow_match_scheduler": "mindspeed_mm_dit.objectives.wan_flow.objective:WAN_FLOW",
        "mean_flow": "mindspeed_mm_dit.objectives.mean_flow.objective:MEAN_FLOW",
    },
    "predictor": {
        "dit": "mindspeed_mm_dit.configs.dit:DiTConfig",
        "custom_dit": "mindspeed_mm_dit.configs.video_transformer:CustomDiTConfig",
        "wan": "mindspeed_mm_dit.configs.video_transformer:WanConfig",
        "flux": "mindspeed_mm_dit.configs.joint:FluxConfig",
        "flux2": "mindspeed_mm_dit.configs.joint:Flux2Config",
        "sd3": "mindspeed_mm_dit.configs.joint:SD3Config",
        "qwen_image": "mindspeed_mm_dit.configs.joint:QwenImageConfig",
        "z_image": "mindspeed_mm_dit.configs.joint:ZImageConfig",
    },
    "autoencoder": {
        name: f"mindspeed_mm_dit.models.autoencoder:{name.upper()}"
        for name in (
            "pixel",
            "autoencoder_kl",
            "flux2_vae",
            "wan_video_vae",
            "qwen_image_vae",
            "autoencoder_tiny",
            "autoencoder_dc",
        )
    },
    "text_encoder": {
        "umt5": "mindspeed_mm_dit.models.text_encoders:UMT5",
        "UMT5": "mindspeed_mm_dit.models.text_encoders:UMT5",
        "t5": "mindspeed_mm_dit.models.text_encoders:T5",
        "bert": "mindspeed_mm_dit.models.text_encoders:BERT",
        "clip": "mindspeed_mm_dit.models.text_encoders:CLIP_TEXT",
        "words": "mindspeed_mm_dit.models.words_encoder:WORDS",
        "qwen2_5_vl": "mindspeed_mm_dit.models.text_encoders:QWEN2_5_VL",
        "qwen3": "mindspeed_mm_dit.models.text_encoders:QWEN3",
        "mistral3": "mindspeed_mm_dit.models.text_encoders:MISTRAL3",
    },
    "teacher": {
        "dinov2": "mindspeed_mm_dit.models.registry:DINOV2",
        "siglip": "mindspeed_mm_dit.models.registry:SIGLIP",
    },
    "data_source": {
        "image_folder": "mindspeed_mm_dit.data.images:IMAGE_FOLDER",
        "parquet": "mindspeed_mm_dit.data.images:SHARDS",
        "webdataset": "mindspeed_mm_dit.data.images:SHARDS",
        "clips": "mindspeed_mm_dit.data.clips:CLIPS",
        "mixed": "mindspeed_mm_dit.data.mixed:MIXED",
    },
    "condition": {
        "mindspeed_mm_dit.configs.condition.ClassLabel": "mindspeed_mm_dit.data.conditions:LABEL",
        "mindspeed_mm_dit.configs.condition.Vector": "mindspeed_mm_dit.data.conditions:VECTOR",
        "mindspeed_mm_dit.configs.condition.FirstFrame": "mindspeed_mm_dit.data.conditions:FRAMES",
        "mindspeed_mm_dit.configs.condition.ImageTokens": "mindspeed_mm_dit.data.conditions:IMAGE_TOKENS",
        "mindspeed_mm_dit.configs.condition.TextStates": "mindspeed_mm_dit.data.conditions:TEXT",
        "mindspeed_mm_dit.configs.condition.PooledText": "mindspeed_mm_dit.data.conditions:TEXT",
        "mindspeed_mm_dit.configs.condition.JoinedText": "mindspeed_mm_dit.models.text_encoder:JOINED",
    },
    "adapter_format": {},
    "data_config_format": {},
    "published_weights": {},
    "builtin_images": {},
    "builtin_clips": {},
}
"""Kind -> name -> "module:NAME" of the record. A command has its name, a data set its ``dataset_type``, a condition its
class, a section of model.json its ``model_id``; callbacks are called in this order. The core has no entry
of the last kinds."""

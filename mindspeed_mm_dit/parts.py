"""The built-in registry entries: where each record is. Tools, integrations and plugins add theirs (``registry.py``)."""

from __future__ import annotations

_TEXT_ENCODERS = "mindspeed_mm_dit.models.text_encoders"
_OBJECTIVES = "mindspeed_mm_dit.objectives"
_SOURCES = "mindspeed_mm_dit.data.sources"
_LOGGERS = "mindspeed_mm_dit.training.loggers"
_CALLBACKS = "mindspeed_mm_dit.training.callbacks"
_CONDITION = "mindspeed_mm_dit.configs.condition"
_CONDITIONS = "mindspeed_mm_dit.data.conditions"

ENTRIES = {
    "command": {
        name: f"mindspeed_mm_dit.cli.commands:{name.upper().replace('-', '_')}"
        for name in ("train", "sample", "cache-latents", "convert", "ema")
    },
    "host": {"standalone": "mindspeed_mm_dit.hosts.registry:STANDALONE"},
    "metrics_logger": {
        "tensorboard": f"{_LOGGERS}.tensorboard:KIND",
        "wandb": f"{_LOGGERS}.weights_and_biases:KIND",
        "swanlab": f"{_LOGGERS}.swanlab_board:KIND",
    },
    "callback": {
        name: f"{_CALLBACKS}.{name}:KIND" for name in ("power_ema", "profile", "lines", "validation", "best", "grids")
    },
    "optimizer": {
        "adam": "mindspeed_mm_dit.optimizers.adam:ADAM",
        "muon": "mindspeed_mm_dit.optimizers.muon:MUON",
    },
    "objective": {
        "gaussian_diffusion": f"{_OBJECTIVES}.gaussian.objective:GAUSSIAN_DIFFUSION",
        "flow_matching": f"{_OBJECTIVES}.flow.objective:FLOW_MATCHING",
        "wan_flow_match_scheduler": f"{_OBJECTIVES}.wan_flow.objective:WAN_FLOW",
        "mean_flow": f"{_OBJECTIVES}.mean_flow.objective:MEAN_FLOW",
    },
    "predictor": {
        "dit": "mindspeed_mm_dit.configs.dit:DiTConfig",
        "custom_dit": "mindspeed_mm_dit.configs.custom_dit:CustomDiTConfig",
        "wan": "mindspeed_mm_dit.configs.wan:WanConfig",
        "flux": "mindspeed_mm_dit.configs.flux:FluxConfig",
        "flux2": "mindspeed_mm_dit.configs.flux2:Flux2Config",
        "sd3": "mindspeed_mm_dit.configs.sd3:SD3Config",
        "qwen_image": "mindspeed_mm_dit.configs.qwen_image:QwenImageConfig",
        "z_image": "mindspeed_mm_dit.configs.z_image:ZImageConfig",
    },
    "autoencoder": {
        name: f"mindspeed_mm_dit.models.autoencoders:{name.upper()}"
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
        "umt5": f"{_TEXT_ENCODERS}:UMT5",
        "UMT5": f"{_TEXT_ENCODERS}:UMT5",
        "t5": f"{_TEXT_ENCODERS}:T5",
        "bert": f"{_TEXT_ENCODERS}:BERT",
        "clip": f"{_TEXT_ENCODERS}:CLIP_TEXT",
        "words": "mindspeed_mm_dit.models.words_encoder:WORDS",
        "qwen2_5_vl": f"{_TEXT_ENCODERS}:QWEN2_5_VL",
        "qwen3": f"{_TEXT_ENCODERS}:QWEN3",
        "mistral3": f"{_TEXT_ENCODERS}:MISTRAL3",
    },
    "teacher": {
        "dinov2": "mindspeed_mm_dit.models.teacher:DINOV2",
        "siglip": "mindspeed_mm_dit.models.teacher:SIGLIP",
    },
    "data_source": {
        "image_folder": f"{_SOURCES}:IMAGE_FOLDER",
        "parquet": f"{_SOURCES}:SHARDS",
        "webdataset": f"{_SOURCES}:SHARDS",
        "clips": f"{_SOURCES}:CLIPS",
        "mixed": f"{_SOURCES}:MIXED",
    },
    "condition": {
        f"{_CONDITION}.ClassLabel": f"{_CONDITIONS}.plain:LABEL",
        f"{_CONDITION}.Vector": f"{_CONDITIONS}.plain:VECTOR",
        f"{_CONDITION}.FirstFrame": f"{_CONDITIONS}.frames:FRAMES",
        f"{_CONDITION}.ImageTokens": f"{_CONDITIONS}.frames:IMAGE_TOKENS",
        f"{_CONDITION}.TextStates": f"{_CONDITIONS}.text:TEXT",
        f"{_CONDITION}.PooledText": f"{_CONDITIONS}.text:TEXT",
        "mindspeed_mm_dit.configs.joined_text.JoinedText": "mindspeed_mm_dit.models.joined_text:JOINED",
    },
    **{kind: {} for kind in (
        "function", "published_weights", "data_dialect", "builtin_images", "builtin_clips", "score_test",
        "report_judge", "report_picture",
    )},
}  # fmt: skip
"""Kind -> name -> "module:NAME" of the record. A command has its name, a data set its ``dataset_type``, a condition its
class, a section of model.json its ``model_id``; callbacks are called in this order. The last kinds have no built-in
entries."""

"""A trained model from a checkpoint of any format, ready to draw samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mm_dit.checkpoint.store import find_checkpoint, read_facts
from mindspeed_mm_dit.checkpoint.weights import check_names, read_weights
from mindspeed_mm_dit.configs.model import ModelConfig, load_model_config, model_config_from_mapping
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel


def load_model(
    checkpoint: str | Path,
    model_json: str | Path | None,
    use_ema: bool = True,
    *,
    bf16: bool = False,
    torch_compile: bool = False,
) -> tuple[Any, ModelConfig]:
    """Return (composite on the device, its config).

    ``model_json`` may be None for a checkpoint of ours, which remembers its model.json. ``bf16``: for samples drawn
    in bfloat16 only. ``torch_compile``: compile the blocks when they are first called.
    """
    path = find_checkpoint(checkpoint)
    config = _config(path, model_json)
    model = DiTModel(config)
    weights = read_weights(path, use_ema)
    check_names(runtime.shapes(model.predictor), {n: a.shape for n, a in weights.items()}, f"--checkpoint = {path}")
    runtime.load_arrays(model.predictor, weights)
    runtime.compiled(model.predictor)
    if bf16:
        runtime.bf16_products(model.predictor)
    if torch_compile:
        runtime.compile_blocks(model.predictor)
    return runtime.freeze(model), config


def _config(path: Path, model_json: str | Path | None) -> ModelConfig:
    if model_json is not None:
        return load_model_config(model_json)
    facts = read_facts(path) if path.is_dir() else {}
    if "model" not in facts:
        raise ConfigError("--model", f"is needed: {path} does not say what model it belongs to")
    return model_config_from_mapping(facts["model"], f"{path}/run.json: model")

"""A converter for MindSpeed-MM's ``mm-convert``: published and diffusers DiT weights to the host's format and back.

    python -m mindspeed_mm_dit.training.mindspeed_mm.convert DiTConverter pt_to_mm --source DiT-XL-2-256x256.pt ...

That is ``mm-convert`` itself with one class more; the host has no other way to learn of a converter.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from checkpoint.common.converter import Commandable
from checkpoint.convert_cli import main
from safetensors.numpy import load_file, save_file

from mindspeed_mm_dit.checkpoint.diffusers_names import from_diffusers, to_diffusers
from mindspeed_mm_dit.checkpoint.store import TRACKER, read_facts
from mindspeed_mm_dit.checkpoint.weights import Arrays, read_weights
from mindspeed_mm_dit.configs.model import DiTConfig, load_model_config, model_config_from_mapping
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import CheckpointError, UserError
from mindspeed_mm_dit.models.positions import sincos_positions_2d

DIFFUSERS_FILE = "diffusion_pytorch_model.safetensors"


class DiTConverter(Commandable):  # type: ignore[misc]
    """DiT weights: published .pt or a diffusers folder <-> MindSpeed-MM's torch_dcp."""

    @staticmethod
    def pt_to_mm(source: Path, save_dir: Path) -> None:
        """Convert a .pt, .safetensors or checkpoint folder to a release that --load starts from.

        Args:
            source: weights under the published names
            save_dir: folder for --load
        """
        _write_release(read_weights(source), save_dir)

    @staticmethod
    def hf_to_mm(source: Path, save_dir: Path) -> None:
        """Convert a diffusers DiTTransformer2DModel to a release that --load starts from.

        Args:
            source: folder with config.json and diffusion_pytorch_model.safetensors
            save_dir: folder for --load
        """
        weights = from_diffusers(load_file(source / DIFFUSERS_FILE))
        config = read_json(source / "config.json", "--source")
        side = config["sample_size"] // config["patch_size"]
        width = weights["x_embedder.proj.weight"].shape[0]
        _write_release({"pos_embed": sincos_positions_2d(width, side)[None], **weights}, save_dir)

    @staticmethod
    def mm_to_pt(source: Path, target: Path, ema: bool = True) -> None:
        """Convert a checkpoint of either host to a .pt under the published names.

        Args:
            source: folder of one checkpoint, e.g. iter_0001000
            target: file to write
            ema: the moving average rather than the weights, where there is one
        """
        weights = {name: torch.from_numpy(value) for name, value in read_weights(source, ema).items()}
        torch.save(weights, target)

    @staticmethod
    def mm_to_hf(source: Path, save_dir: Path, ema: bool = True, model_json: Path | None = None) -> None:
        """Convert a checkpoint of either host to a diffusers DiTTransformer2DModel.

        Args:
            source: folder of one checkpoint, e.g. iter_0001000
            save_dir: folder to write
            ema: the moving average rather than the weights, where there is one
            model_json: model.json of the run; not needed where the checkpoint remembers it
        """
        config = _predictor_config(source, model_json)
        save_dir.mkdir(parents=True, exist_ok=True)
        save_file(to_diffusers(read_weights(source, ema)), save_dir / DIFFUSERS_FILE, {"format": "pt"})
        (save_dir / "config.json").write_text(json.dumps(_diffusers_config(config), indent=2) + "\n", encoding="utf-8")


def _write_release(weights: Arrays, save_dir: Path) -> None:
    tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    state = {"model": tensors, "checkpoint_version": 3.0}
    dcp.save(state, checkpoint_id=save_dir / "release", no_dist=True)
    (save_dir / TRACKER).write_text("release", encoding="utf-8")


def _predictor_config(source: Path, model_json: Path | None) -> DiTConfig:
    if model_json is not None:
        return load_model_config(model_json).predictor
    facts = read_facts(source)
    if "model" not in facts:
        raise CheckpointError(str(source), "does not say what model it belongs to", "name its --model_json")
    return model_config_from_mapping(facts["model"], f"{source}/run.json: model").predictor


def _diffusers_config(config: DiTConfig) -> dict[str, object]:
    return {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": config.num_heads,
        "attention_head_dim": config.hidden_size // config.num_heads,
        "in_channels": config.in_channels,
        "out_channels": config.out_channels,
        "num_layers": config.num_layers,
        "sample_size": config.input_size,
        "patch_size": config.patch_size,
        "num_embeds_ada_norm": config.num_classes,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_zero",
        "norm_elementwise_affine": False,
    }


__all__ = ["DiTConverter", "main"]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(str(error)) from None

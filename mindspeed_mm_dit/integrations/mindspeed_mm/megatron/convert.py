"""Convert published and diffusers DiT weights to MindSpeed-MM's format and back, as a converter of its ``mm-convert``.

    python -m mindspeed_mm_dit.integrations.mindspeed_mm.megatron.convert DiTConverter pt_to_mm --source ...

This runs ``mm-convert`` itself with one more class; the host has no other way to register a converter.
"""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint.common.converter import Commandable
from checkpoint.convert_cli import main as mm_convert

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.formats import FORMATS, StorageSupport, format_of_source, read_weights
from mindspeed_mm_dit.checkpoint.state import Arrays, State
from mindspeed_mm_dit.checkpoint.store import TRACKER, find_checkpoint, read_facts
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import RELEASE


class DiTConverter(Commandable):  # type: ignore[misc]
    """DiT weights: published .pt or a diffusers folder <-> MindSpeed-MM's torch_dcp."""

    @staticmethod
    def pt_to_mm(source: Path, save_dir: Path) -> None:
        """Convert a .pt, .safetensors or checkpoint folder to a release that --load starts from.

        Args:
            source: weights under the published names
            save_dir: folder for --load
        """
        DiTConverter.hf_to_dcp(source, save_dir)

    @staticmethod
    def hf_to_mm(source: Path, save_dir: Path) -> None:
        """Convert a diffusers DiTTransformer2DModel to a release that --load starts from.

        Args:
            source: folder with config.json and diffusion_pytorch_model.safetensors
            save_dir: folder for --load
        """
        DiTConverter.hf_to_dcp(source, save_dir)

    @staticmethod
    def hf_to_dcp(hf_dir: Path, dcp_dir: Path) -> None:
        """Convert weights in any format that mm-dit convert reads to a release that the native engine can load.

        Args:
            hf_dir: a diffusers folder, a file, or a checkpoint
            dcp_dir: folder for training.load
        """
        tensors = {name: torch.from_numpy(value.copy()) for name, value in read_source(hf_dir).items()}
        torch_dcp.write({"model": tensors, "checkpoint_version": 3.0}, dcp_dir / RELEASE)
        (dcp_dir / TRACKER).write_text(RELEASE, encoding="utf-8")

    @staticmethod
    def dcp_to_hf(load_dir: Path, save_dir: Path, ema: bool = True, model_json: Path | None = None) -> None:
        """Convert a checkpoint of the native engine to a diffusers DiTTransformer2DModel.

        Args:
            load_dir: folder of one checkpoint, e.g. iter_0001000
            save_dir: folder to write
            ema: the EMA rather than the weights
            model_json: model.json of the run; not needed if the checkpoint contains it
        """
        DiTConverter.mm_to_hf(load_dir, save_dir, ema, model_json)

    @staticmethod
    def merge_lora_to_base(source: Path, lora: Path, target: Path, strength: float = 1.0) -> None:
        """Merge adapters into the weights of a base, both in any format, and write the result.

        Args:
            source: the base
            lora: adapters, of a run or from a file
            target: file to write, .pt or .safetensors
            strength: factor of the adapters
        """
        convert(source, target, loras=[f"{lora}:{strength}"])

    @staticmethod
    def mm_to_pt(source: Path, target: Path, ema: bool = True) -> None:
        """Convert a checkpoint of either host to a .pt under the published names.

        Args:
            source: folder of one checkpoint, e.g. iter_0001000
            target: file to write
            ema: the EMA rather than the weights, if there is one
        """
        torch.save({name: torch.from_numpy(value) for name, value in read_weights(source, ema).items()}, target)

    @staticmethod
    def mm_to_hf(source: Path, save_dir: Path, ema: bool = True, model_json: Path | None = None) -> None:
        """Convert a checkpoint of either host to a diffusers DiTTransformer2DModel.

        Args:
            source: folder of one checkpoint, e.g. iter_0001000
            save_dir: folder to write
            ema: the EMA rather than the weights, if there is one
            model_json: model.json of the run; not needed if the checkpoint contains it
        """
        facts = {"model": read_json(model_json, "--model_json")} if model_json else read_facts(source)
        save_dir.mkdir(parents=True, exist_ok=True)
        diffusers_folder.write(save_dir, State({"model": read_weights(source, ema)}, facts=facts))


def read_source(path: Path) -> Arrays:
    """Return weights of any format by their published names; the EMA if there is one."""
    checkpoint = find_checkpoint(path) if path.is_dir() else path
    kind = FORMATS[format_of_source(checkpoint)]
    return read_weights(checkpoint) if kind.storage is StorageSupport.TRAINING else kind.read(checkpoint).weights


def main() -> None:
    """Run ``mm-convert``, which finds our converter among the subclasses of its base."""
    try:
        mm_convert()
    except UserError as error:
        raise SystemExit(error.formatted) from None


if __name__ == "__main__":
    main()

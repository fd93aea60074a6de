"""What Megatron's ``args.mm`` holds: the parsed config files, and what a checkpoint keeps of what they name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.model import AutoencoderKLConfig, ModelConfig
from mindspeed_mm_dit.configs.precision import Precision
from mindspeed_mm_dit.data.folder import ImageIndex
from mindspeed_mm_dit.data.latents import digest_of_files


@dataclass(frozen=True)
class MultiModalArguments:
    """What Megatron's ``args.mm`` holds: the parsed config files."""

    model: ModelConfig
    data: DataConfig
    fsdp2: Fsdp2Config | None
    """None without --use-torch-fsdp2."""
    model_json: dict[str, Any]
    """model.json with all that it leaves to be looked up spelled out; it is kept in every checkpoint."""
    precision: Precision | None = None
    """What a step computes in; None: MindSpeed-MM decides it, without FSDP2."""
    classes: tuple[str, ...] = ()
    """Name of each label, kept in every checkpoint."""
    pictures: str = ""
    """``ImageIndex.pictures``, kept in every checkpoint."""
    autoencoder: str = ""
    """Which autoencoder it is: a digest of its files; kept in every checkpoint."""

    @property
    def encodes_images(self) -> bool:
        """Whether images are encoded as they come, rather than read from a latent cache."""
        return self.data.dataset_param.latents is None


def with_facts(mm: MultiModalArguments, images: ImageIndex) -> MultiModalArguments:
    """Return ``mm`` with what every checkpoint keeps of the images and the autoencoder."""
    ae = mm.model.ae
    autoencoder = f"files {digest_of_files(ae.from_pretrained)[:12]}" if isinstance(ae, AutoencoderKLConfig) else ""
    return replace(mm, classes=images.classes, pictures=images.pictures, autoencoder=autoencoder)

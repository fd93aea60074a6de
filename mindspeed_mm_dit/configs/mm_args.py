"""What Megatron's ``args.mm`` holds: the parsed config files, and what a checkpoint keeps of what they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm_dit.configs.data import DataConfig
from mindspeed_mm_dit.configs.fsdp2 import Fsdp2Config
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.precision import Precision


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
    data_digest: str = ""
    """How many samples there are, and a digest of them; kept in every checkpoint."""
    autoencoder: str = ""
    """Which autoencoder it is: a digest of its files; kept in every checkpoint."""
    valid_data: DataConfig | None = None
    """What to validate on, where --mm-valid-data names it; else ``data`` says what is held out."""
    base: str = ""
    """Which weights adapters stand beside: a digest of them; kept in every checkpoint. Empty without adapters."""

    @property
    def encodes(self) -> bool:
        """Whether images, or clips and captions, are encoded as they come, rather than read from a cache."""
        return self.data.dataset_param.cache is None


def with_facts(mm: MultiModalArguments, data: Mapping[str, Any]) -> MultiModalArguments:
    """Return ``mm`` with what every checkpoint keeps of the data (``DataSet.facts``) and the autoencoder."""
    digest = mm.model.ae.digest()
    autoencoder = f"files {digest[:12]}" if digest else ""
    return replace(mm, **data, autoencoder=autoencoder)

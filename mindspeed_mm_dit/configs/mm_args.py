"""Megatron's ``args.mm``: the parsed config files, and facts about the files they name, for checkpoints."""

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
    """Megatron's ``args.mm``: the parsed config files."""

    model: ModelConfig
    data: DataConfig
    fsdp2: Fsdp2Config | None
    """None without --use-torch-fsdp2."""
    model_json: dict[str, Any]
    """model.json with preset and autoencoder settings filled in; saved in every checkpoint."""
    precision: Precision | None = None
    """Precision of a step; None: MindSpeed-MM decides it, without FSDP2."""
    classes: tuple[str, ...] = ()
    """Name of each label; saved in every checkpoint."""
    data_digest: str = ""
    """Number of samples and a digest of them; saved in every checkpoint."""
    autoencoder: str = ""
    """Digest of the autoencoder's files; saved in every checkpoint."""
    valid_data: DataConfig | None = None
    """Validation data, if --mm-valid-data names it; otherwise ``data`` decides what is held out."""
    saved_classes: tuple[str, ...] = ()
    """Class names in the checkpoint of --load; the same set of names keeps its numbers."""
    base: str = ""
    """Digest of the weights that adapters belong to; saved in every checkpoint. Empty without adapters."""
    captions: tuple[str, ...] = ()
    """A few captions of the data, as example prompts; saved in every checkpoint."""
    words: tuple[str, ...] = ()
    """All words of the captions, if the model knows no others; saved in every checkpoint."""

    @property
    def encodes(self) -> bool:
        """Whether images, or clips and captions, are encoded during training, rather than read from a cache."""
        return self.data.dataset_param.cache is None


def with_facts(mm: MultiModalArguments, data: Mapping[str, Any]) -> MultiModalArguments:
    """Return ``mm`` with the facts about data (``DataSet.facts``) and autoencoder that every checkpoint saves."""
    digest = mm.model.ae.digest()
    autoencoder = f"files {digest[:12]}" if digest else ""
    return replace(mm, **data, autoencoder=autoencoder)

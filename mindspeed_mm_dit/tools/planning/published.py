"""Published weights that ``mm-dit get`` knows by name, and their repositories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.registry import Registry


@dataclass(frozen=True)
class Published:
    """Third-party weights. Size, licence and digests come from the hub at download time."""

    summary: str
    """Its line in the list."""
    repos: Mapping[str, str]
    """Hub (``hubs.py``) -> ``owner/name`` there, or the address of a file."""
    files: tuple[str, ...] = ("*",)
    """Patterns of the files to download."""
    needs: tuple[str, ...] = ()
    """Names of the models to download with it."""
    sections: Mapping[str, Any] = field(default_factory=dict)
    """Sections of model.json that cannot be read from the files (``mm-dit init --from``)."""
    draws: str = ""
    """Sampling flags of mm-dit sample that its authors recommend."""

    def folder(self, root: Path) -> Path:
        """Return its folder below ``root``: the first that exists, as hubs use different names."""
        folders = [root / folder_name(repo) for repo in self.repos.values()]
        return next((folder for folder in folders if folder.is_dir()), folders[0])


def folder_name(repo: str) -> str:
    """Return the folder name for ``owner/name``; empty for a URL, whose file gets no folder."""
    return "" if "://" in repo else repo.rpartition("/")[2]


PUBLISHED = Registry[Published]("published_weights")


def _on(repo: str, copy: str, summary: str, *more: Any, **named: Any) -> Published:
    """Return the record of ``repo`` on the Hugging Face hub, with its ``copy`` on ModelScope unless that is empty."""
    return Published(summary, {"huggingface": repo} | ({"modelscope": copy} if copy else {}), *more, **named)


_DIT, _VAE = ("transformer/*", "model_index.json", "*.pt"), ("sd-vae-ft-ema",)
_SD, _WAN = "stable-diffusion-v1-5/stable-diffusion-v1-5", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
_SD35 = "stable-diffusion-3.5-medium"
_WAN22 = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
_PIPELINE = ("transformer/*", "vae/*", "text_encoder*", "tokenizer*", "model_index.json")
_FLOW = {"diffusion": {"model_id": "flow_matching", "path": "linear", "prediction_type": "velocity"}}
# fmt: off
DIT_XL_2 = _on("facebook/DiT-XL-2-256", "AI-ModelScope/DiT-XL-2-256x256", "DiT of ImageNet, 256 pixels", _DIT, _VAE)
DIT_XL_2_512 = _on("facebook/DiT-XL-2-512", "AI-ModelScope/DiT-XL-2-512x512", "the same for 512 pixels", _DIT, _VAE)
SIT_XL_2 = _on("nyu-visionx/SiT-collections", "", "SiT of ImageNet, 256 pixels", ("SiT-XL-2-256.pt",), _VAE, _FLOW)
SD_VAE_FT_EMA = _on("stabilityai/sd-vae-ft-ema", "AI-ModelScope/sd-vae-ft-ema", "the autoencoder of DiT and SiT")
SD_VAE_FT_MSE = _on("stabilityai/sd-vae-ft-mse", "AI-ModelScope/sd-vae-ft-mse", "the same, for smoother images")
WAN2_1_1_3B = _on(_WAN, _WAN, "Wan 2.1, text to video, with its autoencoder and text encoder", _PIPELINE)
WAN2_2_5B = _on(_WAN22, _WAN22, "Wan 2.2, video from text or image, 5 B", _PIPELINE)
FLUX_1_DEV = _on("black-forest-labs/FLUX.1-dev", "AI-ModelScope/FLUX.1-dev", "FLUX.1, 12 B", _PIPELINE,
                 draws="--guidance 3.5")
FLUX_2_DEV = _on("black-forest-labs/FLUX.2-dev", "", "FLUX.2, 32 B", _PIPELINE)
FLUX_2_KLEIN_4B = _on("black-forest-labs/FLUX.2-klein-base-4B", "", "FLUX.2, 4 B, not distilled", _PIPELINE)
SD3_5_MEDIUM = _on(f"stabilityai/{_SD35}", f"AI-ModelScope/{_SD35}", "Stable Diffusion 3.5, 2.2 B", _PIPELINE,
                   draws="--cfg-scale 4.5")
QWEN_IMAGE = _on("Qwen/Qwen-Image", "Qwen/Qwen-Image", "Qwen-Image, 20 B", _PIPELINE,
                 draws="--cfg-scale 4 --cfg-rescale token")
Z_IMAGE = _on("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image", "Z-Image, 6 B", _PIPELINE, draws="--cfg-scale 5")
UMT5 = _on(_WAN, _WAN, "the text encoder of Wan alone", ("text_encoder/*", "tokenizer/*"))
CLIP = _on(_SD, "AI-ModelScope/stable-diffusion-v1-5", "text encoder and autoencoder of Stable Diffusion 1.5",
           ("text_encoder/*", "tokenizer/*", "vae/*"))
MINILM = _on("sentence-transformers/all-MiniLM-L6-v2", "AI-ModelScope/all-MiniLM-L6-v2", "a small text encoder")
# fmt: on
INCEPTION = Published(
    "the network behind FID: mm-dit evaluate --inception",
    {
        "address": "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/"
        "weights-inception-2015-12-05-6726825d.pth"
    },
)

"""The families of diffusers' image transformers: how files of reference values and pipelines of each differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np

from mindspeed_mm_dit.configs.flow_matching import FlowMatchingConfig, mu_of
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.models.joint import pack
from mindspeed_mm_dit.models.layers import as_tokens
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.published_times import flux2_mu
from mindspeed_mm_dit.objectives.guidance import Guidance
from mindspeed_mm_dit.tools.verify.reference.file import ReferenceArrays, Tensor
from mindspeed_mm_dit.tools.verify.table import NotThere


class Family:
    """What differs between the families; each one is a subclass."""

    data_time: ClassVar[Literal[0, 1]] = 0
    latents = "latents"
    """Key of the latents that the network gets."""
    schedule: ClassVar[Mapping[str, Any]] = {}
    """Settings of the sampling times."""

    def __init__(self, arrays: ReferenceArrays, config: JointConfig) -> None:
        self.arrays, self.config = arrays, config

    def condition(self, number: int, negative: str = "", guidance: str = "guidance") -> list[Tensor]:
        """Return the conditions of the first ``number`` samples; negative: "negative_" for those to push away from."""
        return [self.arrays.tensor(f"{negative}{name}")[:number] for name in ("text", "pooled")]

    def embedded(self, key: str, number: int) -> list[Tensor]:
        """Return the strength of guidance under ``key`` for ``number`` samples, if the network takes one."""
        if not self.config.guidance_embeds:  # type: ignore[attr-defined]
            return []
        return [ops.tensor(np.broadcast_to(self.arrays[key], (number,)).astype(np.float32))]

    def time(self, t: np.ndarray) -> np.ndarray:
        """Return the network's time for a ``timestep`` of the file."""
        return t

    def images(self, x: Tensor) -> Tensor:
        """Return latents of the file as the network takes them, (B, C, H, W)."""
        return x

    def like_theirs(self, output: Tensor) -> Tensor:
        """Return a network's output in the shape of diffusers."""
        return output

    def guidance(self, variant: str) -> tuple[Guidance, str]:
        """Return the guidance of a sampling loop, and the key of the strength that the network gets."""
        return Guidance(), "sample/guidance"

    def flow(self, variant: str = "") -> FlowMatching:
        """Return the objective, with the times of a sampling loop."""
        return FlowMatching(FlowMatchingConfig(data_time=self.data_time, **self.schedule))

    def mu(self, tokens: int, steps: int) -> float:
        """Return the logarithm of the time shift of a sampling loop."""
        raise NotThere("")


class FluxFamily(Family):
    """FLUX.1."""

    @property
    def schedule(self) -> Mapping[str, Any]:  # type: ignore[override]
        """FLUX.1-schnell has evenly spaced times."""
        return {"sample_schedule": "flux"} if self.config.guidance_embeds else {}  # type: ignore[attr-defined]

    def condition(self, number: int, negative: str = "", guidance: str = "guidance") -> list[Tensor]:
        return [*super().condition(number, negative), *self.embedded(guidance, number)]

    def like_theirs(self, output: Tensor) -> Tensor:
        return pack(output)

    def guidance(self, variant: str) -> tuple[Guidance, str]:
        return Guidance(float(variant.removeprefix("true_cfg") or 1)), "sample/guidance"

    def mu(self, tokens: int, steps: int) -> float:
        return mu_of("flux", tokens)


class SD3Family(Family):
    """Stable Diffusion 3."""

    def time(self, t: np.ndarray) -> np.ndarray:
        return t / 1000

    def guidance(self, variant: str) -> tuple[Guidance, str]:
        return Guidance(float(self.arrays["sample/guidance"])), ""

    def flow(self, variant: str = "") -> FlowMatching:
        kind = "sd3_dynamic" if variant == "dynamic" else "sd3"
        return FlowMatching(FlowMatchingConfig(data_time=0, sample_schedule=kind, sample_shift=3.0))


class QwenImageFamily(Family):
    """Qwen-Image, whose latents have an axis of frames in files."""

    schedule: ClassVar[Mapping[str, Any]] = {"sample_schedule": "qwen_image"}

    def condition(self, number: int, negative: str = "", guidance: str = "guidance") -> list[Tensor]:
        text, mask = (self.arrays[f"{negative}{name}"][:number] for name in ("text", "mask"))
        padding = max(0, self.arrays["text"].shape[1] - text.shape[1])
        text, mask = np.pad(text, ((0, 0), (0, padding), (0, 0))), np.pad(mask, ((0, 0), (0, padding)))
        return [ops.tensor(text.astype(np.float32)), ops.tensor(mask > 0)]

    def images(self, x: Tensor) -> Tensor:
        return x[:, :, 0]

    def like_theirs(self, output: Tensor) -> Tensor:
        return pack(output)

    def guidance(self, variant: str) -> tuple[Guidance, str]:
        return Guidance(1.0 if variant == "cfg1" else float(self.arrays["sample/true_cfg_scale"]), rescale="token"), ""

    def mu(self, tokens: int, steps: int) -> float:
        return mu_of("qwen_image", tokens)


class ZImageFamily(Family):
    """Z-Image, whose time and velocity point to the data."""

    data_time = 1
    schedule: ClassVar[Mapping[str, Any]] = {"sample_shift": 3.0}

    def condition(self, number: int, negative: str = "", guidance: str = "guidance") -> list[Tensor]:
        names = [f"{start}text{index}" for start in ("", "negative_") for index in range(number)]
        most = max(len(self.arrays[name]) for name in names if name in self.arrays)
        texts = [self.arrays[f"{negative}text{index}"] for index in range(number)]
        padded = [np.pad(text, ((0, most - len(text)), (0, 0))) for text in texts]
        return [ops.tensor(np.stack(padded).astype(np.float32))]

    def guidance(self, variant: str) -> tuple[Guidance, str]:
        strength = 0.0 if variant == "unguided" else float(self.arrays["sample/guidance"])
        return Guidance(1 + strength, rescale="sample" if variant == "normalised" else None), ""


class Flux2Family(Family):
    """FLUX.2, whose latents are cut into patches before the network."""

    latents = "patchified"
    schedule: ClassVar[Mapping[str, Any]] = {"sample_schedule": "flux2"}

    def condition(self, number: int, negative: str = "", guidance: str = "guidance") -> list[Tensor]:
        return [self.arrays.tensor("text")[:number], *self.embedded(guidance, number)]

    def like_theirs(self, output: Tensor) -> Tensor:
        return as_tokens(output)

    def mu(self, tokens: int, steps: int) -> float:
        return flux2_mu(tokens, steps)


FAMILIES: Mapping[str, type[Family]] = {
    "flux": FluxFamily, "sd3": SD3Family, "qwen_image": QwenImageFamily, "z_image": ZImageFamily, "flux2": Flux2Family,
}  # fmt: skip

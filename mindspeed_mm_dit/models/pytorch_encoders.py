"""Encoders that need PyTorch: autoencoders of diffusers, and encoders of text and images of transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mindspeed_mm_dit.configs.autoencoder import PretrainedAutoencoderConfig, WanVAEConfig
from mindspeed_mm_dit.configs.files import check_model_folder, error_text
from mindspeed_mm_dit.configs.teacher import TransformersTeacherConfig, TransformersVisionConfig
from mindspeed_mm_dit.configs.text_encoder import TransformersTextConfig
from mindspeed_mm_dit.errors import CheckpointError, PlatformError
from mindspeed_mm_dit.framework.pytorch import runtime
from mindspeed_mm_dit.models.autoencoder import Autoencoder
from mindspeed_mm_dit.models.pretrained import check_complete, load_diffusers, quiet, weights_of_transformers
from mindspeed_mm_dit.models.text_encoder import EncodedText

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class DiffusersAutoencoder(Autoencoder):
    """An autoencoder of diffusers, with or without a posterior."""

    memory_format = torch.preserve_format
    """Memory format of images while they are encoded."""

    def __init__(self, config: PretrainedAutoencoderConfig) -> None:
        import diffusers

        super().__init__(config)
        self._dtype = _DTYPES[config.dtype]
        loaded = self._load(config)
        with quiet(diffusers.utils.logging):
            self.module = runtime.prepare_frozen(loaded, config.dtype).to(memory_format=self.memory_format)

    def _load(self, config: Any) -> Any:
        return load_diffusers(config)

    @torch.no_grad()
    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        with self._without_autocast():
            encoded = self.module.encode(images.to(self._dtype, memory_format=self.memory_format), return_dict=False)[0]
        if isinstance(encoded, Tensor):
            return encoded.float(), None
        return encoded.mean.float().contiguous(), encoded.std.float().contiguous()

    @torch.no_grad()
    def decode(self, scaled_latents: Tensor) -> Tensor:
        latents = self.raw(scaled_latents.float()).to(self._dtype)
        with self._without_autocast():
            return self._decoded(latents).float()

    def _decoded(self, latents: Tensor) -> Tensor:
        return self.module.decode(latents).sample

    def _without_autocast(self) -> torch.autocast:
        """Turn autocast off, so that ``ae.dtype`` applies inside a bf16 training step too."""
        return torch.autocast(runtime.device_type(), enabled=False)


class AutoencoderKL(DiffusersAutoencoder):
    """The autoencoder of latent diffusion; its weights may also be a single file, as its authors published them."""

    memory_format = torch.channels_last

    def _load(self, config: Any) -> Any:
        import diffusers

        config.check_files()
        path = Path(config.from_pretrained)
        try:
            with quiet(diffusers.utils.logging):
                if path.is_dir():
                    return diffusers.AutoencoderKL.from_pretrained(path, local_files_only=True, trust_remote_code=False)
                return diffusers.AutoencoderKL.from_single_file(
                    str(path), config=str(path.parent), local_files_only=True
                )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"ae.from_pretrained = {path} cannot be loaded by diffusers: {error_text(error)}."
            ) from error


class AutoencoderKLWan(DiffusersAutoencoder):
    """Wan's video autoencoder; raises ConfigError if its downsampling does not fit F, H or W exactly."""

    def __init__(self, config: WanVAEConfig) -> None:
        super().__init__(config)
        if config.enable_tiling:
            self.module.enable_tiling(**dataclasses.asdict(config.tiling()))

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        self.config.latent_shape(tuple(images.shape[2:]))
        return super().moments(images)


class AutoencoderKLQwenImage(AutoencoderKLWan):
    """Qwen-Image's autoencoder: an image is a video of one frame."""

    def moments(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        mean, std = super().moments(images[:, :, None])  # (B, C, 1, h, w) each
        return mean[:, :, 0], None if std is None else std[:, :, 0]

    def _decoded(self, latents: Tensor) -> Tensor:
        return super()._decoded(latents[:, :, None])[:, :, 0]


_OUTSIDE_VISION = ("text_model.", "logit_")
"""Prefixes of weights outside the vision half, if a folder holds both halves."""
LENGTH_MULTIPLE = 32
"""Captions are cut to multiples of this many tokens: devices like these, and kernels see few sizes."""
ModelFn = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""(module, ids (B, L), mask (B, L)) -> states (B, L, D), pooled (B, P) or None."""


class TransformersEncoder:
    """(ids, mask) -> states and pooled vector; its module is not a submodule of anything trained.

    module: name of its class in transformers; encode: calls the module and picks its outputs; optional: prefixes of
    weights that the files may have besides the module's; part: the submodule that reads text; settings: arguments of
    its constructor.
    """

    def __init__(
        self,
        config: TransformersTextConfig,
        module: str,
        encode: ModelFn,
        optional: tuple[str, ...] = (),
        part: str = "",
        **settings: bool,
    ) -> None:
        self.config, self._encode = config, encode
        loaded = _load(config, "text_encoder", module, optional, settings)
        self.module = runtime.prepare_frozen(loaded.get_submodule(part), config.dtype)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that it can read."""
        return int(self.module.config.vocab_size)

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor) -> EncodedText:
        """Encode ids and mask (B, L) int64. Padding is not attended to, unless ``encode`` ignores the mask."""
        length = self._longest(mask) if self.config.cut_padding else mask.shape[1]
        with torch.autocast(runtime.device_type(), enabled=False):  # ``dtype`` applies inside a bf16 step too
            states, pooled = self._encode(self.module, ids[:, :length], mask[:, :length])
        states = torch.nn.functional.pad(states.float(), (0, 0, 0, mask.shape[1] - length))  # (B, L, D)
        if self.config.zero_padding:
            states = states * mask[:, :, None]
        cut = self.config.cut_tokens
        return EncodedText(states[:, cut:], mask[:, cut:], None if pooled is None else pooled.float())

    @staticmethod
    def _longest(mask: Tensor) -> int:
        """Return the length of the longest caption of ``mask`` (B, L), rounded up to a multiple of LENGTH_MULTIPLE."""
        last = int(mask.any(0).nonzero().max())
        return min(mask.shape[1], (last // LENGTH_MULTIPLE + 1) * LENGTH_MULTIPLE)


class TransformersVision:
    """Base of frozen image networks, which take square images of ``size`` pixels a side."""

    def __init__(self, config: TransformersVisionConfig, size: int) -> None:
        self.module = runtime.prepare_frozen(
            _load(config, config.section, config.module, _OUTSIDE_VISION, {}), config.dtype
        )
        self._size = size
        mean, std = (torch.tensor(values)[:, None, None] for values in config.pixels)  # (3, 1, 1) each
        self._mean, self._std = runtime.to_runtime_device(mean), runtime.to_runtime_device(std)

    @torch.no_grad()
    def _forward(self, images: Tensor, **options: bool) -> Any:
        """Return the network's output for images (B, 3 or 1, H, W) float32 in [-1, 1]."""
        with torch.autocast(runtime.device_type(), enabled=False):  # ``dtype`` applies inside a bf16 step too
            pixels = ((images.float() + 1) / 2 - self._mean) / self._std  # (B, 3, H, W)
            pixels = torch.nn.functional.interpolate(pixels, (self._size, self._size), mode="bicubic")
            return self.module(pixels.to(next(self.module.parameters()).dtype), **options)


class CLIPVision(TransformersVision):
    """(images) -> CLIP's features as Wan 2.1 takes them: states before the last layer, of class token and patches."""

    def __init__(self, config: TransformersVisionConfig) -> None:
        super().__init__(config, config.number("image_size"))

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3 or 1, H, W) float32 in [-1, 1] -> (B, 1 + patches, width) float32."""
        features: Tensor = self._forward(images, output_hidden_states=True).hidden_states[-2]
        return features.float()


class TransformersTeacher(TransformersVision):
    """(images) -> features of their patches; its module is not a submodule of anything trained.

    Images are resized so that a row has ``side`` patches (REPA: 16 patches of 14 pixels).
    """

    def __init__(self, config: TransformersTeacherConfig, side: int) -> None:
        super().__init__(config, side * config.number("patch_size"))
        self._side = side

    def __call__(self, images: Tensor) -> Tensor:
        """Images (B, 3 or 1, H, W) float32 in [-1, 1] -> last states of the patches, (B, side * side, width)."""
        states = self._forward(images, **self._interpolation_options).last_hidden_state  # (B, extra + N, D)
        return states[:, -(self._side**2) :].float()  # (B, N, D), without class and register tokens

    @property
    def _interpolation_options(self) -> dict[str, bool]:
        """Argument that interpolates positions to another size than in training, for models that need one."""
        return {"interpolate_pos_encoding": True} if self.module.config.model_type.startswith("siglip") else {}


def _load(
    config: TransformersTextConfig | TransformersVisionConfig,
    section: str,
    module: str,
    optional: tuple[str, ...],
    settings: dict[str, bool],
) -> Any:
    what = f"{section}.from_pretrained = {config.from_pretrained}"
    check_model_folder(f"{section}.from_pretrained", config.folder)
    try:
        import transformers
    except ImportError as error:
        raise PlatformError(
            f"{what} needs transformers, which cannot be used here: {error_text(error)}. Install the packages of "
            "requirements/video.txt."
        ) from None
    variant = weights_of_transformers(f"{section}.from_pretrained", config.folder).variant
    try:
        with quiet(transformers.utils.logging):
            kind: Any = getattr(transformers, module)
            loaded: Any = kind.from_pretrained(
                config.folder,
                variant=variant,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                attn_implementation="sdpa" if kind._supports_sdpa else "eager",
                dtype=_DTYPES[config.dtype],
                **settings,
            )
    except Exception as error:  # (damaged files can raise anything)
        raise CheckpointError(
            f"{what} cannot be loaded by transformers: {error_text(error)}. Copy the folder again."
        ) from error
    check_complete(what, loaded[1], optional)
    return loaded[0]

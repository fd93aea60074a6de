"""Weights from elsewhere: the network that a file describes, its form in diffusers, and what changes to start from it.

Each config class of section ``predictor`` names its adapter. No framework is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import numpy as np

from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.predictor import PredictorConfig, Shape
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.registry import import_object

QUANTIZATION = "quantization_config"
"""Key of diffusers' config.json for weights that are stored in few bits."""
Shapes = Mapping[str, Shape]
"""Shape of each tensor of a file, by name."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of another network of the same kind, to initialise the parameter of the same name in this one."""

    value: np.ndarray
    there: PredictorConfig
    """Config of the other network."""
    shape: Shape
    """Shape of the parameter here."""
    labels: Mapping[int, int]
    """Label here -> label there, for the classes that both have, including the unconditional class."""
    draw: Callable[[], np.ndarray]
    """Returns a random initial value, float32."""


@dataclass(frozen=True)
class AdaptedTensor:
    """The initial value of a parameter when fine-tuning from another network's weights."""

    value: np.ndarray
    how: str = ""
    """How the other network's tensor was changed, or why the value is new; empty: it was copied."""


def weight_converter_of(config: PredictorConfig | type[PredictorConfig]) -> WeightConverter:
    """Return the adapter of a config, or of a config class."""
    kind = config if isinstance(config, type) else type(config)
    adapter: type[WeightConverter] = import_object(kind.adapter, f"the weight adapter of {kind.__name__}")
    return adapter(kind)


@dataclass(frozen=True)
class WeightConverter:
    """Adapts weights to one kind of network: by default, only weights of the same shapes."""

    kind: Any
    """Config class of section ``predictor``."""

    def adaptable(self, here: PredictorConfig) -> tuple[str, ...]:
        """Return the settings that may differ in :meth:`adapt_weight`."""
        return ("class_dropout_prob",)

    def adapt_weight(self, here: PredictorConfig, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Return the initial value of parameter ``name``, adapted from another network's; None if impossible."""
        return AdaptedTensor(source.value) if source.value.shape == source.shape else None

    def is_optional(self, name: str) -> bool:
        """Return whether another network of this kind may lack the parameter ``name``.

        It is then randomly initialised here, or dropped.
        """
        return False

    def of_shapes(self, shapes: Shapes) -> PredictorConfig | None:
        """Return the architecture that the tensors of a file imply, or None if they are another predictor's.

        Settings that change no shape, such as the number of heads, get a value that fits. A file without a description
        (run.json, model.json) can be converted only if this returns an architecture.
        """
        return None

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for the config.json of a diffusers folder. Unknown keys stay, to be refused.

        ``quantization_config`` does not: each tensor shows how it is stored.

        Raises ConfigError for a value that no network here has.
        """
        return {key: value for key, value in section.items() if not key.startswith("_") and key != QUANTIZATION}

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        """Return the config.json of a diffusers folder (the inverse of :meth:`of_diffusers`)."""
        ours = (*self.adaptable(config), "model_id")
        settings = {key: value for key, value in asdict(config).items() if key not in ours}
        return {"_class_name": config.diffusers_class, **settings}

    def defaults_for_missing(self, config: Any) -> tuple[str, ...]:
        """Return the keys of diffusers' config.json that change no shape; published values are assumed for them."""
        return ()


def shape_of(shapes: Shapes, name: str, ndim: int) -> Shape:
    """Return the shape of ``name``; raises CheckpointError if it is missing or does not have ``ndim`` axes."""
    if name not in shapes:
        raise CheckpointError(f"SOURCE has no weight {name}, so its architecture is unknown.")
    if len(shapes[name]) != ndim:
        raise CheckpointError(f"SOURCE has weight {name} of shape {tuple(shapes[name])}, but it must have {ndim} axes.")
    return tuple(shapes[name])


def count_of(shapes: Shapes, prefix: str) -> int:
    """Return how many of ``prefix.0``, ``prefix.1``, ... there are, whatever the largest number is."""
    numbers = {name[len(prefix) + 1 :].split(".")[0] for name in shapes if name.startswith(f"{prefix}.")}
    return sum(number.isdecimal() for number in numbers)


def without_fixed(section: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return ``section`` without the keys of ``fixed``; raises ConfigError if one has another value than those."""
    for key, values in fixed.items():
        if key in section and section[key] not in values:
            supported = " or ".join(map(shorten_repr, values))
            raise ConfigError(f"{key} = {shorten_repr(section[key])} is not supported. It must be {supported}.")
    return {key: value for key, value in section.items() if key not in fixed}


class JointAdapter(WeightConverter):
    """Base of the adapters of the transformers with joint attention."""

    identifying: ClassVar[tuple[str, ...]]
    """Tensors that every file of the family has, and no other."""
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Further keys of diffusers' config.json -> the values that are supported; None is diffusers' default."""
    keys: ClassVar[Mapping[str, str]] = {}
    """Key of diffusers' config.json -> key here, where they differ."""
    token_channels: ClassVar[int] = 4
    """Channels of a token in diffusers' config.json for each channel of the latents."""
    first, text_in = "x_embedder.weight", "context_embedder.weight"
    """Layers that read image and text."""
    blocks, query_norm = "transformer_blocks", "attn.norm_q"

    def adaptable(self, here: PredictorConfig) -> tuple[str, ...]:
        changeable = ("guidance", "pooled_encoder", "encoder_dropout_prob")
        return ("text_length", "latent_size", *(name for name in changeable if hasattr(here, name)))

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = without_fixed(super().of_diffusers(section), self.fixed)
        settings = {self.keys.get(key, key): value for key, value in settings.items()}
        return {**settings, "in_channels": settings["in_channels"] // self.token_channels}

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        theirs = {ours: key for key, ours in self.keys.items()}
        settings = {theirs.get(key, key): value for key, value in super().to_diffusers(config).items()}
        fixed = {key: values[0] for key, values in self.fixed.items() if values[0]}
        return {**settings, **fixed, "in_channels": config.in_channels * self.token_channels}

    def defaults_for_missing(self, config: Any) -> tuple[str, ...]:
        return ("axes_dims_rope",) if config.head_dim != self.kind.attention_head_dim else ()

    def of_shapes(self, shapes: Shapes) -> Any:
        """Return the architecture that ``shapes`` imply, with the published proportions of rotary axes."""
        if not all(name in shapes for name in self.identifying):
            return None
        D, channels = shape_of(shapes, self.first, 2)
        (head_dim,) = shape_of(shapes, f"{self.blocks}.0.{self.query_norm}.weight", 1)
        published = self.kind.axes_dims_rope
        axes = [max(2, head_dim * width // sum(published) // 2 * 2) for width in published[:-1]]
        return self.kind(
            num_layers=count_of(shapes, self.blocks),
            num_attention_heads=D // head_dim,
            attention_head_dim=head_dim,
            joint_attention_dim=shape_of(shapes, self.text_in, 2)[1],
            in_channels=channels // (self.kind.patch_size**2),
            axes_dims_rope=(*axes, head_dim - sum(axes)),
            **self.more_settings(shapes, D),
        )

    def more_settings(self, shapes: Shapes, width: int) -> dict[str, Any]:
        """Return the settings of one family that ``shapes`` imply, for tokens of ``width``."""
        return {}


class FluxAdapter(JointAdapter):
    """FLUX.1."""

    identifying = ("single_transformer_blocks.0.proj_mlp.weight",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,), "out_channels": (None,)}

    def more_settings(self, shapes: Shapes, width: int) -> dict[str, Any]:
        embedder = "time_text_embed.{}_embedder.linear_1.weight"
        return {
            "num_single_layers": count_of(shapes, "single_transformer_blocks"),
            "pooled_projection_dim": shape_of(shapes, embedder.format("text"), 2)[1],
            "guidance_embeds": embedder.format("guidance") in shapes,
        }


class Flux2Adapter(JointAdapter):
    """FLUX.2."""

    identifying = ("single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight",)
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (1,), "out_channels": (None,), "eps": (1e-6,)}
    token_channels = 1

    def more_settings(self, shapes: Shapes, width: int) -> dict[str, Any]:
        embedder = "time_guidance_embed.{}_embedder.linear_1.weight"
        return {
            "num_single_layers": count_of(shapes, "single_transformer_blocks"),
            "mlp_ratio": shape_of(shapes, "transformer_blocks.0.ff.linear_out.weight", 2)[1] / width,
            "timestep_guidance_channels": shape_of(shapes, embedder.format("timestep"), 2)[1],
            "guidance_embeds": embedder.format("guidance") in shapes,
        }


class QwenImageAdapter(JointAdapter):
    """Qwen-Image."""

    identifying = ("transformer_blocks.0.txt_mod.1.weight",)
    first, text_in = "img_in.weight", "txt_in.weight"
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "patch_size": (2,),
        "guidance_embeds": (False,),
        "zero_cond_t": (False,),
        "use_layer3d_rope": (False,),
        "use_additional_t_cond": (False,),
        "pooled_projection_dim": (None, 768),
    }

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        return without_fixed(settings, {"out_channels": (settings["in_channels"],)})

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        return super().to_diffusers(config) | {"out_channels": config.in_channels}


class ZImageAdapter(JointAdapter):
    """Z-Image."""

    identifying = ("cap_pad_token",)
    first, text_in = "all_x_embedder.2-1.weight", "cap_embedder.1.weight"
    blocks, query_norm = "layers", "attention.norm_q"
    token_channels = 1
    keys: ClassVar[Mapping[str, str]] = {
        "n_layers": "num_layers",
        "n_refiner_layers": "num_refiner_layers",
        "n_heads": "num_attention_heads",
        "cap_feat_dim": "joint_attention_dim",
        "axes_dims": "axes_dims_rope",
    }
    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "all_patch_size": ([2],),
        "all_f_patch_size": ([1],),
        "norm_eps": (1e-5,),
        "qk_norm": (True,),
        "t_scale": (1000.0,),
        "siglip_feat_dim": (None,),
    }

    def more_settings(self, shapes: Shapes, width: int) -> dict[str, Any]:
        return {"num_refiner_layers": count_of(shapes, "noise_refiner")}

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        heads, width = settings["num_attention_heads"], settings.pop("dim")
        rest = without_fixed(settings, {"n_kv_heads": (heads,), "axes_lens": (settings.get("axes_lens"),)})
        return {**rest, "attention_head_dim": width // heads}

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        settings = super().to_diffusers(config)
        del settings["attention_head_dim"]
        # axes_lens: positions on each axis in diffusers' published tables; ours are computed for as many as needed.
        heads, lengths = config.num_attention_heads, [1536, 512, 512]
        return {**settings, "dim": config.hidden_size, "n_kv_heads": heads, "axes_lens": lengths}


class SD3Adapter(JointAdapter):
    """Stable Diffusion 3 and 3.5."""

    fixed: ClassVar[Mapping[str, tuple[Any, ...]]] = {"patch_size": (2,)}
    token_channels = 1

    def defaults_for_missing(self, config: Any) -> tuple[str, ...]:
        return () if config.qk_norm else ("num_attention_heads", "attention_head_dim")

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        settings = super().of_diffusers(section)
        width = settings.get("num_attention_heads", 0) * settings.get("attention_head_dim", 0)
        repeated = {"out_channels": (settings["in_channels"],), "caption_projection_dim": (width,)}
        table = self.kind.patch_size * settings.get("pos_embed_max_size", 96)
        side = min(settings.get("sample_size", self.kind.sample_size), table)
        return without_fixed({**settings, "latent_size": [side, side]}, repeated)

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        repeated = {"out_channels": config.in_channels, "caption_projection_dim": config.hidden_size}
        return super().to_diffusers(config) | repeated

    def of_shapes(self, shapes: Shapes) -> Any:
        """Return the architecture that ``shapes`` imply, with heads of the published width without QK-norm."""
        if "pos_embed.pos_embed" not in shapes or "transformer_blocks.0.norm1_context.linear.weight" not in shapes:
            return None
        D, channels, *_ = shape_of(shapes, "pos_embed.proj.weight", 4)
        norm, numbers = "transformer_blocks.0.attn.norm_q.weight", range(count_of(shapes, "transformer_blocks"))
        usual = self.kind.attention_head_dim if D % self.kind.attention_head_dim == 0 else D
        head_dim = shape_of(shapes, norm, 1)[0] if norm in shapes else usual
        side = math.isqrt(shape_of(shapes, "pos_embed.pos_embed", 3)[1])
        return self.kind(
            num_layers=len(numbers),
            num_attention_heads=D // head_dim,
            attention_head_dim=head_dim,
            joint_attention_dim=shape_of(shapes, "context_embedder.weight", 2)[1],
            in_channels=channels,
            pooled_projection_dim=shape_of(shapes, "time_text_embed.text_embedder.linear_1.weight", 2)[1],
            qk_norm="rms_norm" if norm in shapes else None,
            pos_embed_max_size=side,
            dual_attention_layers=tuple(i for i in numbers if f"transformer_blocks.{i}.attn2.to_q.weight" in shapes),
            latent_size=(min(self.kind.latent_size[0], self.kind.patch_size * side),) * 2,
        )


class VideoAdapter(WeightConverter):
    """``custom_dit``, and what it shares with Wan."""

    head_dim = 128
    """Width of a head if only shapes are known; every published Wan has it."""

    def adaptable(self, here: PredictorConfig) -> tuple[str, ...]:
        return ("latent_size", "rope_max_seq_len")

    def of_shapes(self, shapes: Shapes) -> Any:
        """Return the architecture that ``shapes`` imply, with heads of Wan's width if that fits."""
        kind, embedder = self.kind, "condition_embedder"
        if not all(f"blocks.0.{name}.weight" in shapes for name in ("attn1.to_q", "attn1.norm_q", *kind.affine_norms)):
            return None
        text, labels = f"{embedder}.text_embedder.linear_1.weight", shapes.get(f"{embedder}.label_embedder.weight")
        D, C, *patch = shape_of(shapes, "patch_embedding.weight", 5)
        head_dim = self.head_dim if D % self.head_dim == 0 else D
        sizes: dict[str, Any] = {kind.heads_key: D // head_dim, kind.head_dim_key: head_dim}
        if labels:  # (shapes do not show whether the last row is the unconditional class; it nearly always is)
            sizes["num_classes"] = labels[0] - 1
        return kind(
            **sizes,
            patch_size=tuple(patch),
            latent_size=tuple(patch),
            num_layers=count_of(shapes, "blocks"),
            in_channels=C,
            out_channels=shape_of(shapes, "proj_out.weight", 2)[0] // math.prod(patch),
            text_dim=shape_of(shapes, text, 2)[1] if text in shapes or not labels else None,
            freq_dim=shape_of(shapes, f"{embedder}.time_embedder.linear_1.weight", 2)[1],
            ffn_dim=shape_of(shapes, "blocks.0.ffn.net.0.proj.weight", 2)[0],
        )


class WanAdapter(VideoAdapter):
    """Wan 2.1 and 2.2; an image-to-video network can start from a text-to-video network."""

    ours = ("latent_size", "expand_timesteps", "last_frame", "frame_dropout_prob")
    """Keys that a published config.json does not have."""
    image_embedder = "condition_embedder.image_embedder."

    def adaptable(self, here: Any) -> tuple[str, ...]:
        of_images = ("in_channels", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len", *self.ours[1:])
        return (*super().adaptable(here), *(of_images if here.mask_channels else ()))

    def adapt_weight(self, here: PredictorConfig, name: str, source: SourceTensor) -> AdaptedTensor | None:
        """Widen the patch embedding of a text-to-video network with zeros for the channels of an image."""
        missing = source.shape[1] - source.value.shape[1] if name == "patch_embedding.weight" else 0
        if missing != here.in_channels - here.latent_channels or not missing:
            return super().adapt_weight(here, name, source)
        zeros = np.zeros((len(source.value), missing, *source.shape[2:]), source.value.dtype)
        how = f"zeros for the {missing} channels of the conditioning frames"
        return AdaptedTensor(np.concatenate([source.value, zeros], 1), how)

    def is_optional(self, name: str) -> bool:
        """Return whether ``name`` belongs to CLIP's features, which a text-to-video network lacks."""
        return name.startswith(self.image_embedder) or any(f".attn2.{part}" in name for part in ("add_", "norm_added"))

    def of_shapes(self, shapes: Shapes) -> Any:
        config, norm = super().of_shapes(shapes), f"{self.image_embedder}norm1.weight"
        if config is None or norm not in shapes:
            return config
        count = shapes.get(f"{self.image_embedder}pos_embed", (0, None))[1]
        width = config.hidden_size
        return replace(config, image_dim=shapes[norm][0], added_kv_proj_dim=width, pos_embed_seq_len=count)

    def of_diffusers(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return section ``predictor`` for a config.json, for the smallest latents."""
        settings = super().of_diffusers(section)
        return settings | {"latent_size": settings.get("patch_size", self.kind.patch_size)}

    def to_diffusers(self, config: Any) -> dict[str, Any]:
        settings = {key: value for key, value in vars(config).items() if key not in (*self.ours, "model_id")}
        return {"_class_name": config.diffusers_class, **settings}

    def defaults_for_missing(self, config: Any) -> tuple[str, ...]:
        return config.heads_key, config.head_dim_key

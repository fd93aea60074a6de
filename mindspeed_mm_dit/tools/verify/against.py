"""``mm-dit compare --against diffusers:...``: our network against diffusers' class of the same architecture."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.compatibility import check_names
from mindspeed_mm_dit.checkpoint.formats import diffusers as files
from mindspeed_mm_dit.checkpoint.shapes import from_diffusers
from mindspeed_mm_dit.configs.flux import FluxConfig
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.qwen_image import QwenImageConfig
from mindspeed_mm_dit.configs.sd3 import SD3Config
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.wan import OURS, WanConfig
from mindspeed_mm_dit.errors import ConfigError, nearest, not_installed
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.host_memory import host_memory_bytes
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.tools.verify.compare import Comparison
from mindspeed_mm_dit.tools.verify.first_wrong_module import functions_for
from mindspeed_mm_dit.tools.verify.proof import REFERENCE_BYTES

Inputs = dict[str, Any]
KINDS: Mapping[str, type[PredictorConfig]] = {
    kind.diffusers_class: kind for kind in (WanConfig, FluxConfig, SD3Config, QwenImageConfig)
}  # fmt: skip
"""diffusers' classes that take their inputs as told below."""
_HEADS = {"num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 16, "joint_attention_dim": 40}
SMALL: Mapping[str, Mapping[str, Any]] = {
    "WanTransformer3DModel": {"num_layers": 3, "num_attention_heads": 3, "attention_head_dim": 18, "text_dim": 10,
                              "ffn_dim": 40, "freq_dim": 16, "in_channels": 4, "out_channels": 4,
                              "cross_attn_norm": True, "rope_max_seq_len": 32},
    "FluxTransformer2DModel": {**_HEADS, "axes_dims_rope": [4, 6, 6], "in_channels": 16, "num_single_layers": 2,
                               "pooled_projection_dim": 24, "guidance_embeds": True},
    "SD3Transformer2DModel": {**_HEADS, "in_channels": 4, "out_channels": 4, "pooled_projection_dim": 24,
                              "caption_projection_dim": 48, "sample_size": 16, "pos_embed_max_size": 8,
                              "qk_norm": "rms_norm", "dual_attention_layers": [0]},
    "QwenImageTransformer2DModel": {**_HEADS, "axes_dims_rope": [4, 6, 6], "in_channels": 16, "out_channels": 4},
}  # fmt: skip
"""Settings of a small network of each class, for a comparison that needs no folder."""
_TABLES = {"pos_embed.pos_embed"}
"""Parameters of ours that diffusers computes."""


def compare_against(place: str, seed: int) -> Comparison:
    """Compare our network with diffusers', both with the weights in a folder; a class's name: with random weights.

    Raises UserError for a folder or class that is none of these.
    """
    try:
        import diffusers
    except ImportError:
        raise not_installed("--against", "diffusers", "video") from None
    activate("pytorch")
    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.models.registry import network_of
    from mindspeed_mm_dit.tools.verify.port import prove

    section, weights = _described(place)
    name = section["_class_name"]
    config, said = _that_fits(from_diffusers(KINDS[name], section, f"--against {place}: config.json"), place)
    own = {key: value for key, value in their_settings(config, section).items() if not key.startswith("_")}
    theirs, mine = getattr(diffusers, name)(**own), network_of(config)
    said = said or ("" if weights else f"drawn from seed {seed}")
    adapted_starter = initial_weights(parameters_of(config), seed) if said or weights is None else weights()
    shapes = {key: array.shape for key, array in adapted_starter.items()}
    check_names(parameters_of(config).shapes(), shapes, f"--against {place}", *files.NOT_ITS_OWN)
    runtime.load_arrays(mine, adapted_starter)
    shared = dict(theirs.named_parameters())
    functions_for(theirs).load(theirs, {key: array for key, array in adapted_starter.items() if key in shared})
    inputs = inputs_of(config)
    asked = {key: ops.tensor(array) for key, array in inputs.items()}
    found = prove(
        mine, theirs, list(inputs.values()), names=dict.fromkeys(_TABLES & adapted_starter.keys()),
        their_inputs=asked_of(config, asked, theirs), their_output=tensor_of(config, asked),
    )  # fmt: skip
    versions = {"diffusers": diffusers.__version__, **found.facts[0]}
    about = {
        "model": f"our {type(mine).__name__} against diffusers' {name}",
        "weights": said or place.partition(":")[2],
    }
    return dataclasses.replace(found, facts=(versions, found.facts[1]), about=found.about | about)


def _described(place: str) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Return the config.json of a network, and what reads its weights, if it has any."""
    kind, _, where = place.partition(":")
    if kind != "diffusers" or not where:
        raise ConfigError(f"--against {place}", "is no diffusers:FOLDER and no diffusers:CLASS")
    if where in SMALL:
        return {"_class_name": where, **SMALL[where]}, None
    folder = next((f for f in (Path(where), Path(where) / "transformer") if (f / "config.json").is_file()), None)
    if folder is None:
        raise ConfigError(f"--against {place}", "is no folder with a config.json",
                          f"{nearest(where, SMALL)}The classes are {', '.join(SMALL)}")  # fmt: skip
    section = read_json(folder / "config.json", "--against")
    if section.get("_class_name") not in [*KINDS]:
        raise ConfigError(f"--against {place}", f"is of a {section.get('_class_name')}, none of {', '.join(KINDS)}",
                          "of other networks, mm-dit parity checks files of published values")  # fmt: skip
    has_weights = any(folder.glob(f"{files.WEIGHTS}.*"))
    return section, (lambda: files.read_arrays(folder)) if has_weights else None


def _that_fits(config: Any, place: str) -> tuple[Any, str]:
    """Return the network, or a narrower copy if this machine has no memory for a step in float64, and what was done."""
    count, room = parameters_of(config).num_elements(), host_memory_bytes()
    if count * REFERENCE_BYTES < room:
        return config, ""
    small = config.reduced_width()
    return small, f"random: of {place} only a narrowed copy fits into {room / 2**30:.0f} GiB, {small.num_layers} blocks"


def their_settings(config: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return diffusers' section for our network."""
    own = dataclasses.asdict(config)
    same = {key: own[key] for key in section if key in own and key not in (*OURS, "in_channels")}
    wide = {"caption_projection_dim": config.hidden_size} if "caption_projection_dim" in section else {}
    return {**section, **same, **wide}


def inputs_of(config: Any, size: tuple[int, ...] = (), length: int = 9, samples: int = 2) -> dict[str, np.ndarray]:
    """Return samples: latents, times and conditions in the order of our network.

    size: sides of the latents, (F, H, W) of clips and (H, W) of images; few patches where none is given.
    length: states of text.
    """
    draw, video = np.random.default_rng(1), isinstance(config, WanConfig)
    patch = config.patch_size if video else (config.patch_size,) * 2
    size = size or tuple(side * count for side, count in zip(patch, (2, 2, 3) if video else (4, 6)))
    small = dataclasses.replace(config, latent_size=size)
    length = 512 if getattr(config, "image_dim", None) else length  # (diffusers: an image's are those before 512)
    given = {name: array[:, :length] if array.ndim == 3 and name == "text" else array
             for name, array in small.conditions.examples(samples).items()}  # fmt: skip
    channels = config.latent_channels if video else config.in_channels
    x = draw.standard_normal((samples, channels, *size), np.float32)
    times = np.resize([137.0, 865.0] if video else [0.137, 0.865], samples).astype(np.float32)
    guided = (
        {"guidance": np.full(samples, config.guidance, np.float32)} if getattr(config, "guidance_embeds", False) else {}
    )
    return {"x": x, "t": times, **given, **guided}


def asked_of(config: Any, given: Inputs, theirs: Any) -> Inputs:
    """Return the same samples as ``theirs``, diffusers' network, takes them."""
    from mindspeed_mm_dit.models.joint import pack

    x, t, text = given["x"], given["t"], given["text"]
    if isinstance(config, WanConfig):
        return {"encoder_hidden_states": text, **_of_wan(config, given)}
    h, w, L = x.shape[2] // 2, x.shape[3] // 2, text.shape[1]
    if isinstance(config, SD3Config):
        return {"hidden_states": x, "encoder_hidden_states": text, "pooled_projections": given["pooled"],
                "timestep": 1000 * t}  # fmt: skip
    tokens = {"hidden_states": pack(x), "encoder_hidden_states": text, "timestep": t}
    if isinstance(config, QwenImageConfig):
        asked = {**tokens, "encoder_hidden_states_mask": np.ones((len(x), L), bool),
                 "img_shapes": [[(1, h, w)]] * len(x)}  # fmt: skip
        counted = "txt_seq_lens" in inspect.signature(theirs.forward).parameters  # (diffusers 0.42 does not)
        return asked | ({"txt_seq_lens": [L] * len(x)} if counted else {})
    ids = np.array([(0, row, column) for row in range(h) for column in range(w)], np.float32)
    return {**tokens, "pooled_projections": given["pooled"], "img_ids": ids, "txt_ids": np.zeros((L, 3), np.float32),
            "guidance": given.get("guidance")}  # fmt: skip


def _of_wan(config: WanConfig, given: Inputs) -> Inputs:
    x, t = given["x"], given["t"]
    if config.mask_channels:
        from mindspeed_mm_dit.framework import ops

        x = ops.cat([x, given["frames"]], 1)
    found = {"hidden_states": x, "timestep": t}
    if config.image_dim:
        tokens = 2 if config.pos_embed_seq_len else 1
        found["encoder_hidden_states_image"] = given["image_embeds"].reshape(len(x) * tokens, -1, config.image_dim)
    return found


def tensor_of(config: Any, given: Inputs) -> Callable[[Any], Any]:
    """Return the function that takes the tensor of diffusers' output, as ours has it."""
    from mindspeed_mm_dit.models.joint import unpack

    if isinstance(config, (WanConfig, SD3Config)):
        return lambda found: found.sample
    h, w = given["x"].shape[2] // 2, given["x"].shape[3] // 2
    return lambda found: unpack(found.sample, h, w)

"""``mm-dit compare --against diffusers:...``: our network against the diffusers class of the same architecture."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.state import check_names
from mindspeed_mm_dit.configs.joint import FluxConfig, QwenImageConfig, SD3Config
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import ConfigError, nearest, not_installed
from mindspeed_mm_dit.framework import activate
from mindspeed_mm_dit.framework.contract import host_memory_bytes
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.integrations.formats.config_json import from_diffusers
from mindspeed_mm_dit.integrations.formats.diffusers_folder import WRONG_CONFIG_ERROR
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.weight_adapters import QUANTIZATION
from mindspeed_mm_dit.tools.verify.compare import Comparison
from mindspeed_mm_dit.tools.verify.module_recorder import functions_for
from mindspeed_mm_dit.tools.verify.proof import REFERENCE_BYTES

Inputs = dict[str, Any]
KINDS: Mapping[str, type[PredictorConfig]] = {
    kind.diffusers_class: kind for kind in (WanConfig, FluxConfig, SD3Config, QwenImageConfig)
}
"""diffusers classes whose inputs ``diffusers_inputs`` can make."""
SMALL: Mapping[str, Mapping[str, Any]] = json.loads(
    (Path(__file__).with_name("templates") / "small_networks.json").read_text(encoding="utf-8")
)
"""Settings of a small network of each class, for a comparison that needs no folder."""
_TABLES = {"pos_embed.pos_embed"}
"""Parameters of ours that diffusers computes instead of storing."""


def compare_against(source: str, seed: int) -> Comparison:
    """Compare our network with that of diffusers, with the weights in a folder, or random ones for a class.

    Raises UserError for another folder or class.
    """
    try:
        import diffusers
    except ImportError:
        raise not_installed("--against", "diffusers", "video") from None
    activate("pytorch")
    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.models.registry import network_of
    from mindspeed_mm_dit.tools.verify.port import prove

    section, weights = _described(source)
    name = section["_class_name"]
    config, note = _reduced_to_memory(from_diffusers(KINDS[name], section, f"--against = {source}: config.json"))
    settings = {key: value for key, value in diffusers_settings(config, section).items() if not key.startswith("_")}
    theirs, mine = getattr(diffusers, name)(**settings), network_of(config)
    note = note or ("" if weights else f"random, from seed {seed}")
    initial = initial_weights(parameters_of(config), seed) if note or weights is None else weights()
    shapes = {key: array.shape for key, array in initial.items()}
    check_names(parameters_of(config).shapes(), shapes, f"--against = {source}", *WRONG_CONFIG_ERROR)
    runtime.load_arrays(mine, initial)
    shared = dict(theirs.named_parameters())
    functions_for(theirs).load(theirs, {key: array for key, array in initial.items() if key in shared})
    inputs = inputs_of(config)
    tensors = {key: ops.tensor(array) for key, array in inputs.items()}
    names, their_inputs = dict.fromkeys(_TABLES & initial.keys()), diffusers_inputs(config, tensors, theirs)
    form: Any = {"their_inputs": their_inputs, "their_output": tensor_of(config, tensors)}
    comparison = prove(mine, theirs, list(inputs.values()), names=names, **form)
    versions = {"diffusers": diffusers.__version__, **comparison.facts[0]}
    about = {
        "model": f"our {type(mine).__name__} against diffusers' {name}",
        "weights": note or source.partition(":")[2],
    }
    return dataclasses.replace(comparison, facts=(versions, comparison.facts[1]), about=comparison.about | about)


def _described(source: str) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Return the config.json of a network, and what reads its weights, if it has any."""
    kind, _, target = source.partition(":")
    if kind != "diffusers" or not target:
        raise ConfigError(f"--against = {source} must be diffusers:<folder> or diffusers:<ClassName>.")
    if target in SMALL:
        return {"_class_name": target, **SMALL[target]}, None
    folder = next((f for f in (Path(target), Path(target) / "transformer") if (f / "config.json").is_file()), None)
    if folder is None:
        raise ConfigError(
            f"--against = {source} is neither a class nor a folder with a config.json. {nearest(target, SMALL)}The "
            f"classes are {', '.join(SMALL)}."
        )
    section = read_json(folder / "config.json", "--against")
    section.pop(QUANTIZATION, None)
    if section.get("_class_name") not in [*KINDS]:
        raise ConfigError(
            f"--against = {source} is a {section.get('_class_name')}, not one of {', '.join(KINDS)}. For other "
            "networks, mm-dit parity checks files of published values."
        )
    has_weights = any(folder.glob(f"{diffusers_folder.WEIGHTS}.*"))
    return section, (lambda: diffusers_folder.read_arrays(folder)) if has_weights else None


def _reduced_to_memory(config: Any) -> tuple[Any, str]:
    """Return the config, or one of reduced width if this machine's memory is too small for float64, and a note."""
    count, memory_bytes = parameters_of(config).num_elements(), host_memory_bytes()
    if count * REFERENCE_BYTES < memory_bytes:
        return config, ""
    small = config.reduced_width()
    note = f"random: {memory_bytes / 2**30:.0f} GiB hold only a copy of reduced width, {small.num_layers} blocks"
    return small, note


def diffusers_settings(config: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the diffusers network that has the sizes of ours."""
    ours = dataclasses.asdict(config)
    same = {key: ours[key] for key in section if key in ours and key != "in_channels"}
    wide = {"caption_projection_dim": config.hidden_size} if "caption_projection_dim" in section else {}
    return {**section, **same, **wide}


def inputs_of(config: Any, size: tuple[int, ...] = (), length: int = 9, samples: int = 2) -> dict[str, np.ndarray]:
    """Return samples: latents, times and conditions in the order of our network.

    size: of the latents, (F, H, W) of clips and (H, W) of images; by default a few patches. length: of the text.
    """
    draw, video = np.random.default_rng(1), isinstance(config, WanConfig)
    patch = config.patch_size if video else (config.patch_size,) * 2
    size = size or tuple(side * count for side, count in zip(patch, (2, 2, 3) if video else (4, 6)))
    small = dataclasses.replace(config, latent_size=size)
    if getattr(config, "image_dim", None):  # (diffusers takes all tokens before the last 512 to be those of an image)
        length = 512
    conditions = {
        name: array[:, :length] if array.ndim == 3 and name == "text" else array
        for name, array in small.conditions.examples(samples).items()
    }
    channels = config.latent_channels if video else config.in_channels
    x = draw.standard_normal((samples, channels, *size), np.float32)
    times = np.resize([137.0, 865.0] if video else [0.137, 0.865], samples).astype(np.float32)
    guided = (
        {"guidance": np.full(samples, config.guidance, np.float32)} if getattr(config, "guidance_embeds", False) else {}
    )
    return {"x": x, "t": times, **conditions, **guided}


def diffusers_inputs(config: Any, inputs: Inputs, theirs: Any) -> Inputs:
    """Return the same samples as arguments of ``theirs``, the diffusers network."""
    from mindspeed_mm_dit.models.joint import pack

    x, t, text = inputs["x"], inputs["t"], inputs["text"]
    if isinstance(config, WanConfig):
        return {"encoder_hidden_states": text, **_wan_inputs(config, inputs)}
    h, w, L = x.shape[2] // 2, x.shape[3] // 2, text.shape[1]
    if isinstance(config, SD3Config):
        texts = {"encoder_hidden_states": text, "pooled_projections": inputs["pooled"]}
        return {"hidden_states": x, **texts, "timestep": 1000 * t}
    tokens = {"hidden_states": pack(x), "encoder_hidden_states": text, "timestep": t}
    if isinstance(config, QwenImageConfig):
        mask, shapes = np.ones((len(x), L), bool), [[(1, h, w)]] * len(x)
        arguments = {**tokens, "encoder_hidden_states_mask": mask, "img_shapes": shapes}
        counted = "txt_seq_lens" in inspect.signature(theirs.forward).parameters  # (diffusers 0.42 does not)
        return arguments | ({"txt_seq_lens": [L] * len(x)} if counted else {})
    ids = np.array([(0, row, column) for row in range(h) for column in range(w)], np.float32)
    positions = {"img_ids": ids, "txt_ids": np.zeros((L, 3), np.float32)}
    return {**tokens, **positions, "pooled_projections": inputs["pooled"], "guidance": inputs.get("guidance")}


def _wan_inputs(config: WanConfig, inputs: Inputs) -> Inputs:
    x, t = inputs["x"], inputs["t"]
    if config.mask_channels:
        from mindspeed_mm_dit.framework import ops

        x = ops.cat([x, inputs["frames"]], 1)
    arguments = {"hidden_states": x, "timestep": t}
    if config.image_dim:
        tokens = 2 if config.pos_embed_seq_len else 1
        arguments["encoder_hidden_states_image"] = inputs["image_embeds"].reshape(len(x) * tokens, -1, config.image_dim)
    return arguments


def tensor_of(config: Any, inputs: Inputs) -> Callable[[Any], Any]:
    """Return the function that takes the tensor from the output of diffusers, in the shape of ours."""
    from mindspeed_mm_dit.models.joint import unpack

    if isinstance(config, (WanConfig, SD3Config)):
        return lambda output: output.sample
    h, w = inputs["x"].shape[2] // 2, inputs["x"].shape[3] // 2
    return lambda output: unpack(output.sample, h, w)

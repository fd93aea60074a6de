"""Files of reference values of diffusers' image transformers: FLUX.1, FLUX.2, SD3, Qwen-Image and Z-Image.

--checkpoint is the folder that diffusers wrote; its config.json names the family. Sampling and training steps are those
of diffusers' pipelines and examples, whose times run from 0 (data) to 1 (noise).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import FORMATS, format_of_source
from mindspeed_mm_dit.checkpoint.state import infer_predictor, shapes_of
from mindspeed_mm_dit.configs.diffusion import FlowMatchingConfig, mu_of
from mindspeed_mm_dit.configs.joint import JointConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.models.joint import pack
from mindspeed_mm_dit.models.layers import to_tokens
from mindspeed_mm_dit.models.positions import rotary_at_positions
from mindspeed_mm_dit.models.qwen_image import token_positions
from mindspeed_mm_dit.models.registry import network_of
from mindspeed_mm_dit.objectives.flow.process import FlowMatching
from mindspeed_mm_dit.objectives.flow.samplers import ode_trajectory
from mindspeed_mm_dit.objectives.flow.timesteps import flux2_mu, sampling_times
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
    loaded,
    norm,
    watched,
)
from mindspeed_mm_dit.tools.verify.reference.images import Point
from mindspeed_mm_dit.tools.verify.table import GRADIENTS, Bound, Quantity, UnknownQuantity


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
        raise UnknownQuantity("")


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
        return to_tokens(output)

    def mu(self, tokens: int, steps: int) -> float:
        return flux2_mu(tokens, steps)


FAMILIES: Mapping[str, type[Family]] = {
    **{"flux": FluxFamily, "flux2": Flux2Family, "sd3": SD3Family},
    **{"qwen_image": QwenImageFamily, "z_image": ZImageFamily},
}


def network_in(path: Path) -> tuple[JointConfig, Mapping[str, np.ndarray]]:
    """Return config and weights of the network in a folder of diffusers, or a file; CheckpointError for others."""
    what = f"--checkpoint = {path}"
    if not path.is_file() and not diffusers_folder.fits(path):
        raise CheckpointError(f"{what} is no folder of diffusers, because it has no config.json. {FORMAT}")
    state = FORMATS[format_of_source(path)].read(path)
    config = infer_predictor(shapes_of(state.weights), state.facts, state.predictor)
    if not isinstance(config, JointConfig):
        raise CheckpointError(f"{what} is a {config.model_id!r}, not an image transformer. {FORMAT}")
    return config, state.weights


class ImageTransformer:
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays = arrays
        self.config, self._weights = network_in(Path(weights["--checkpoint"]))
        self.family = FAMILIES[self.config.model_id](arrays, self.config)
        self.number = len(arrays[self.family.latents])
        self.step = OptimizerStep(self.fresh_network, lambda network: self.at.losses(network))
        self.states = cache(self._states)

    def fresh_network(self) -> Any:
        """Return a new network, whose weights may change."""
        return loaded(network_of, self.config, self._weights, "--checkpoint", compiled=False)

    @cached_property
    def network(self) -> Any:
        """The network."""
        return self.fresh_network()

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Latents, times and conditions of the network."""
        x = self.family.images(self.arrays.tensor(self.family.latents))
        t = ops.tensor(self.family.time(self.arrays["timestep"]).astype(np.float32))
        return x, t, self.family.condition(self.number)

    @cached_property
    def output(self) -> Tensor:
        """The network's output, (B, C, H, W)."""
        x, t, condition = self.inputs
        return evaluate(self.network, x, t, *condition)

    @property
    def _grid(self) -> tuple[int, int]:
        H, W = self.inputs[0].shape[2:]
        return H // self.config.patch_size, W // self.config.patch_size

    def of_file(self, output: Tensor) -> Tensor:
        """Return (B, C, H, W) with the axes of the file's latents."""
        return output if self.arrays[self.family.latents].ndim == 4 else output[:, :, None]

    # --- parts of the network ----------------------------------------------------------------------------------------

    @cached_property
    def taps(self) -> Mapping[str, Any]:
        """Output of every module by its name: a tensor, or a tuple of them."""
        network, (x, t, condition) = self.fresh_network(), self.inputs
        return watched(network, lambda: evaluate(network, x, t, *condition))

    def tap(self, name: str) -> Any:
        """Return the output of a module, or the one of several whose number follows the name.

        The output of a block with text and image in one sequence is split in two, as in diffusers.
        """
        if name in self.taps:
            return self.taps[name]
        module, _, part = name.rpartition(".")
        if module not in self.taps or not part.isdecimal():
            raise UnknownQuantity("")
        output, L = self.taps[module], self.inputs[2][0].shape[1]
        return (output if isinstance(output, tuple) else (output[:, :L], output[:, L:]))[int(part)]

    # --- one step of training ----------------------------------------------------------------------------------------

    @cached_property
    def at(self) -> Point:
        """The samples at their times."""
        x, noise = (self.family.images(self.arrays.tensor(key)) for key in (self.family.latents, "train/noise"))
        times = 1 - self.arrays["train/sigma"].astype(np.float64)
        return Point.of_flow(
            self.family.flow(), x, noise, times, *self.family.condition(self.number, guidance="train/guidance")
        )

    def target(self) -> Tensor:
        """Return the velocity towards noise."""
        return self.of_file(-self.at.target())

    def trained(self, name: str) -> Tensor:
        """Return the network's output at x_t; ``minus_``: negated, for a network that predicts the velocity to data."""
        output = self.of_file(self.at.output(self.network))
        return -output if name else output

    def preconditioned(self, losses: np.ndarray) -> np.ndarray:
        """Return the losses of the data that x_t and a velocity imply."""
        return losses * self.arrays["train/sigma"].astype(np.float64) ** 2

    def gradient(self, parameter: str) -> np.ndarray:
        """Return the norm of the gradient of a parameter; zero for one without influence on the loss."""
        if parameter not in self._weights:
            raise UnknownQuantity("")
        gradient = self.step.gradients.get(parameter)
        return np.zeros(()) if gradient is None else norm(gradient)

    # --- sampling ----------------------------------------------------------------------------------------------------

    def sigmas(self, variant: str | None) -> np.ndarray:
        """Return the noise levels of a sampling loop."""
        steps = len(self.arrays[f"sample/{variant or ''}sigmas"]) - 1
        return 1 - self._times((variant or "").rstrip("/"), steps)

    def _times(self, variant: str, steps: int) -> np.ndarray:
        return sampling_times(self.family.flow(variant).config, steps, self._start.shape[1:])

    @cached_property
    def _start(self) -> Tensor:
        return self.family.images(self.arrays.tensor("sample/start"))

    def _states(self, variant: str | None) -> np.ndarray:
        name = (variant or "").rstrip("/")
        guidance, embedded = self.family.guidance(name)
        number, steps = self._start.shape[0], len(self.arrays[f"sample/{variant or ''}sigmas"]) - 1
        condition = self.family.condition(number, guidance=embedded)
        unconditional = self.family.condition(number, "negative_", embedded) if guidance.scale != 1 else condition
        with ops.no_grad():
            model_fn = guided_network(self.network, condition, unconditional, guidance)
            states = ode_trajectory("euler", self.family.flow(name), model_fn, self._start, steps)
            return np.stack([ops.numpy(self.family.like_theirs(state)) for state in states])

    def schedule(self, tokens: str | None, steps: str, name: str) -> np.ndarray:
        """Return a table of times for another number of steps and image tokens."""
        if name == "mu":
            return np.array(self.family.mu(int(tokens or 0), int(steps)))
        side = self.config.patch_size
        shape = (1, side, side * int(tokens or 1))
        sigmas = 1 - sampling_times(self.family.flow().config, int(steps), shape)
        return sigmas if name == "sigmas" else 1000 * sigmas[:-1]

    # --- other positions ---------------------------------------------------------------------------------------------

    def rope(self, number: int) -> np.ndarray:
        """Return the cosines (0) or sines (1) of the positions, each twice."""
        h, w = self._grid
        return ops.numpy(self.network.positions(self.arrays["text"].shape[1], h, w)[number]).repeat(2, 1)

    def at_positions(self, x: Tensor, positions: np.ndarray) -> Tensor:
        """Return the output for tokens ``x``, with text and image at ``positions`` (L + N, axes)."""
        config: Any = self.config
        tables = ops.tensor(rotary_at_positions(positions, config.axes_dims_rope, config.rope_theta))
        _, t, (text, *rest) = self.inputs
        inputs = (x, t, text, *rest)
        split = 4 if self.config.model_id in ("flux", "qwen_image") else 3
        return evaluate(self.network.tokens, *inputs[:split], tables[0], tables[1], *inputs[split:])

    def other_ids(self) -> Tensor:
        """Return the output at other positions."""
        positions = np.concatenate([self.arrays["ids_other/txt_ids"], self.arrays["ids_other/img_ids"]])
        return self.at_positions(pack(self.inputs[0]), positions)

    def with_references(self) -> Tensor:
        """Return the output with tokens of other images after those of the image."""
        x, tokens = to_tokens(self.inputs[0]), self.arrays["reference/tokens"]
        tokens = np.concatenate([tokens, tokens[::-1]])  # (the second image is the first, its tokens backwards)
        more = ops.tensor(np.broadcast_to(tokens, (self.number, *tokens.shape)).astype(np.float32))
        ids = [self.arrays[key] for key in ("txt_ids", "img_ids", "reference/img_ids")]
        return self.at_positions(ops.cat([x, more], 1), np.concatenate(ids))[:, : x.shape[1]]

    def edited(self) -> Tensor:
        """Return the output for the tokens of an image, followed by those of another."""
        grids = [(int(h), int(w)) for _, h, w in self.arrays["edit/img_shapes"]]
        x = ops.cat([pack(self.family.images(self.arrays.tensor(key))) for key in ("latents", "edit/reference")], 1)
        return self.at_positions(x, token_positions(self.arrays["text"].shape[1], grids))

    def angles(self, edit: str | None, of: str) -> np.ndarray:
        """Return the rotary angles of text or images, in (-pi, pi]."""
        shapes = self.arrays["edit/img_shapes"] if edit else self.arrays["img_shape"][None]
        L = self.arrays["text"].shape[1]
        positions = token_positions(L, [(int(h), int(w)) for _, h, w in shapes])
        cos, sin = rotary_at_positions(positions, self.config.axes_dims_rope)  # type: ignore[attr-defined]
        angles = np.arctan2(sin.astype(np.float64), cos)
        return angles[:L] if of == "text" else angles[L:]

    def masked(self, name: str) -> Tensor:
        """Return the output with another mask of the text."""
        x, t, (text, _) = self.inputs
        mask = np.ones(text.shape[:2], bool) if name == "no_mask" else self.arrays["mask_with_holes"] > 0
        return pack(evaluate(self.network, x, t, text, ops.tensor(mask)))

    def mixed(self, number: str) -> Tensor:
        """Return the output for one of several images of different sizes."""
        x = self.arrays.tensor(f"mixed/latents{number}")[None, :, 0]
        _, t, (text,) = self.inputs
        row = slice(int(number), int(number) + 1)
        return evaluate(self.network, x, t[row], text[row])[0][:, None]


MODULES = Bound(
    "Of modules and loaded files there is only the published float32. Its sinusoids of a guidance of 1000 x 7 are 4e-4 "
    "off.",
    least=lambda reference: 3e-5,
)
FAINT_GRADIENTS = Bound(
    f"{GRADIENTS.why} In these files queries, keys and the residual stream are small on purpose, and the published "
    "float32 itself is up to 2.8e-5 off, another parameter each time.",
    least=lambda reference: 3e-5,
)
_VARIANT = r"((?:true_cfg\d+(?:\.\d+)?|dynamic|cfg1|normalised|unguided)/)?"

IMAGE_TRANSFORMER = FileKind(
    signature=r"packed|pos_embed_cropped|train/minus_output",
    inputs=r"latents|text\d*|pooled|timestep|guidance|mask|mask_with_holes|img_shape|negative_(text\d*|pooled|mask)|"
    r"edit/(reference|packed|img_shapes)|((ids_other|reference)/)?(img|txt)_ids|reference/tokens|mixed/latents\d+|"
    r"(pos_ids|is_padding)_.+|train/(index|sigma|timestep|noise|guidance)|sample/(start|guidance|true_cfg_scale)",
    program=ImageTransformer,
    not_checked={
        r"tap/(all_x_embedder|cap_embedder|context_refiner|layers|all_final_layer).*": "rows of padding, which nothing "
        "attends to, differ"
    },
    rows=(
        Quantity("packed", lambda file: file.family.like_theirs(file.inputs[0])),
        Quantity("patchified", lambda file: file.inputs[0]),
        Quantity("rope_cos", lambda file: file.rope(0)),
        Quantity("rope_sin", lambda file: file.rope(1)),
        Quantity(r"(edit/)?rope_angle_(image|text)", ImageTransformer.angles),
        Quantity("pos_embed_cropped", lambda file: file.network.pos_embed.cropped(*file._grid)),
        Quantity("tap/(.+)", ImageTransformer.tap, MODULES),
        Quantity("output", lambda file: file.family.like_theirs(file.output)),
        Quantity("output_unpacked", lambda file: file.of_file(file.output)),
        Quantity("output_(no_mask|mask_with_holes)", ImageTransformer.masked),
        Quantity("ids_other/output", ImageTransformer.other_ids),
        Quantity("reference/output", ImageTransformer.with_references),
        Quantity("edit/output", ImageTransformer.edited),
        Quantity(r"mixed/output(\d+)", ImageTransformer.mixed),
        Quantity("train/x_t", lambda file: file.of_file(file.at.x_t)),
        Quantity("train/target", ImageTransformer.target),
        Quantity("train/(minus_)?output", ImageTransformer.trained),
        Quantity("train/loss", lambda file: file.step.losses),
        Quantity("train/loss_preconditioned", lambda file: file.preconditioned(file.step.losses)),
        Quantity("train/grad_norm/(.+)", ImageTransformer.gradient, FAINT_GRADIENTS),
        Quantity("train/loss_after_one_adamw_step", lambda file: file.step.losses_after),
        Quantity(
            "train/loss_preconditioned_after_one_adamw_step", lambda file: file.preconditioned(file.step.losses_after)
        ),
        Quantity(rf"sample/{_VARIANT}sigmas", ImageTransformer.sigmas),
        Quantity(rf"sample/{_VARIANT}timesteps", lambda file, variant: 1000 * file.sigmas(variant)[:-1]),
        Quantity(rf"sample/{_VARIANT}states", lambda file, variant: file.states(variant)),
        Quantity(rf"sample/{_VARIANT}result", lambda file, variant: file.states(variant)[-1]),
        Quantity(r"sched/(?:tokens(\d+)_)?steps(\d+)/(mu|sigmas|timesteps)", ImageTransformer.schedule),
    ),
)

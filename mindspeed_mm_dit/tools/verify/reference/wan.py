"""Files of reference values of Wan 2.1 and 2.2, made by diffusers: two experts, and clips that start with an image.

--checkpoint is a diffusers folder; with ``transformer/`` and ``transformer_2/`` in it, these are the two experts, whose
values are in groups of these names. --vae encodes the conditioning frames.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.configs.condition import FirstFrame
from mindspeed_mm_dit.configs.diffusion import WanFlowConfig, shifted
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.integrations.formats import diffusers_folder
from mindspeed_mm_dit.models.frames import grey_clip_latents
from mindspeed_mm_dit.models.video_transformer import Wan
from mindspeed_mm_dit.objectives.flow import solvers
from mindspeed_mm_dit.objectives.guidance import Guidance, guided_network, switch_experts
from mindspeed_mm_dit.objectives.wan_flow.objective import euler_sigmas
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow, unipc
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    config_of,
    evaluate,
    loaded,
    rows_of_step,
    watched,
)
from mindspeed_mm_dit.tools.verify.reference.video import TextToVideo, check_latents
from mindspeed_mm_dit.tools.verify.table import Quantity, Rows, UnknownQuantity

T = 1000
"""Times are noise levels times this."""
EXPERTS = ("transformer", "transformer_2")


class WanFile:
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        self.arrays, self.weights, self.folder = arrays, weights, Path(weights["--checkpoint"])
        self.by_token = "timestep_per_token" in arrays
        self.network = cache(self.fresh_network)
        self.chain = cache(self._chain)
        self.step = cache(self._step)
        self.taps = cache(self._taps)

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """Folder of each network; one network is in --checkpoint itself."""
        return EXPERTS if (self.folder / EXPERTS[1]).is_dir() else ("",)

    def _described(self, expert: str) -> tuple[Any, dict[str, np.ndarray]]:
        folder = self.folder / expert
        if not diffusers_folder.fits(folder):
            raise CheckpointError(f"--checkpoint = {folder} is not a diffusers folder of a network. {FORMAT}")
        section = {k: v for k, v in read_json(folder / "config.json", "--checkpoint").items() if not k.startswith("_")}
        section |= {"latent_size": section.get("patch_size"), "expand_timesteps": self.by_token}
        return config_of(WanConfig, section, f"{folder}/config.json"), diffusers_folder.read(folder).weights

    def fresh_network(self, expert: str = "") -> Any:
        """Return a new network; the one in :attr:`network` never changes."""
        if expert not in self.experts:
            raise UnknownQuantity(f"--checkpoint = {self.folder} has no {expert}/." if expert else "Name the expert.")
        config, weights = self._described(expert)
        x = "x" if "x" in self.arrays else "start"
        shape = self.arrays[x].shape
        check_latents(config, x, (shape[0], min(shape[1], config.latent_channels), *shape[2:]))
        return loaded(Wan, config, weights, "--checkpoint")

    # --- inputs of a network ---------------------------------------------------------------------------------------

    def frames(self, name: str, samples: int) -> Tensor:
        """Return mask and latents (B, M + C, F, H, W) of the conditioning frames; without ``name`` there are none."""
        size = self.arrays["noise_latents"].shape[2:]
        if not self.by_token:
            return _repeated(self.arrays[name], samples)
        condition = np.zeros((1, 1 + self.arrays["noise_latents"].shape[1], *size), np.float32)
        if name:
            condition[:, :1, :1] = 1
            condition[:, 1:, :1] = self.arrays[name]
        return _repeated(condition, samples)

    def extra_inputs(self, rows: slice | np.ndarray, condition: str) -> list[Tensor]:
        """Return the network's inputs besides latents, time and text, for samples ``rows`` of the file."""
        samples, inputs = len(self.arrays[self.text][rows]), []
        if "noise_latents" in self.arrays:
            inputs.append(self.frames(condition, samples))
        if "image_embeds" in self.arrays:
            inputs.append(ops.tensor(self.arrays["image_embeds"][rows]))
        return inputs

    @property
    def text(self) -> str:
        """Name of the text of two samples."""
        return "text2" if "text2" in self.arrays else "text"

    def inputs(self, condition: str = "condition") -> list[Tensor]:
        """Return the network's inputs for ``output``."""
        x, text = self.arrays["x"], self.arrays.tensor(self.text)
        rows = slice(len(x))
        extra = self.extra_inputs(rows, condition)
        if "image_embeds" in self.arrays:  # the file's x includes the mask and the latents of the conditioning frames
            noise = self.arrays["noise_latents"].shape[1]
            extra[0], x = ops.tensor(x[:, noise:]), x[:, :noise]
        return [ops.tensor(x), self.arrays.tensor("timestep"), text, *extra]

    def output(self, expert: str = "", condition: str = "condition") -> Tensor:
        """Return the network's output."""
        return evaluate(self.network(expert), *self.inputs(condition))

    def model_input(self, number: int) -> Tensor:
        """Return latents with the conditioning frames inserted (0), or the time of each token (1)."""
        x, t, _, frames = self.inputs()
        return self.network().insert_frames(x, t, frames)[number]

    def mask(self, shape: str) -> np.ndarray:
        """Return the mask of conditioning frames; with times by token, the file has 1 for all other frames."""
        size = self.arrays["noise_latents"].shape[2:]
        mask = FirstFrame(size, 1 if self.by_token else 4).mask(size[0])[None, :, :, None, None]
        return np.broadcast_to(1 - mask if shape == "first_frame_mask" else mask, (1, *mask.shape[1:3], *size[1:]))

    def condition(self, last: str | None) -> Tensor:
        """Return the mask and the latents of the conditioning frames, or of one frame alone."""
        images = [self.arrays.tensor(name) for name in ("image", *(["last_image"] if last else []))]
        autoencoder = TextToVideo(self.arrays, self.weights).autoencoder
        frames = 1 if self.by_token else int(self.arrays["num_frames"])
        latents = ops.numpy(autoencoder.scaled(evaluate(grey_clip_latents, autoencoder, images, frames)))
        if self.by_token:
            return latents
        mask = FirstFrame(latents.shape[1:], 4, bool(last)).mask(latents.shape[2])[None, :, :, None, None]
        return np.concatenate([np.broadcast_to(mask, (1, *mask.shape[1:3], *latents.shape[3:])), latents], 1)

    def _taps(self) -> dict[str, Any]:
        """Return the output of each module of the first network in the run of ``output``."""
        config, weights = self._described(self.experts[0])
        network = Wan(config)
        runtime.load_arrays(network, weights)
        runtime.to_runtime_device(network)
        return watched(network, lambda: evaluate(network, *self.inputs()))

    def tap(self, module: str, part: str = "") -> np.ndarray:
        """Return the output of a module, or a ``part`` of it, in the shape of diffusers."""
        embedder = "condition_embedder.image_embedder"
        output = self.taps().get(embedder if part == "3" else module)
        if output is None:
            raise UnknownQuantity("")
        array = ops.numpy(output[int(part)] if isinstance(output, tuple) else output)
        if module == "patch_embedding":
            network = self.network(self.experts[0])
            (_, _, F, H, W), (p, q, r) = self.inputs()[0].shape, network.config.patch_size
            return array.reshape(len(array), F // p, H // q, W // r, -1).transpose(0, 4, 1, 2, 3)
        return array[:, 0] if part in ("0", "1") and array.shape[1] == 1 else array

    # --- sampling --------------------------------------------------------------------------------------------------

    def sigmas(self, group: str) -> np.ndarray:
        """Return the noise levels of a sampling loop; the file's timesteps set the number of steps."""
        shift, steps = float(self.arrays["shift"]), len(self.arrays[f"{group}/timesteps"])
        if not group.endswith("unipc"):
            lowest = float(shifted(np.array(1 / T), shift))
            return euler_sigmas(WanFlowConfig(shift=shift, sigma_min=lowest), steps)
        sigmas = shifted(1 - np.linspace(0, 1 - 1 / T, steps + 1)[:-1], shift)
        return np.append(np.minimum(sigmas, 1 - 1e-6), 0.0)

    def timesteps(self, group: str) -> np.ndarray:
        """Return the times of a sampling loop; UniPC's are whole numbers."""
        times = T * self.sigmas(group)[:-1]
        return times.astype(np.int64) if group.endswith("unipc") else times

    def _model_fn(self, group: str, condition: str) -> Any:
        """Return the guided network, or the two experts, each with its guidance."""
        arrays = self.arrays
        if "negative_text" in arrays:
            text, negative, rows = arrays["text"], arrays["negative_text"], slice(len(arrays["text"]))
        else:
            text, negative, rows = arrays["text"][:1], arrays["text"][1:], slice(1)
        extra = [tensor[: len(text)] for tensor in self.extra_inputs(rows, condition)]
        first = float(arrays["guidance"])
        scales = (first, first if group.endswith("one_guidance") else float(arrays.get("guidance_2", first)))
        sides = [ops.tensor(text), *extra], [ops.tensor(negative), *extra]
        model_fns = [guided_network(self.network(name), *sides, Guidance(s)) for name, s in zip(self.experts, scales)]
        return model_fns[0] if len(model_fns) == 1 else switch_experts(float(arrays["boundary_ratio"]), *model_fns)

    def _chain(self, group: str) -> list[np.ndarray]:
        """Return the state after each step."""
        condition = "" if group == "sample_text_only" else "condition"
        model_fn = self._model_fn(
            group, f"{condition}_with_last_image" if group.endswith("with_last_image") else condition
        )
        start = self.arrays.tensor("noise_latents" if "noise_latents" in self.arrays else "start")
        times = dict(zip(self.sigmas(group).tolist(), self.timesteps(group).tolist()))

        def velocity(x: Tensor, sigmas: np.ndarray) -> Tensor:
            t = np.array([times[sigma] for sigma in sigmas.tolist()], np.float32)
            return model_fn(x, ops.tensor(t), t / T)

        def data_at(x: Tensor, sigma: float) -> Tensor:
            return x - sigma * velocity(x, np.full(x.shape[0], sigma))

        with ops.no_grad():
            if group.endswith("unipc"):
                return [ops.numpy(state) for state in unipc(data_at, start, self.sigmas(group))]
            return [ops.numpy(state) for state in solvers.integrate(solvers.euler, velocity, start, self.sigmas(group))]

    def result(self, group: str) -> np.ndarray:
        """Return the last state, with the conditioning frame as the first, if there is one."""
        last = self.chain(group)[-1]
        if self.by_token and group == "sample":
            last = np.concatenate([self.arrays["condition"].astype(np.float32), last[:, :, 1:]], 2)
        return last

    def expert_at(self, group: str) -> np.ndarray:
        """Return the index of the expert at each step."""
        return (self.timesteps(group) < float(self.arrays["boundary_ratio"]) * T).astype(np.int64)

    # --- training --------------------------------------------------------------------------------------------------

    def _draws(self, expert: str) -> list[Tensor]:
        sigmas = self.arrays[f"train/{expert}sigma"]
        coefficients = np.stack([sigmas, np.ones_like(sigmas)], 1)
        return [ops.tensor(a) for a in (T * sigmas, self.arrays["train/noise"], coefficients)]

    def add_noise(self, expert: str = "") -> Tensor:
        """Return the noised latents."""
        x, draws = self.arrays.tensor("train/x"), self._draws(expert)
        noised = WanFlow(WanFlowConfig()).add_noise(x, *draws)
        return ops.cat([x[:, :, :1], noised[:, :, 1:]], 2) if self.by_token else noised

    def _predict(self, network: Any, expert: str) -> Tensor:
        draws, text = self._draws(expert), self.arrays.tensor(self.text)
        extra = self.extra_inputs(slice(len(self.arrays["train/x"])), "condition")
        if self.by_token:
            x = self.arrays["train/x"]
            extra[0] = ops.tensor(_at_first_frame(np.concatenate([np.ones_like(x[:, :1]), x], 1)))
        return network(self.add_noise(expert), draws[0], text, *extra)

    def trained(self, expert: str = "") -> Tensor:
        """Return the network's output at the noised latents."""
        return evaluate(self._predict, self.network(expert.rstrip("/")), expert)

    def _step(self, expert: str = "") -> OptimizerStep:
        return OptimizerStep(
            lambda: self.fresh_network(expert.rstrip("/")), lambda network: self.losses(network, expert)
        )

    def losses(self, network: Any, expert: str = "", all_frames: bool = False) -> Tensor:
        """Return the loss of each sample, (B,); a conditioning frame does not count, unless ``all_frames``."""
        x = self.arrays["train/x"]
        known = None if all_frames or not self.by_token else ops.tensor(_at_first_frame(np.ones_like(x[:, :1])))
        inputs: list[Tensor] = [self.arrays.tensor("train/x"), self.add_noise(expert), *self._draws(expert)]
        process: Any = WanFlow(WanFlowConfig())
        return process.loss(self._predict(network, expert), *inputs, known)


def _at_first_frame(array: np.ndarray) -> np.ndarray:
    """Return ``array`` (B, C, F, H, W) with zeros in all frames but the first."""
    return np.concatenate([array[:, :, :1], np.zeros_like(array[:, :, 1:])], 2)


def _repeated(array: np.ndarray, samples: int) -> Tensor:
    return ops.tensor(np.repeat(array.astype(np.float32), samples // len(array), 0))


def chain_rows(group: str) -> Rows:
    """Return the rows about sampling; ``group``: regular expression of the names of their groups."""
    return (
        Quantity(f"{group}/sigmas", WanFile.sigmas),
        Quantity(f"{group}/timesteps", WanFile.timesteps),
        Quantity(f"{group}/expert", WanFile.expert_at),
        Quantity(f"{group}/states", lambda file, name: np.stack(file.chain(name))),
        Quantity(f"{group}/result", WanFile.result),
    )


def _rows_of_steps() -> Rows:
    """Return the rows about one step, of each expert and of a single network."""
    rows = (Quantity("loss", lambda step: step.losses), *rows_of_step(lambda step: step))
    group = rf"train/((?:{EXPERTS[1]}|{EXPERTS[0]})/|)"

    def of_file(row: Quantity) -> Quantity:
        compute = lambda file, name, *rest: row.compute(file.step(name), *rest)  # noqa: E731
        return replace(row, names=f"{group}{row.names}", compute=compute)

    return tuple(map(of_file, rows))


_EXPERT = f"({EXPERTS[1]}|{EXPERTS[0]})"

WAN = FileKind(
    signature=rf"{EXPERTS[1]}/.+|timestep_per_token|image_embeds|noise_latents",
    inputs="image|last_image|num_frames|x|text2?|negative_text|timestep|start|noise_latents|image_embeds|boundary_ratio"
    rf"|guidance(_2)?|shift|train/(x|noise)|train/({EXPERTS[1]}/|{EXPERTS[0]}/)?(sigma|timestep)",
    program=WanFile,
    rows=(
        Quantity(f"{_EXPERT}/output", WanFile.output),
        Quantity("output", WanFile.output),
        Quantity("output_one_t", lambda file: file.output(condition="")),
        Quantity("model_input", lambda file: file.model_input(0)),
        Quantity("timestep_per_token", lambda file: file.model_input(1)),
        Quantity("(mask|first_frame_mask)", WanFile.mask),
        Quantity("condition(_with_last_image)?", WanFile.condition, needs="--vae"),
        Quantity(r"tap/(condition_embedder)\.([0-3])", WanFile.tap),
        Quantity(r"tap/(.+)", WanFile.tap),
        *chain_rows("(sample(?:_text_only)?(?:/(?:one_guidance|unipc|with_last_image))?)"),
        Quantity(f"train/({EXPERTS[1]}/|{EXPERTS[0]}/|)x_t", WanFile.add_noise),
        Quantity(f"train/({EXPERTS[1]}/|{EXPERTS[0]}/|)output", WanFile.trained),
        Quantity("train/loss_all_frames", lambda file: evaluate(file.losses, file.network(), "", True)),
        Quantity(
            "train/loss_all_frames_after_one_adamw_step",
            lambda file: evaluate(file.losses, file.step("").network_after, "", True),
        ),
        *_rows_of_steps(),
    ),
)

"""Files of reference values of Wan 2.1 and 2.2, made by diffusers: two experts, and clips that begin with an image.

--checkpoint is a diffusers folder; with ``transformer/`` and ``transformer_2/`` in it, these are the two experts, whose
values are in groups of these names. --vae makes the latents of given frames.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.formats import diffusers
from mindspeed_mm_dit.configs.condition import FirstFrame
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.configs.wan import WanConfig
from mindspeed_mm_dit.configs.wan_flow import WanFlowConfig, shifted
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.models.frames import grey_between
from mindspeed_mm_dit.models.video_transformer import Wan
from mindspeed_mm_dit.objectives.flow import ode
from mindspeed_mm_dit.objectives.guidance import Guidance, by_noise_level, guided_network
from mindspeed_mm_dit.objectives.wan_flow.process import WanFlow
from mindspeed_mm_dit.objectives.wan_flow.schedule import euler_sigmas
from mindspeed_mm_dit.objectives.wan_flow.unipc import unipc
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    Given,
    Kind,
    Tensor,
    Weights,
    answer,
    config_of,
    loaded,
    watched,
)
from mindspeed_mm_dit.tools.verify.reference.step import Step, rows_of_step
from mindspeed_mm_dit.tools.verify.reference.video import TextToVideo, check_latents
from mindspeed_mm_dit.tools.verify.table import NotThere, Quantity, Rows

T = 1000
"""Times are noise levels times this."""
EXPERTS = ("transformer", "transformer_2")


class WanFile:
    """The quantities of a file."""

    def __init__(self, given: Given, weights: Weights) -> None:
        self.given, self.weights, self.folder = given, weights, Path(weights["--checkpoint"])
        self.by_token = "timestep_per_token" in given
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
        if not diffusers.fits(folder):
            raise CheckpointError(f"--checkpoint = {folder}", "is no diffusers folder of a network", FORMAT)
        said = {k: v for k, v in read_json(folder / "config.json", "--checkpoint").items() if not k.startswith("_")}
        said |= {"latent_size": said.get("patch_size"), "expand_timesteps": self.by_token}
        return config_of(WanConfig, said, f"{folder}/config.json"), diffusers.read(folder).weights

    def fresh_network(self, expert: str = "") -> Any:
        """Return a new network; the one in :attr:`network` never changes."""
        if expert not in self.experts:
            raise NotThere(f"--checkpoint = {self.folder} has no {expert}/" if expert else "name the expert")
        config, weights = self._described(expert)
        x = "x" if "x" in self.given else "start"
        shape = self.given[x].shape
        check_latents(config, x, (shape[0], min(shape[1], config.latent_channels), *shape[2:]))
        return loaded(Wan, config, weights, "--checkpoint")

    # What a network is given

    def frames(self, name: str, samples: int) -> Tensor:
        """Return mask and latents (B, M + C, F, H, W) of given frames; without ``name`` none are given."""
        size = self.given["noise_latents"].shape[2:]
        if not self.by_token:
            return _repeated(self.given[name], samples)
        found = np.zeros((1, 1 + self.given["noise_latents"].shape[1], *size), np.float32)
        if name:
            found[:, :1, :1] = 1
            found[:, 1:, :1] = self.given[name]
        return _repeated(found, samples)

    def beside(self, rows: slice | np.ndarray, condition: str) -> list[Tensor]:
        """Return the network's inputs besides latents, time and text, for ``rows`` of the file."""
        samples, found = len(self.given[self.text][rows]), []
        if "noise_latents" in self.given:
            found.append(self.frames(condition, samples))
        if "image_embeds" in self.given:
            found.append(ops.tensor(self.given["image_embeds"][rows]))
        return found

    @property
    def text(self) -> str:
        """Name of the text of two samples."""
        return "text2" if "text2" in self.given else "text"

    def inputs(self, condition: str = "condition") -> list[Tensor]:
        """Return the network's inputs for ``output``."""
        x, text = self.given["x"], self.given.tensor(self.text)
        rows = slice(len(x))
        beside = self.beside(rows, condition)
        if "image_embeds" in self.given:  # the file's x has the mask and the latents of given frames in it
            noise = self.given["noise_latents"].shape[1]
            beside[0], x = ops.tensor(x[:, noise:]), x[:, :noise]
        return [ops.tensor(x), self.given.tensor("timestep"), text, *beside]

    def output(self, expert: str = "", condition: str = "condition") -> Tensor:
        """Return the network's output."""
        return answer(self.network(expert), *self.inputs(condition))

    def adapted_starter(self, number: int) -> Tensor:
        """Return latents with the given frames in place (0), or the time of each token (1)."""
        x, t, _, frames = self.inputs()
        return self.network().insert_frames(x, t, frames)[number]

    def mask(self, shape: str) -> np.ndarray:
        """Return the mask of given frames; the file of times by token has 1 where nothing is given."""
        size = self.given["noise_latents"].shape[2:]
        mask = FirstFrame(size, 1 if self.by_token else 4).mask(size[0])[None, :, :, None, None]
        return np.broadcast_to(1 - mask if shape == "first_frame_mask" else mask, (1, *mask.shape[1:3], *size[1:]))

    def condition(self, last: str | None) -> Tensor:
        """Return the mask and the latents of given frames, or of one frame alone."""
        images = [self.given.tensor(name) for name in ("image", *(["last_image"] if last else []))]
        autoencoder = TextToVideo(self.given, self.weights).autoencoder
        frames = 1 if self.by_token else int(self.given["num_frames"])
        latents = ops.numpy(autoencoder.scaled(answer(grey_between, autoencoder, images, frames)))
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
        return watched(network, lambda: answer(network, *self.inputs()))

    def tap(self, module: str, part: str = "") -> np.ndarray:
        """Return the output of a module, or a ``part`` of it, in the shape that diffusers' has."""
        embedder = "condition_embedder.image_embedder"
        found = self.taps().get(embedder if part == "3" else module)
        if found is None:
            raise NotThere("")
        array = ops.numpy(found[int(part)] if isinstance(found, tuple) else found)
        if module == "patch_embedding":
            network = self.network(self.experts[0])
            (_, _, F, H, W), (p, q, r) = self.inputs()[0].shape, network.config.patch_size
            return array.reshape(len(array), F // p, H // q, W // r, -1).transpose(0, 4, 1, 2, 3)
        return array[:, 0] if part in ("0", "1") and array.shape[1] == 1 else array

    # Chains

    def sigmas(self, group: str) -> np.ndarray:
        """Return the noise levels of a chain; its number of steps is that of the file's timesteps."""
        shift, steps = float(self.given["shift"]), len(self.given[f"{group}/timesteps"])
        if not group.endswith("unipc"):
            lowest = float(shifted(np.array(1 / T), shift))
            return euler_sigmas(WanFlowConfig(shift=shift, sigma_min=lowest), steps)
        sigmas = shifted(1 - np.linspace(0, 1 - 1 / T, steps + 1)[:-1], shift)
        return np.append(np.minimum(sigmas, 1 - 1e-6), 0.0)

    def timesteps(self, group: str) -> np.ndarray:
        """Return the times of a chain; UniPC's are whole numbers."""
        times = T * self.sigmas(group)[:-1]
        return times.astype(np.int64) if group.endswith("unipc") else times

    def _ask(self, group: str, condition: str) -> Any:
        """Return the guided network, or the two experts, each with its guidance."""
        given = self.given
        if "negative_text" in given:
            text, negative, rows = given["text"], given["negative_text"], slice(len(given["text"]))
        else:
            text, negative, rows = given["text"][:1], given["text"][1:], slice(1)
        beside = [tensor[: len(text)] for tensor in self.beside(rows, condition)]
        first = float(given["guidance"])
        scales = (first, first if group.endswith("one_guidance") else float(given.get("guidance_2", first)))
        sides = [ops.tensor(text), *beside], [ops.tensor(negative), *beside]
        asks = [guided_network(self.network(name), *sides, Guidance(s)) for name, s in zip(self.experts, scales)]
        return asks[0] if len(asks) == 1 else by_noise_level(float(given["boundary_ratio"]), *asks)

    def _chain(self, group: str) -> list[np.ndarray]:
        """Return the state after each step."""
        condition = "" if group == "sample_text_only" else "condition"
        ask = self._ask(group, f"{condition}_with_last_image" if group.endswith("with_last_image") else condition)
        start = self.given.tensor("noise_latents" if "noise_latents" in self.given else "start")
        times = dict(zip(self.sigmas(group).tolist(), self.timesteps(group).tolist()))

        def velocity(x: Tensor, sigmas: np.ndarray) -> Tensor:
            t = np.array([times[sigma] for sigma in sigmas.tolist()], np.float32)
            return ask(x, ops.tensor(t), t / T)

        def data_at(x: Tensor, sigma: float) -> Tensor:
            return x - sigma * velocity(x, np.full(x.shape[0], sigma))

        with ops.no_grad():
            if group.endswith("unipc"):
                return [ops.numpy(state) for state in unipc(data_at, start, self.sigmas(group))]
            return [ops.numpy(state) for state in ode.integrate(ode.euler, velocity, start, self.sigmas(group))]

    def result(self, group: str) -> np.ndarray:
        """Return the last state, with a first frame that is given in its place."""
        last = self.chain(group)[-1]
        if self.by_token and group == "sample":
            last = np.concatenate([self.given["condition"].astype(np.float32), last[:, :, 1:]], 2)
        return last

    def expert_at(self, group: str) -> np.ndarray:
        """Return which expert answers at each step."""
        return (self.timesteps(group) < float(self.given["boundary_ratio"]) * T).astype(np.int64)

    # Training

    def _draws(self, expert: str) -> list[Tensor]:
        sigmas = self.given[f"train/{expert}sigma"]
        coefficients = np.stack([sigmas, np.ones_like(sigmas)], 1)
        return [ops.tensor(a) for a in (T * sigmas, self.given["train/noise"], coefficients)]

    def noised(self, expert: str = "") -> Tensor:
        """Return the noised latents."""
        x, draws = self.given.tensor("train/x"), self._draws(expert)
        noised = WanFlow(WanFlowConfig()).noised(x, *draws)
        return ops.cat([x[:, :, :1], noised[:, :, 1:]], 2) if self.by_token else noised

    def _answered(self, network: Any, expert: str) -> Tensor:
        draws, text = self._draws(expert), self.given.tensor(self.text)
        beside = self.beside(slice(len(self.given["train/x"])), "condition")
        if self.by_token:
            x = self.given["train/x"]
            beside[0] = ops.tensor(_at_first_frame(np.concatenate([np.ones_like(x[:, :1]), x], 1)))
        return network(self.noised(expert), draws[0], text, *beside)

    def trained(self, expert: str = "") -> Tensor:
        """Return the network's output at the noised latents."""
        return answer(self._answered, self.network(expert.rstrip("/")), expert)

    def _step(self, expert: str = "") -> Step:
        return Step(lambda: self.fresh_network(expert.rstrip("/")), lambda network: self.losses(network, expert))

    def losses(self, network: Any, expert: str = "", all_frames: bool = False) -> Tensor:
        """Return the loss of each sample, (B,); a first frame that is given does not count, unless ``all_frames``."""
        x = self.given["train/x"]
        known = None if all_frames or not self.by_token else ops.tensor(_at_first_frame(np.ones_like(x[:, :1])))
        inputs: list[Tensor] = [self.given.tensor("train/x"), self.noised(expert), *self._draws(expert)]
        process: Any = WanFlow(WanFlowConfig())
        return process.loss(self._answered(network, expert), *inputs, known)


def _at_first_frame(array: np.ndarray) -> np.ndarray:
    """Return ``array`` (B, C, F, H, W) with zeros in all frames but the first."""
    return np.concatenate([array[:, :, :1], np.zeros_like(array[:, :, 1:])], 2)


def _repeated(array: np.ndarray, samples: int) -> Tensor:
    return ops.tensor(np.repeat(array.astype(np.float32), samples // len(array), 0))


def chain_rows(group: str) -> Rows:
    """Return the rows about chains; ``group``: regular expression of the names of their groups."""
    return (
        Quantity(f"{group}/sigmas", WanFile.sigmas),
        Quantity(f"{group}/timesteps", WanFile.timesteps),
        Quantity(f"{group}/expert", WanFile.expert_at),
        Quantity(f"{group}/states", lambda file, name: np.stack(file.chain(name))),
        Quantity(f"{group}/result", WanFile.result),
    )


def _rows_of_steps() -> Rows:
    """Return the rows about one step, of each expert and of a single network."""
    rows = (
        Quantity("loss", lambda step: step.losses),
        *rows_of_step(lambda step: step),
    )
    group = rf"train/((?:{EXPERTS[1]}|{EXPERTS[0]})/|)"
    return tuple(
        replace(
            row,
            names=f"{group}{row.names}",
            compute=lambda file, name, *rest, row=row: row.compute(file.step(name), *rest),
        )
        for row in rows
    )


_EXPERT = f"({EXPERTS[1]}|{EXPERTS[0]})"

WAN = Kind(
    signature=rf"{EXPERTS[1]}/.+|timestep_per_token|image_embeds|noise_latents",
    inputs="image|last_image|num_frames|x|text2?|negative_text|timestep|start|noise_latents|image_embeds|boundary_ratio"
    rf"|guidance(_2)?|shift|train/(x|noise)|train/({EXPERTS[1]}/|{EXPERTS[0]}/)?(sigma|timestep)",
    program=WanFile,
    rows=(
        Quantity(f"{_EXPERT}/output", WanFile.output),
        Quantity("output", WanFile.output),
        Quantity("output_one_t", lambda file: file.output(condition="")),
        Quantity("model_input", lambda file: file.adapted_starter(0)),
        Quantity("timestep_per_token", lambda file: file.adapted_starter(1)),
        Quantity("(mask|first_frame_mask)", WanFile.mask),
        Quantity("condition(_with_last_image)?", WanFile.condition, needs="--vae"),
        Quantity(r"tap/(condition_embedder)\.([0-3])", WanFile.tap),
        Quantity(r"tap/(.+)", WanFile.tap),
        *chain_rows("(sample(?:_text_only)?(?:/(?:one_guidance|unipc|with_last_image))?)"),
        Quantity(f"train/({EXPERTS[1]}/|{EXPERTS[0]}/|)x_t", WanFile.noised),
        Quantity(f"train/({EXPERTS[1]}/|{EXPERTS[0]}/|)output", WanFile.trained),
        Quantity("train/loss_all_frames", lambda file: answer(file.losses, file.network(), "", True)),
        Quantity(
            "train/loss_all_frames_after_one_adamw_step",
            lambda file: answer(file.losses, file.step("").network_after, "", True),
        ),
        *_rows_of_steps(),
    ),
)  # fmt: skip

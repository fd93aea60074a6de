"""Files of reference values of adapters (LoRA) on Wan and on diffusers' DiT, with the folder of the adapters.

``wan_lora/output`` is Wan with the adapters of ``wan_lora/`` in the folder of --lora; ``loaded/kohya`` is Wan after
another program has loaded ``kohya.safetensors``. Names that begin with ``dit`` belong to the DiT in ``dit/``;
``transformer`` and ``transformer_2`` are the two experts of Wan 2.2 in --checkpoint, with the inputs of its own file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_mm_dit.checkpoint.lora import Adapter
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.limits import shorten_repr
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework import nn, ops, runtime
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.integrations.formats import families, lora_files
from mindspeed_mm_dit.integrations.formats.config_json import check_declared_sizes, read_dit_config
from mindspeed_mm_dit.integrations.formats.diffusers_folder import diffusers_frequencies
from mindspeed_mm_dit.integrations.formats.families import DIT_RULES
from mindspeed_mm_dit.integrations.formats.lora_names import diffusers_rules
from mindspeed_mm_dit.models.dit import DiT, LabelEmbedder
from mindspeed_mm_dit.models.layers import TimestepEmbedder, add_lora, unpatchify
from mindspeed_mm_dit.models.positions import FREQUENCY_WIDTH
from mindspeed_mm_dit.tools.verify.reference.file import (
    FORMAT,
    FileKind,
    OptimizerStep,
    ReferenceArrays,
    Tensor,
    Weights,
    evaluate,
    norm,
    read_arrays,
)
from mindspeed_mm_dit.tools.verify.reference.image_transformers import MODULES, ImageTransformer
from mindspeed_mm_dit.tools.verify.reference.video import TextToVideo, check_latents
from mindspeed_mm_dit.tools.verify.reference.wan import EXPERTS, WanFile, chain_rows
from mindspeed_mm_dit.tools.verify.table import FORWARD, GRADIENTS, Bound, Quantity, UnknownQuantity

ADAMW_LR = 1e-3
"""Learning rate of the step; only A and B take it."""
LORA_GRADIENTS = Bound(
    f"{GRADIENTS.why} Those of A and B pass through the other one besides; where queries and keys are small, as in the "
    "embedded files, two right programs were measured at 1.3e-5.",
    least=lambda reference: 3e-5,
)
NO_CHANGE = Bound("B is zero at the start, so the output must not change at all.", is_exact=True)


class DiffusersDiT(nn.Module):
    """DiT as diffusers builds it, from our modules: each block has a separate embedding of time and label.

    The last layer uses the embedding of block 0. Frequencies are spaced by 1/127, and the norm before a feed-forward
    has a different eps.
    """

    def __init__(self, config: DiTConfig, norm_eps: float) -> None:
        super().__init__()
        self.dit = DiT(config)
        for block in self.dit.blocks:
            block.norm2 = nn.LayerNorm(config.hidden_size, eps=norm_eps, elementwise_affine=False)
        blocks = range(config.num_layers)
        self.times = nn.ModuleList([TimestepEmbedder(config.hidden_size) for _ in blocks])
        self.labels = nn.ModuleList([LabelEmbedder(config.num_embeddings, config.hidden_size) for _ in blocks])
        for embedder in self.times:
            nn.set_constant(embedder, "frequencies", (FREQUENCY_WIDTH // 2,), diffusers_frequencies)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """Predict; x: (B, C, H, W), t and y: (B,)."""
        c = [time(t) + label(y) for time, label in zip(self.times, self.labels)]  # (B, D) each
        x = self.dit.x_embedder(x) + self.dit.pos_embed  # (B, N, D)
        for block, condition in zip(self.dit.blocks, c):
            x = block(x, condition)  # (B, N, D)
        grid = (self.dit.base, self.dit.base)
        return unpatchify(self.dit.final_layer(x, c[0]), grid, self.dit.config.patch_size)  # (B, out_channels, H, W)


_PER_BLOCK = {"t_embedder": "times", "y_embedder": "labels"}
"""Embedders of the published DiT -> those of a :class:`DiffusersDiT`, one for each block."""


def _from_diffusers(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the weights of a :class:`DiffusersDiT` from a file of diffusers."""
    values = families.to_original(arrays, [_per_block_rule(rule) for rule in DIT_RULES])
    apart = tuple(f"{name}." for name in _PER_BLOCK.values())
    return {name if name.startswith(apart) else f"dit.{name}": array for name, array in values.items()}


def _per_block_rule(rule: families.NameRule) -> families.NameRule:
    module, _, layer = rule.original.partition(".")
    return families.NameRule(f"{_PER_BLOCK[module]}.*.{layer}", rule.diffusers) if module in _PER_BLOCK else rule


class BaseNetwork:
    """A network without adapters, its inputs, and copies with adapters; ``prefix`` precedes our names in it."""

    prefix = ""

    def __init__(self, file: LoraValues, group: str) -> None:
        self.file, self.arrays, self.group = file, file.arrays, group
        names = ("x", "t", *self.conditions)
        for name in names:
            self.arrays.check_shape(
                f"{group}/{name}", (len(self.arrays[f"{group}/x"]), *[None] * (self._axes(name) - 1))
            )

    conditions: tuple[str, ...]
    per_sample = False
    """Whether the file has a loss for each sample, and not their mean."""

    def _axes(self, name: str) -> int:
        return self.arrays[f"{self.group}/{name}"].ndim

    def fresh(self) -> Any:
        """Return a new network, whose weights may change."""
        raise NotImplementedError

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by our names."""
        values = {name: ops.numpy(p) for name, p in self.fresh().named_parameters()}
        return {name.removeprefix(self.prefix): array for name, array in values.items()}

    @cached_property
    def layers(self) -> list[str]:
        """Names of the linear layers."""
        return [n.removesuffix(".weight") for n, a in self.weights.items() if n.endswith(".weight") and a.ndim == 2]

    def predict(self, network: Any) -> Tensor:
        """Return the output of ``network`` for the inputs of the file."""
        return network(*(self.arrays.tensor(f"{self.group}/{name}") for name in ("x", "t", *self.conditions)))

    def losses(self, network: Any) -> Tensor:
        """Return the loss of each sample, (B,)."""
        difference = self.predict(network) - self.arrays.tensor(self.target)
        return ops.mean_per_sample(difference * difference)

    @property
    def target(self) -> str:
        """Name of the target of the network's output."""
        return f"{self.group}/target"

    def adapted(self, adapter: Adapter) -> Any:
        """Return the network with ``adapter`` unmerged; only A and B are trained."""
        network = self.fresh()
        for _, parameter in network.named_parameters():
            parameter.requires_grad = False
        add_lora(network, {f"{self.prefix}{name}": lora for name, lora in adapter.specs().items()})
        values = {name: ops.numpy(p) for name, p in network.named_parameters()}
        values |= {f"{self.prefix}{name}": array for name, array in adapter.arrays().items()}
        runtime.load_arrays(network, values)
        return runtime.jit_forward(runtime.to_runtime_device(network))

    def merged(self, adapter: Adapter, strength: float) -> Any:
        """Return the network with ``adapter`` merged into its weights."""
        network = self.fresh()
        values = adapter.merged(self.weights, strength)
        runtime.load_arrays(network, {f"{self.prefix}{name}": array for name, array in values.items()})
        return runtime.jit_forward(runtime.to_runtime_device(network))


class WanBase(BaseNetwork):
    """Wan, from --checkpoint."""

    conditions = ("text",)

    def fresh(self) -> Any:
        network = TextToVideo(self.arrays, {"--wan": self.file.weights["--checkpoint"]}).fresh_network("wan")
        check_latents(network.config, f"{self.group}/x", self.arrays[f"{self.group}/x"].shape)
        return network


class ExpertBase(BaseNetwork):
    """An expert of Wan 2.2, from --checkpoint."""

    per_sample, target = True, "target"

    def __init__(self, file: LoraValues, group: str) -> None:
        self.file, self.group, self.values = file, group, file.experts()
        self.arrays = self.values.arrays

    def fresh(self) -> Any:
        return self.values.fresh_network(self.group)

    def predict(self, network: Any) -> Tensor:
        return network(*self.values.inputs())


class ImageBase(BaseNetwork):
    """An image transformer, from --checkpoint."""

    per_sample = True

    def __init__(self, file: LoraValues, group: str) -> None:
        self.arrays = ReferenceArrays({**file.base_arrays(), **file.arrays, "train/noise": file.arrays["noise"]})
        self.program = ImageTransformer(self.arrays, file.weights)

    def fresh(self) -> Any:
        return self.program.fresh_network()

    def predict(self, network: Any) -> Tensor:
        x, t, condition = self.program.inputs
        return self.program.family.like_theirs(network(x, t, *condition))

    def losses(self, network: Any) -> Tensor:
        return self.program.at.losses(network)


class DiTBase(BaseNetwork):
    """diffusers' DiT, from the folder ``dit/`` next to the adapters."""

    conditions, prefix = ("y",), "dit."

    def fresh(self) -> Any:
        folder = self.file.folder / self.group
        section, what = read_json(folder / "config.json", "--lora"), f"{folder}/config.json"
        config, norm_eps = read_dit_config(section, folder), section.get("norm_eps", 1e-5)
        check_declared_sizes(config, what)
        if not isinstance(norm_eps, float):
            raise CheckpointError(f"{what} has norm_eps = {shorten_repr(norm_eps)}, which must be a number. {FORMAT}")
        arrays = read_safetensors_file(folder / "diffusion_pytorch_model.safetensors")[0]
        network, values = DiffusersDiT(config, norm_eps), _from_diffusers(arrays)
        initial = {name: ops.numpy(p) for name, p in network.named_parameters()}
        optional = tuple(f"dit.{name}" for name in ("pos_embed", *_PER_BLOCK))
        if missing := [name for name in initial if name not in values and not name.startswith(optional)]:
            raise CheckpointError(f"{folder} lacks {missing[0]}. Copy the folder again.")
        runtime.load_arrays(network, initial | values)  # (positional embeddings and unused embedders keep their values)
        return runtime.jit_forward(runtime.to_runtime_device(network))


class LoraValues:
    """The quantities of a file."""

    def __init__(self, arrays: ReferenceArrays, weights: Weights) -> None:
        if "--lora" not in weights:
            raise CheckpointError(
                "--lora is required, because the values of the file are those of adapters. Name the folder of these."
            )
        self.arrays, self.weights, self.folder = arrays, weights, Path(weights["--lora"])
        self.base = cache(self._base)
        self.adapter = cache(self._adapter)
        self.adapted = cache(lambda name: self.base(name).adapted(self.adapter(name)))
        self.step = cache(self._step)
        self.chains = cache(self.experts)

    def _base(self, name: str) -> BaseNetwork:
        if name in EXPERTS:
            return ExpertBase(self, name)
        if "train/sigma" in self.arrays:
            return ImageBase(self, name)
        is_dit = name.startswith("dit")
        return DiTBase(self, "dit") if is_dit else WanBase(self, "wan")

    def _adapter(self, name: str) -> Adapter:
        path = self.folder / name
        if not path.exists():
            path = self.folder / f"{name}.safetensors"
        if not path.exists():
            raise UnknownQuantity(f"--lora = {self.folder} has neither {name}/ nor {name}.safetensors.")
        return lora_files.read(path, self.base(name).layers)

    def _step(self, name: str) -> OptimizerStep:
        base = self.base(name)
        return OptimizerStep(lambda: base.adapted(self.adapter(name)), base.losses, ADAMW_LR)

    def base_arrays(self) -> ReferenceArrays:
        """Return the file of values of the base, whose inputs these values have."""
        return read_arrays(Path(f"{str(self.weights['--checkpoint']).rstrip('/')}.npz"))

    def experts(self) -> WanFile:
        """Return the file of the two experts, which samples with the adapters."""
        file = WanFile(
            ReferenceArrays({**({} if "x" in self.arrays else self.base_arrays()), **self.arrays}), self.weights
        )
        file.network = self.adapted
        return file

    def loss(self, name: str, after: bool = False) -> np.ndarray:
        """Return the loss, of each sample for an expert, before or ``after`` the step."""
        step = self.step(name)
        losses = (step.losses_after if after else step.losses).astype(np.float64)
        return losses if self.base(name).per_sample else losses.mean()

    def without(self, name: str = "") -> Tensor:
        """Return the output of the base."""
        base = self.base(name)
        return evaluate(base.predict, runtime.jit_forward(base.fresh()))

    def output(self, name: str) -> Tensor:
        """Return the output of the base with unmerged adapters."""
        return evaluate(self.base(name).predict, self.adapted(name))

    def merged(self, name: str, strength: str | None = None) -> Tensor:
        """Return the output of the base with the adapters merged into its weights, ``strength`` times."""
        base = self.base(name)
        return evaluate(base.predict, base.merged(self.adapter(name), float(strength or 1)))

    def change_at_first(self, name: str) -> np.ndarray:
        """Return the largest change of the output by untrained adapters, whose B is zero."""
        base, adapter = self.base(name), self.adapter(name)
        untrained = {layer: lora._replace(up=np.zeros_like(lora.up)) for layer, lora in adapter.layers.items()}
        there = ops.numpy(evaluate(base.predict, base.adapted(Adapter(untrained))))
        return np.abs(there - ops.numpy(self.without(name))).max()

    def gradient(self, name: str, parameter: str) -> np.ndarray:
        """Return the norm of the gradient of an A or B by its name in the file; its layer may be a part of ours."""
        layer, _, matrix = parameter.removesuffix(".weight").rpartition(".")
        base, adapter = self.base(name), self.adapter(name)
        for ours, (_, theirs, _) in diffusers_rules(adapter.layers).items():
            if layer in theirs and matrix in ("lora_A", "lora_B"):
                gradient = self.step(name).gradients[f"{base.prefix}{ours}.{matrix}.weight"]
                return norm(_part(gradient, adapter.layers[ours].up, matrix, theirs.index(layer), len(theirs)))
        raise UnknownQuantity(f"The adapters are on layers such as {', '.join(list(adapter.layers)[:3])}.")


def _part(gradient: np.ndarray, up: np.ndarray, matrix: str, number: int, count: int) -> np.ndarray:
    """Return the part of a gradient for one of the ``count`` matrices in a layer: the columns that its B uses."""
    used = np.split(up, count)[number].any(axis=0)
    return gradient[used] if matrix == "lora_A" else np.split(gradient, count)[number][:, used]


_NAME = r"([^/]+)"

LORA = FileKind(
    signature=r"loaded/.+|[^/]+/grad_norm/.+\.lora_[AB]\.weight",
    inputs=r"rank|alpha|target|[^/]+/(x|t|y|text|target)",
    program=LoraValues,
    rows=(
        Quantity(rf"{_NAME}/output_base", LoraValues.without),
        Quantity(rf"{_NAME}/output", LoraValues.output),
        Quantity(rf"{_NAME}/output_fused", LoraValues.merged),
        Quantity(rf"{_NAME}/output_strength(-?\d+(?:\.\d*)?)", LoraValues.merged),
        Quantity(rf"loaded/{_NAME}", LoraValues.output),
        *(
            replace(row, compute=lambda file, *group, row=row: row.compute(file.chains(), *group))
            for row in chain_rows("(loaded/sample)")
        ),
        Quantity(rf"{_NAME}/at_init/max_change", LoraValues.change_at_first, NO_CHANGE),
        Quantity(rf"{_NAME}/loss", LoraValues.loss, FORWARD),
        Quantity(rf"{_NAME}/loss_after_one_adamw_step", lambda file, name: file.loss(name, after=True)),
        Quantity(rf"{_NAME}/grad_norm/(.+)", LoraValues.gradient, LORA_GRADIENTS),
    ),
)

IMAGE_LORA = replace(
    LORA,
    signature="output_base",
    inputs=r"rank|alpha|noise|train/(sigma|timestep|guidance)",
    rows=(
        Quantity("output_base", LoraValues.without),
        Quantity(rf"loaded/{_NAME}", LoraValues.output, MODULES),
        *LORA.rows,
    ),
)
"""Adapters of an image transformer, whose file of values is next to --checkpoint."""

"""Our predictors, objectives and autoencoders for MindSpeed-MM's own scripts, and ``register`` for its tables.

    from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register import register
    register()

Afterwards a model.json of the host may name our ``model_id``s. ``run`` registers them and starts a script.

The classes have the signatures that SoRAModel calls. Labels, or the states of a text, are passed as ``prompt``. A batch
may carry its random numbers as ``drawn_timesteps``, ``drawn_noise`` and so on (SoRAModel uses the plain names itself);
otherwise the diffusion generates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.training import get_args
from mindspeed_mm.models.ae.base import AE_MODEL_MAPPINGS
from mindspeed_mm.models.diffusion.diffusion_model import DIFFUSION_MODEL_MAPPINGS
from mindspeed_mm.models.predictor.predict_model import PREDICTOR_MODEL_MAPPINGS
from torch import Tensor

from mindspeed_mm_dit.configs.model import AE_CONFIGS, PREDICTOR_CONFIGS
from mindspeed_mm_dit.configs.predictor import PredictorConfig
from mindspeed_mm_dit.configs.strict import from_mapping
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.composite import restore
from mindspeed_mm_dit.integrations.mindspeed_mm.real_memory import real_memory
from mindspeed_mm_dit.models.autoencoder import to_images
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.registry import AUTOENCODERS, network_class
from mindspeed_mm_dit.objectives.registry import OBJECTIVES

HOST_KEYS = ("from_pretrained", "dtype", "num_heads")
"""Keys of a section that the host's factories read themselves."""


def _config(cls: type, section: Mapping[str, Any], name: str, host_keys: tuple[str, ...] = HOST_KEYS) -> Any:
    fields = {field.name for field in dataclasses.fields(cls)}
    settings = {key: value for key, value in section.items() if key in fields or key not in host_keys}
    return from_mapping(cls, settings, f"model.json: {name}")


class SoRAPredictor(torch.nn.Module):
    """Mixin that gives a predictor of ours the interface that SoRAModel calls."""

    config_class: type
    """Config class of its section of model.json."""

    def __init__(self, **section: Any) -> None:
        super().__init__(_config(self.config_class, section, "predictor"))
        if self.config.conditions.frames is not None:
            raise ConfigError(
                f"predictor.model_id = {self.config.model_id!r} takes frames as a condition, which the scripts of "
                "MindSpeed-MM do not support. Use pretrain_dit.py."
            )
        self._axes = [array.ndim for array in self.config.conditions.examples(1).values()]
        self._constants = {name: buffer.clone() for name, buffer in self.named_buffers()}
        if not any(parameter.is_meta for parameter in self.parameters()):
            self._fill()

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Do nothing: there is no earlier pipeline stage."""

    def smart_apply(self, initialise: Callable[..., Any]) -> SoRAPredictor:
        """Fill a model that was built on the meta device; the host would initialise everything at random."""
        self._fill()
        restore(self, self._constants)
        return self

    def forward(self, x: Tensor, timestep: Tensor, prompt: Any, **_: Any) -> Tensor:
        """Predict at (x, timestep) for labels or states of a text as ``prompt``, or a list, one for each condition.

        Masks and shapes of the host are ignored: a network that masks padding recognises it by its zero states.
        """
        return super().forward(x, timestep, *_condition_tensors(prompt, self._axes)).float()

    def _fill(self) -> None:
        runtime.load_arrays(self, initial_weights(parameters_of(self.config), get_args().seed))


def predictor_class(kind: type[PredictorConfig]) -> type:
    """Return the network of a section ``predictor`` with the interface that SoRAModel calls."""
    network = network_class(kind)
    return type(f"SoRA{network.__name__}", (SoRAPredictor, network), {"config_class": kind, "__module__": __name__})


def _condition_tensors(prompt: Any, axes: Sequence[int]) -> list[Tensor]:
    """Return the condition tensors, with ``axes`` dimensions each, from the host's prompts: labels, text states, pooled
    texts.

    Raises:
        DataError: the number of prompts differs from the number of conditions.
    """
    prompts = prompt if isinstance(prompt, (list, tuple)) else [prompt]
    if len(prompts) != len(axes):
        raise DataError(
            f"prompt_ids of a batch holds {len(prompts)} prompt(s), and the predictor takes {len(axes)} condition(s). "
            "Pass a list with one entry per condition, in the predictor's order."
        )
    sizes: dict[int, Any] = {1: lambda x: (-1,), 2: lambda x: (len(x), -1), 3: lambda x: (len(x), -1, x.shape[-1])}
    # (with a single encoder the host passes (B, 1, L, D))
    return [x.reshape(sizes[count](x)) for x, count in zip(prompts, axes)]


class SoRADiffusion:
    """An objective with SoRAModel's interface of a diffusion."""

    def __init__(self, **section: Any) -> None:
        self.objective = OBJECTIVES[section["model_id"]]
        self.config = _config(self.objective.config, section, "diffusion")
        self.process = self.objective.build(self.config)
        self._draws: tuple[Tensor, ...] = ()

    def q_sample(
        self, x_start: Tensor, model_kwargs: Mapping[str, Any] | None = None, mask: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (noised latents, noise, timesteps) for latents (B, C, ...)."""
        names, kwargs = self.process.draw_names, model_kwargs or {}
        draws = {name: kwargs[f"drawn_{name}"] for name in names if kwargs.get(f"drawn_{name}") is not None}
        if 0 < len(draws) < len(names):  # the missing ones would be generated for other timesteps
            missing = ", ".join(f"drawn_{name}" for name in names if name not in draws)
            raise DataError(
                f"A batch has {', '.join(f'drawn_{name}' for name in draws)} and lacks {missing}. Store all random "
                "numbers of the objective in the features, or none."
            )
        if not draws:
            sample_indices = torch.randint(2**62, (x_start.shape[0],)).numpy()
            arrays = self.objective.draws(self.config, get_args().seed, sample_indices, tuple(x_start.shape[1:]))
            draws = {name: torch.from_numpy(array) for name, array in arrays.items()}
        t, noise, *rest = (draws[name].to(x_start.device) for name in names)
        self._draws = (t.reshape(-1), noise, *rest)
        self.process.to(x_start.device)  # not a submodule of SoRAModel, which would cast or empty its tables
        return self.process.add_noise(x_start, *self._draws), noise, self._draws[0]

    def training_losses(
        self, model_output: Tensor, x_start: Tensor, x_t: Tensor, noise: Tensor, t: Tensor, **_: Any
    ) -> Tensor:
        """Return the loss of each sample, (B,), in the batch that was noised last."""
        return self.process.loss(model_output, x_start, x_t, *self._draws)


class SoRAAutoencoder:
    """One of our autoencoders with the interface of the host's AEModel; its weights are not part of the model."""

    def __init__(self, **section: Any) -> None:
        self.config = _config(AE_CONFIGS[section["model_id"]], section, "ae", host_keys=("dtype",))
        with real_memory():
            self.autoencoder = AUTOENCODERS[self.config.model_id].build(self.config)

    def encode(self, x: Tensor) -> Tensor:
        """Encode images (B, 3 or 1, H, W), uint8 or in [-1, 1], to scaled latents; a posterior is sampled."""
        images = x if x.is_floating_point() else to_images(x)
        noise = None
        if self.config.samples_posterior:
            noise = torch.randn(x.shape[0], *self.config.latent_shape(tuple(x.shape[2:])), device=x.device)
        return self.autoencoder.encode(images, noise)

    def decode(self, x: Tensor) -> Tensor:
        """Decode scaled latents to images, about in [-1, 1]."""
        return self.autoencoder.decode(x)


_OUR_OBJECTIVES = [name for name in OBJECTIVES if name != "wan_flow_match_scheduler"]
"""Objectives that the host does not have itself."""
_OUR_AUTOENCODERS = [name for name, kind in AUTOENCODERS.items() if 2 in kind.config.pixel_axes]
"""Autoencoders of images."""
_OUR_PREDICTORS = {name: predictor_class(kind) for name, kind in PREDICTOR_CONFIGS.items()}

OURS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("PREDICTOR_MODEL_MAPPINGS", PREDICTOR_MODEL_MAPPINGS, _OUR_PREDICTORS),
    ("DIFFUSION_MODEL_MAPPINGS", DIFFUSION_MODEL_MAPPINGS, dict.fromkeys(_OUR_OBJECTIVES, SoRADiffusion)),
    ("AE_MODEL_MAPPINGS", AE_MODEL_MAPPINGS, dict.fromkeys(_OUR_AUTOENCODERS, SoRAAutoencoder)),
)
"""(name of the host's table, the table, our entries)."""


def register() -> None:
    """Add our entries to the host's tables; may be called repeatedly.

    Raises:
        ConfigError: another plugin or the host has taken one of the names; then nothing has been added.
    """
    for name, table, entries in OURS:
        for model_id, ours in entries.items():
            entry = table.get(model_id, ours)
            if entry is not ours:
                raise ConfigError(
                    f"mindspeed_mm {name}[{model_id!r}] is taken by {entry.__module__}.{entry.__qualname__}. Unload "
                    "the other plugin; a foreign entry is never replaced."
                )
    for _, table, entries in OURS:
        table.update(entries)

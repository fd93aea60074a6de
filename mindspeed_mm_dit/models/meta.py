"""Parameters and cost of a predictor's network, found by building and running it on the meta backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from traceback import walk_tb
from typing import Any

from mindspeed_mm_dit.configs.fsdp2 import ComputeMode
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.predictor import ParameterSpecs, PredictorConfig
from mindspeed_mm_dit.configs.tuning import FULL_TUNING, LoraSpec, TunedModelConfig, Tuning
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework.meta import nn, ops
from mindspeed_mm_dit.framework.meta.nn import meta_reference
from mindspeed_mm_dit.framework.meta.tensor import ForwardCost, Tensor, recording

_FRAMEWORK_ATTRIBUTES = ("named_parameters", "parameters_and_names", "requires_grad")
"""Attributes of PyTorch's modules, of MindSpore's cells, and of tensors of both."""


def parameters_of(model: ModelConfig | PredictorConfig) -> ParameterSpecs:
    """Return the parameters of a network; those of a model as it is tuned: adapters added, frozen ones marked."""
    return _tuned_parameters(*_parts(model))


def lora_specs(model: ModelConfig) -> Mapping[str, LoraSpec]:
    """Return the adapter of each adapted layer, by layer name."""
    predictor, tuning = _parts(model)
    return dict.fromkeys(tuning.layers(_declared(predictor)), tuning.lora_spec)


def with_tuning(model: ModelConfig, tuning: Tuning) -> ModelConfig:
    """Return ``model`` with ``tuning``, its sets of layers expanded; unchanged if the tuning has no patterns.

    Raises ConfigError for patterns that match nothing in it.
    """
    if tuning == FULL_TUNING:
        return model
    tuned_model = TunedModelConfig.of(model, tuning.spelled_out(_declared(model.predictor)))
    parameters_of(tuned_model)
    return tuned_model


def multiply_adds(predictor: PredictorConfig) -> int:
    """Return the multiply-adds of one forward pass of one sample, without elementwise work, as published counts."""
    return forward_pass(predictor).multiply_adds


def forward_pass(model: ModelConfig | PredictorConfig, mode: ComputeMode | None = None, ranks: int = 1) -> ForwardCost:
    """Return the cost of a forward pass of one sample on one of ``ranks`` context-parallel ranks, in ``mode``."""
    return _forward_pass(*_parts(model), mode, ranks)


def _parts(model: ModelConfig | PredictorConfig) -> tuple[PredictorConfig, Tuning]:
    if isinstance(model, ModelConfig):
        return model.predictor, model.tuning if isinstance(model, TunedModelConfig) else FULL_TUNING
    return model, FULL_TUNING


@lru_cache(maxsize=64)
def _declared(predictor: PredictorConfig) -> ParameterSpecs:
    network = _network(predictor)
    lists = {name: module for name, module in network.named_modules() if isinstance(module, nn.Blocks)}
    blocks = tuple(f"{name}.{number}" for name, module in lists.items() for number in range(len(module)))
    return ParameterSpecs({name: parameter.declared for name, parameter in network.named_parameters()}, blocks)


@lru_cache(maxsize=64)
def _tuned_parameters(predictor: PredictorConfig, tuning: Tuning) -> ParameterSpecs:
    return tuning.applied(_declared(predictor))


@lru_cache(maxsize=256)
def _forward_pass(predictor: PredictorConfig, tuning: Tuning, mode: ComputeMode | None, ranks: int) -> ForwardCost:
    network = _network(predictor)
    if tuning.targets:
        adapters = dict.fromkeys(tuning.layers(_declared(predictor)), tuning.lora_spec)
        meta_reference("mindspeed_mm_dit.models.layers:add_lora")(network, adapters)
    declared = _tuned_parameters(predictor, tuning)
    for name, parameter in network.named_parameters():
        parameter.needs_gradient = declared[name].trained
        parameter.dtype = "bfloat16" if mode == "fsdp2" else "float32"
    times = () if predictor.num_time_inputs == 1 else (predictor.num_time_inputs,)
    conditions = [ops.tensor(array) for array in predictor.conditions.meta_arrays().values()]
    options: dict[str, Any] = {"project": True} if predictor.z_dims else {}
    inputs = ", ".join(f"{name} {(1, *a.shape[1:])}" for name, a in predictor.conditions.meta_arrays().items())
    signature = f"network(x_t {(1, *predictor.latent_shape)}, t {(1, *times)}{inputs and ', ' + inputs})"
    with _named_errors(predictor, signature), recording(ForwardCost(autocast=mode == "autocast", ranks=ranks)) as trace:
        output = network(Tensor((1, *predictor.latent_shape)), Tensor((1, *times)), *conditions, **options)
    _check_output(predictor, output[0] if isinstance(output, tuple) else output)
    return trace


def _network(predictor: PredictorConfig) -> Any:
    kind = meta_reference(predictor.network)
    with _named_errors(predictor, f"{kind.__name__}(config)"):
        network = kind(predictor)
    _check_layers(predictor, network)
    return network


def _check_layers(predictor: PredictorConfig, network: Any) -> None:
    """Raise ConfigError if a network, or a part of it, is a module or a tensor of PyTorch or MindSpore itself."""
    parts = {"the network": network}
    if isinstance(network, nn.Module):
        modules = network.named_modules()
        parts = {
            f"{name}.{part}".lstrip("."): value for name, module in modules for part, value in vars(module).items()
        }
    for name, value in parts.items():
        is_foreign = value is network or any(hasattr(value, attribute) for attribute in _FRAMEWORK_ATTRIBUTES)
        if isinstance(value, nn.Module) or not is_foreign:
            continue
        bases = (base for base in type(value).__mro__ if base.__module__.partition(".")[0] in ("torch", "mindspore"))
        kind = next(bases, type(value))
        raise ConfigError(
            f"{name} in {predictor.network}, the network of predictor {predictor.model_id!r}, is a "
            f"{kind.__module__}.{kind.__qualname__}, but plans, initial weights and checkpoints need layers of "
            "mindspeed_mm_dit.framework. Replace `from torch import nn` by `from mindspeed_mm_dit.framework import "
            "nn, ops`; the layers have the same names (docs/extending.md, A predictor)."
        )


@contextmanager
def _named_errors(predictor: PredictorConfig, signature: str) -> Iterator[None]:
    """Turn an error of a network on the meta backend into one that names its line and the ``signature`` called."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        module_name = f"{predictor.network.partition(':')[0]} on the meta backend"
        lines = [
            f"line {line}" for frame, line in walk_tb(error.__traceback__) if frame.f_globals["__name__"] == module_name
        ]
        raise ConfigError(
            f"{predictor.network}, the network of predictor {predictor.model_id!r}, fails on the meta backend, in "
            f"{''.join(lines[-1:]) or 'its call'}. It is called as {signature}, with the nn and ops of "
            "mindspeed_mm_dit.framework, which mindspeed_mm_dit/framework/contract.py lists. The error was "
            f"{type(error).__name__}: {error}"
        ) from error


def _check_output(predictor: PredictorConfig, output: Any) -> None:
    """Raise ConfigError unless a network's output has the shape in its config: a loss would broadcast any other."""
    shape, expected = getattr(output, "shape", None), (1, predictor.out_channels, *predictor.latent_shape[1:])
    if shape is None or tuple(shape) != expected:
        actual = type(output).__name__ if shape is None else tuple(shape)
        raise ConfigError(
            f"{predictor.network}, the network of predictor {predictor.model_id!r}, returns {actual} for a sample, but "
            f"its config says {expected}. Correct its last layer, or out_channels and latent_shape of its config."
        )

"""Small parts of every kind that a registry holds, found by their config classes: a new part is tested unasked."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from typing import Any

from mindspeed_mm_dit.configs.model import DIFFUSION_CONFIGS, PREDICTOR_CONFIGS, ModelConfig, PixelConfig
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.errors import ConfigError

CHANNELS = 3
"""Of the latents: what a micro-batch must not be taken for."""
WIDTH = 8
"""Of what a network has or has not, such as the states of a caption that it looks at."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def objectives() -> list[Any]:
    """Every objective with every combination of what can be chosen by a word."""
    found = []
    for kind in DIFFUSION_CONFIGS.values():
        words = _words(kind)
        found += [config for chosen in itertools.product(*words.values()) for config in _made(kind, zip(words, chosen))]
    return found


def predictors(choices_at_once: int = 1) -> list[Any]:
    """Every predictor at about its smallest sizes: as it is, and for each word, switch and width of output, so many of
    which differ at once."""
    found = []
    for kind in PREDICTOR_CONFIGS.values():
        small = _small(kind)
        choices = _words(kind, switches=True)
        if "out_channels" in small:
            choices["out_channels"] = (2 * CHANNELS,)
        each = [{name: value} for name, values in choices.items() for value in values]
        several = itertools.combinations(each, choices_at_once)
        others = [small | dict(itertools.chain(*(one.items() for one in some))) for some in several]
        found += [_with_several_tokens(config) for settings in (small, *others) for config in _made(kind, settings)]
    return list(dict.fromkeys(found))


def models() -> list[ModelConfig]:
    """Every predictor with every objective, in the first form that its output fits."""
    found: dict[Any, ModelConfig] = {}
    encoders = (None, UMT5Config("not read"))
    for predictor, diffusion, encoder in itertools.product(predictors(), objectives(), encoders):
        sections = {"predictor": predictor, "diffusion": diffusion, "text_encoder": encoder}
        for model in _made(ModelConfig, {"ae": PixelConfig(CHANNELS), **sections}):
            found.setdefault((predictor, diffusion.model_id), model)
    tried = {model_id for _, model_id in found}
    wanting = [diffusion for diffusion in objectives() if diffusion.model_id not in tried]  # two settings at once
    for predictor, diffusion in itertools.product(predictors(2), wanting):
        sections = {"predictor": predictor, "diffusion": diffusion}
        for model in _made(ModelConfig, {"ae": PixelConfig(CHANNELS), **sections}):
            found.setdefault((predictor, diffusion.model_id), model)
    return list(found.values())


def name_of(*sections: Any) -> str:
    """The words of sections of a model.json, for the name of a test."""
    words = [
        [section.model_id, *(str(getattr(section, name)) for name in _words(type(section)))] for section in sections
    ]
    return "-".join(itertools.chain(*words))


def _small(kind: type) -> dict[str, Any]:
    """Return each number of ``kind`` as small as the class lets it be, one after the other."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    small = {name: 4 for name, default in fields.items() if default is dataclasses.MISSING}
    small |= {name: CHANNELS for name in ("in_channels", "out_channels") if name in fields}
    for name, default in fields.items():
        if name not in small and type(default) in (int, tuple):
            sizes = SIZES if type(default) is int else [(size,) * len(default) for size in SIZES]
            small[name] = next((size for size in sizes if _made(kind, small | {name: size})), default)
    return small


def _with_several_tokens(predictor: Any) -> Any:
    try:
        return predictor.resized((predictor.in_channels, *(2 * size for size in predictor.latent_shape[1:])))
    except ConfigError:
        return predictor


def _words(kind: type, switches: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return what each field of ``kind`` may be that is chosen by a word, and with ``switches`` is on or off."""
    hints = typing.get_type_hints(kind)
    choices = {field.name: _choices(hints[field.name], switches) for field in dataclasses.fields(kind)}
    return {name: values for name, values in choices.items() if values}


def _choices(hint: Any, switches: bool) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if hint is bool:
        return (False, True) if switches else ()
    if hint == int | None:
        return (None, WIDTH) if switches else ()
    words = [word for part in typing.get_args(hint) for word in _choices(part, False)]
    return (*words, None) if words else ()


def _made(kind: type, settings: Any) -> list[Any]:
    """Return [the config], or [] where its class refuses it."""
    try:
        return [kind(**dict(settings))]
    except ConfigError:
        return []

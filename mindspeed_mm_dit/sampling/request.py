"""What a user asks for: a model to load, and samples of it. Each setting is declared once, as a field.

The flags of the commands, the arguments of the Python API and the inputs of the app are made from these fields. Errors
name the flag; ``naming_arguments`` puts the argument of Python in its place.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, MISSING, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from mindspeed_mm_dit.configs.limits import (
    BASE_DTYPES,
    BYTES,
    MAX_FRAMES,
    MAX_GUIDANCE,
    MAX_INT64,
    MAX_PIXELS,
    check_bool,
    expand_path,
    number,
    shorten_repr,
    whole_number,
)
from mindspeed_mm_dit.errors import ConfigError, UserError, flag_of
from mindspeed_mm_dit.framework import FRAMEWORKS

P = ParamSpec("P")
R = TypeVar("R", bound="Request")
R_co = TypeVar("R_co", bound="Request", covariant=True)
S = TypeVar("S")
T = TypeVar("T")
CFG_SCALE = 4.0
"""Default scale of classifier-free guidance."""
_EXPERTS, _TEXT, _VIDEOS = "two experts (Wan 2.2)", "models with a text encoder", "videos"


def setting(
    default: Any = None,
    flag: str | None = "",
    *,
    type: type | None = None,
    low: Any = None,
    high: Any = MAX_INT64,
    check: Callable[[str, Any], Any] | None = None,
    item: str = "",
    group: str = "",
    **takes: Any,
) -> Any:
    """Declare a setting, which the text below it explains, in Python and in ``--help``.

    flag: by default the name of the field; None: it has none. type: int or float; with ``low`` it is checked. check:
    (name for errors, value) -> the value, or a ConfigError. item: of a sample, that it sets. group: title of the flag's
    group. takes: further arguments of argparse.
    """
    if type is not None:
        takes["type"] = type
    if low is not None:
        check = partial(whole_number if type is int else number, low=low, high=high)
    elif default is False:
        takes["action"], check = "store_true", check_bool
    return dataclasses.field(
        default=default, metadata={"flag": flag, "check": check, "item": item, "group": group, "takes": takes}
    )


def _weights(what: str, value: Any) -> str:
    if not isinstance(value, str) or value not in ("ema", "model"):
        raise ConfigError(f"{what} = {shorten_repr(value)} is neither 'ema' nor 'model'. Leave it out to use the EMA.")
    return value


def _text(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{what} = {shorten_repr(value)} is not a string.")
    return value


def _paths(what: str, value: Any) -> list[str]:
    try:
        return [expand_path(what, path) for path in ([value] if isinstance(value, (str, bytes, Path)) else value)]
    except TypeError:
        raise ConfigError(f"{what} = {shorten_repr(value)} is neither a path nor a list of paths.") from None


def _size(what: str, value: Any) -> tuple[int, int]:
    """Return height and width from "480x832" or two numbers."""
    sides = value.tolist() if hasattr(value, "tolist") else value
    sides = sides.partition("x")[::2] if isinstance(sides, str) else sides
    if not isinstance(sides, Sequence) or isinstance(sides, BYTES) or len(sides) != 2:
        raise ConfigError(f'{what} = {shorten_repr(value)} is not height and width. Write (480, 832), or "480x832".')
    if not all(str(side).isdecimal() for side in sides):
        raise ConfigError(f"{what} = {shorten_repr(value)} is not HEIGHTxWIDTH. Write 480x832.")
    height, width = (whole_number(what, int(side), 1, MAX_PIXELS) for side in sides)
    return height, width


def _interval(what: str, value: Any) -> Any:
    """Return two numbers from "0.2,0.8", or the value as it is; ``Guidance`` checks them."""
    try:
        low, high = map(float, value.split(",")) if isinstance(value, str) else (value, None)
        return value if high is None else (low, high)
    except ValueError:
        raise ConfigError(f"{what} = {shorten_repr(value)} is not two numbers. Write 0.2,0.8.") from None


def _options(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f'{what} = {shorten_repr(value)} must be a mapping. Write {{"eta": 0.5}}.')
    return {name: item.tolist() if hasattr(item, "tolist") else item for name, item in value.items()}


class Request:
    """A frozen dataclass of settings. Each value is checked, but for a default of None."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, check = getattr(self, field.name), field.metadata["check"]
            if check is not None and not (value is None and field.default is None):
                object.__setattr__(self, field.name, check(word_of(field), value))

    @classmethod
    def from_flags(cls: type[R], flags: argparse.Namespace, **values: Any) -> R:
        """Return the request of parsed ``flags``; ``values``: settings that are not one flag."""
        words = {field.name: word_of(field)[2:].replace("-", "_") for field in dataclasses.fields(cls)}  # type: ignore
        return cls(**{**{name: getattr(flags, word) for name, word in words.items() if hasattr(flags, word)}, **values})


def word_of(field: dataclasses.Field) -> str:
    """Return what errors call a setting: its flag, or its name if it has none."""
    flag = field.metadata["flag"]
    return field.name if flag is None else flag_of(flag or field.name)


def help_of(request: Any, **words: Any) -> dict[str, str]:
    """Return the text below each setting of a request, by name; ``words``: what stands in braces in the texts."""
    (definition,) = ast.parse(inspect.getsource(request)).body
    texts: dict[str, str] = {}
    for declared, text in pairwise(definition.body):  # type: ignore[attr-defined]
        if isinstance(declared, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(declared.target)] = " ".join(ast.literal_eval(text.value).split()).format(**words)
    return texts


def add_flags(parser: Any, request: type[Request], *names: str, required: bool = True, **words: Any) -> None:
    """Add the flags of a request's settings, or of those with ``names``, to a parser; skip flags that it has.

    required: whether a setting without a default is. words: what stands in braces in the help texts.
    """
    groups, texts = {group.title: group for group in parser._action_groups}, help_of(request, **words)
    for field in dataclasses.fields(request):  # type: ignore[arg-type]
        flag, title, takes = word_of(field), field.metadata["group"], field.metadata["takes"]
        if not flag.startswith("-") or (names and field.name not in names) or flag in parser._option_string_actions:
            continue
        if title and title not in groups:
            groups[title] = parser.add_argument_group(title)
        if field.default is MISSING:
            takes = {"required": required, **takes}
        elif takes.get("action") != "store_true":
            takes = {"default": [] if "action" in takes else field.default, **takes}
        help = texts[field.name].replace("%", "%%")
        (groups[title] if title else parser).add_argument(flag, help=help, **takes)


@dataclass(frozen=True)
class ModelRequest(Request):
    """A model to load: the arguments of ``dit.load``."""

    checkpoint: str | Path = setting(MISSING, check=expand_path, metavar="PATH")
    """folder of checkpoints (the newest is used), published .pt, or .safetensors"""
    _: KW_ONLY
    model: str | Path | None = setting(check=expand_path, metavar="JSON")
    """model.json; not needed if the checkpoint contains it, as those of a run or mm-dit convert do"""
    lora: Sequence[str] = setting((), check=_paths, action="append", metavar="FILE[:S]")
    """add adapters (LoRA) of a run or of another program with strength S; may be given several times"""
    weights: Literal["ema", "model"] = setting("ema", check=_weights, choices=("ema", "model"))
    """use the EMA of the weights (default), or the weights being trained"""
    low_noise_checkpoint: str | Path | None = setting(check=expand_path, metavar="PATH", group=_EXPERTS)
    """the low-noise expert; --checkpoint is the high-noise expert, or a diffusers folder of both"""
    boundary: float | None = setting(type=float, low=0.0, high=1.0, metavar="LEVEL", group=_EXPERTS)
    """noise level from which on the high-noise expert is used (default: where their training windows meet)"""
    low_noise_lora: Sequence[str] = setting((), check=_paths, action="append", metavar="FILE[:S]", group=_EXPERTS)
    """adapters of the low-noise expert"""
    network_guidance: float | None = setting(flag="guidance", type=float, metavar="G")
    """strength of guidance for a network that takes it as an input, such as FLUX.1-dev (default: predictor.guidance of
    its model.json)"""
    bf16: bool = setting(False)
    """run the network's matrix products in bfloat16"""
    base_dtype: Literal["nf4", "int8", "fp8", "bf16"] | None = setting(choices=BASE_DTYPES, metavar="FORMAT")
    """store the weights of linear layers in few bits (nf4, int8, fp8 or bf16), adapters beside them"""
    torch_compile: bool = setting(False)
    """compile each block: a minute at the start, then faster steps"""
    framework: Literal["pytorch", "mindspore"] = setting(FRAMEWORKS[0], "ai-framework", choices=FRAMEWORKS)
    """framework to use (default pytorch)"""


@dataclass(frozen=True)
class SampleRequest(Request):
    """Samples to generate, and how: the arguments of ``Pipeline.sample``. None: the model's default."""

    classes: Any = setting(item="label", metavar="LIST")
    """labels, e.g. 0-9 or 1,5,7-9, or names that the checkpoint knows, e.g. cat,dog (default: the first 10); a name
    comes before a number or range, and one with a comma stands in double quotes: 'cat,"salt, pepper"'"""
    _: KW_ONLY
    prompts: Sequence[str] | str | None = setting(
        flag="prompt", item="caption", group=_TEXT, action="append", metavar="TEXT"
    )
    """what a sample shows; may be given several times"""
    negative_prompt: str | None = setting(check=_text, item="caption", group=_TEXT, metavar="TEXT")
    """text that guidance leads away from (default: the empty caption)"""
    vectors: Any = setting(item="vector", metavar="FILE")
    """an .npy of vectors (N, P), for a model conditioned on them"""
    num: int = setting(1, None)
    """samples of each class, prompt or vector"""
    size: tuple[int, int] | str | None = setting(check=_size, metavar="HxW")
    """height and width in pixels (default: from model.json)"""
    image: Any = setting(item="image", group=_VIDEOS, metavar="FILE")
    """the first frame, for a model that begins with an image"""
    last_image: Any = setting(item="image", group=_VIDEOS, metavar="FILE")
    """the last frame, for a model that takes one"""
    frames: int | None = setting(type=int, low=1, high=MAX_FRAMES, group=_VIDEOS, metavar="N")
    """frames of a video (default: from model.json)"""
    sampler: str = setting(metavar="NAME")
    """{samplers}"""
    steps: int = setting(type=int, low=1)
    """steps of the sampler (default 250, for videos 50, for FLUX.1 28)"""
    guidance: float = setting(flag="cfg-scale", type=float)
    """classifier-free guidance: 1 is none, larger is closer to the class (default {cfg_scale:g}, or 1 for a network
    that takes --guidance)"""
    weaker: Any = setting(flag="guidance-checkpoint", metavar="PATH")
    """autoguidance: guide away from the conditional prediction of this weaker model (an earlier checkpoint, a smaller
    network) instead of the model's own unconditional one; scaled by --cfg-scale, on all channels by default"""
    channels: Literal["3", "all"] = setting(flag="cfg-channels", choices=("3", "all"))
    """guide the first 3 latent channels, as the published DiT does (default), or all (default with prompts)"""
    rescale: Literal["token", "sample"] | None = setting(flag="cfg-rescale", choices=("token", "sample"))
    """give the guided prediction the norm of the conditional one: at each 2 x 2 latent pixels, as Qwen-Image does, or
    of the whole sample where it is longer, as Z-Image can (default: neither)"""
    interval: tuple[float, float] = setting("0,1", "cfg-interval", check=_interval, metavar="LOW,HIGH")
    """guide only at noise levels, t/T or 1 - t, between LOW and HIGH (default 0,1: everywhere)"""
    low_noise_guidance: float | None = setting(
        flag="low-noise-cfg-scale", type=float, low=0.0, high=MAX_GUIDANCE, group=_EXPERTS, metavar="S"
    )
    """guidance of the low-noise expert (default: --cfg-scale)"""
    seed: int = setting(0, type=int, low=0)
    """seed of all noise (default 0)"""
    batch_size: int = setting(64, type=int, low=1, metavar="N")
    """samples generated at once (default 64)"""
    bf16: bool = setting(False)
    """run the network's matrix products in bfloat16"""
    options: Mapping[str, Any] = setting(None, None, check=_options)
    """further options of the sampler, by name"""
    path: int = setting(1, None, type=int, low=1)
    """states of the trajectory to return, e.g. 8; 1 returns only the samples"""
    on_step: Callable[[int], object] | None = setting(flag=None)
    """called after every sampling step with the number of samples it worked on"""

    @property
    def low_noise_scale(self) -> float:
        """Guidance of the low-noise expert, if there is one."""
        return self.guidance if self.low_noise_guidance is None else self.low_noise_guidance

    @property
    def words(self) -> str:
        """The settings that determine the samples, as a caption."""
        return f"{self.sampler}, {self.steps} steps, guidance {self.guidance:g}, seed {self.seed}"


# --- Python ----------------------------------------------------------------------------------------------------------

_NAMES = {
    word_of(field).strip("-").replace("-", "_"): field.name
    for kind in (ModelRequest, SampleRequest)
    for field in dataclasses.fields(kind)
} | {"num_per_class": "num", "num_per_prompt": "num", "output": "path"}
"""Argument by flag, both with underscores."""


@contextmanager
def naming_arguments(flags: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Let errors name arguments of Python in place of flags; ``flags``: those that the caller used as arguments."""
    names = {**_NAMES, **flags}

    def renamed(text: str) -> str:
        return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: names.get(flag[1].replace("-", "_"), flag[0]), text)

    try:
        yield
    except UserError as error:
        raise type(error)(renamed(str(error))) from None


class _Decorator(Protocol[P, R_co]):
    @overload
    def __call__(self, function: Callable[[R_co], T]) -> Callable[P, T]: ...
    @overload
    def __call__(self, function: Callable[[S, R_co], T]) -> Callable[Concatenate[S, P], T]: ...


def arguments_of(request: Callable[P, R]) -> _Decorator[P, R]:
    """Return a decorator of a function or method of a request, which callers then call with its settings.

    A setting also goes by the name of its flag, e.g. ``cfg_scale`` for ``guidance``.
    """

    def decorated(function: Any) -> Any:
        *bound, _ = inspect.signature(function).parameters.values()
        settings = inspect.signature(request).parameters

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            flags = {name: name for name in kwargs if name not in settings and _NAMES.get(name) in settings}
            with naming_arguments(flags):
                for flag in flags:
                    if _NAMES[flag] in kwargs:
                        raise ConfigError(f"{_NAMES[flag]} and {flag} are the same argument. Pass one of them.")
                    kwargs[_NAMES[flag]] = kwargs.pop(flag)
                return function(*args[: len(bound)], request(*args[len(bound) :], **kwargs))

        texts = help_of(request, cfg_scale=CFG_SCALE, samplers="one of the model's objective")
        call.__doc__ = "\n".join([function.__doc__ or "", *(f"    {name}: {text}" for name, text in texts.items())])
        call.__signature__ = inspect.Signature([*bound, *settings.values()])  # type: ignore[attr-defined]
        return call

    return decorated

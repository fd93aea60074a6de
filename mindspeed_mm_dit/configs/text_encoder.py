"""What a text encoder is on paper. Each kind is a class of section ``text_encoder`` of model.json."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from mindspeed_mm_dit.configs.files import digest_of_files
from mindspeed_mm_dit.configs.limits import check_between, check_path
from mindspeed_mm_dit.configs.strict import read_json
from mindspeed_mm_dit.errors import ConfigError


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

    @property
    @abstractmethod
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""

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
    """Local folder of the encoder as transformers saves it: config.json and weights."""
    tokenizer: str | None = None
    """Local folder of its tokenizer; null: ``from_pretrained`` itself, or ``tokenizer`` beside it, as Wan has it."""
    max_length: int = 512
    """Tokens L of every caption, its end included; shorter ones are padded."""
    truncate: bool = False
    """Cut captions that are longer, as MindSpeed-MM does, instead of refusing them."""
    zero_padding: bool = False
    """Set the states of the padding to zero, as Wan's pipeline does; MindSpeed-MM's tutorial hands them on as they
    are. The mask acts inside the encoder either way."""
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

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer."""
        own = Path(self.from_pretrained)
        if self.tokenizer is not None:
            return Path(self.tokenizer)
        return own if (own / "tokenizer_config.json").is_file() else own.parent / "tokenizer"

    @property
    def config_file(self) -> Path:
        """The encoder's own config.json."""
        return Path(self.from_pretrained) / "config.json"

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
        """Return ``width_key`` of config.json."""
        return self.number(self.width_key)

    def pooled_width(self) -> int | None:
        """Return None: the states are all there is."""
        return None

    def identity(self) -> str:
        """Return the digests of encoder and tokenizer, and the precision."""
        own = digest_of_files(self.from_pretrained, "text_encoder.from_pretrained")
        tokenizer = digest_of_files(str(self.tokenizer_folder), "text_encoder.tokenizer")
        return f"{own}, tokenizer {tokenizer}, {self.dtype}"


@dataclass(frozen=True)
class UMT5Config(TransformersTextConfig):
    """UMT5 (Chung et al. 2023), the text encoder of Wan, through transformers."""

    model_id: Literal["umt5", "UMT5"] = "umt5"
    """Kind of encoder; MindSpeed-MM writes it in capitals."""

    width_key = "d_model"

"""Small parts of every kind that a registry holds, found by their config classes: a new part is tested unasked."""

import dataclasses
import functools
import itertools
import json
import shutil
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_mm_dit.configs import model
from mindspeed_mm_dit.configs.autoencoder import PixelConfig
from mindspeed_mm_dit.configs.condition import TextCondition
from mindspeed_mm_dit.configs.data import load_data_config
from mindspeed_mm_dit.configs.model import AE_CONFIGS, TEXT_ENCODER_CONFIGS, ModelConfig
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.errors import ConfigError, UserError
from mindspeed_mm_dit.framework import active
from mindspeed_mm_dit.models.registry import open_tokenizer
from tests.autoencoder_kl_fixtures import write_flux2
from tests.captions_fixtures import write_beside
from tests.conftest import GOLDEN, ROOT

CHANNELS = 3
"""Of the latents: what a micro-batch must not be taken for."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SOME = 4
"""What a number becomes that is null by default."""
NONE_OR_SOME = (0, SOME, 1)
"""Of what there is none by default."""
BEFORE = ROOT / "tests/data/before"
CACHES = ("latents", "features", "features_wan")
"""Small caches there: of a folder, of clips as they are, and of clips through an autoencoder."""
PLACES = ("pictures", "listed", "parquet", "tars", "clips", "vae", "data_kinds", "videos/data.json", *CACHES)
"""Small data sets of all layouts there, and a data.json for each."""


def objectives() -> list[Any]:
    """Every objective with every combination of what can be chosen by a word."""
    found = []
    for kind in model.DIFFUSION_CONFIGS.values():
        words = _words(kind)
        found += [config for chosen in itertools.product(*words.values()) for config in _made(kind, zip(words, chosen))]
    return found


def every_word_once(configs: list[Any]) -> list[Any]:
    """Return configs that have among them each value which any config of their kind has for any field."""
    met: set[tuple[type, str, str]] = set()
    chosen = []
    for config in configs:
        words = {(type(config), name, repr(value)) for name, value in dataclasses.asdict(config).items()}
        if not words <= met:
            chosen.append(config)
            met |= words
    return chosen


@functools.lru_cache
def predictors(channels: int = CHANNELS) -> list[Any]:
    """Every predictor at about its smallest sizes: as it is, with each word, switch and width of output, and in every
    way to be steered or to answer that takes up to three of these at once."""
    found = [config for kind in model.PREDICTOR_CONFIGS.values() for config in _of_kind(kind, channels)]
    return list(dict.fromkeys(found))


def models() -> list[ModelConfig]:
    """Every predictor with every objective, in the first form that its output fits."""
    found: dict[Any, ModelConfig] = {}
    for predictor, diffusion in itertools.product(predictors(), objectives()):
        for one in fitted(PixelConfig(CHANNELS), predictor, diffusion, UMT5Config("not read")):
            found.setdefault((predictor, diffusion.model_id), one)
    return list(found.values())


def fitted(ae: Any, predictor: Any, diffusion: Any, encoder: Any) -> list[ModelConfig]:
    """Return [the model of these parts], or [] where model.json refuses it; as many encoders as the predictor asks."""
    texts = [condition for condition in predictor.conditions if isinstance(condition, TextCondition)]
    encoders = (encoder,) * (1 + max(part.encoder for text in texts for part in text.parts)) if texts else None
    return _made(ModelConfig, {"ae": ae, "predictor": predictor, "diffusion": diffusion, "text_encoder": encoders})


def sources(folder: Path) -> list[SourceParam]:
    """Every layout of data that there is a small one of, copied to ``folder``, where relative paths start."""
    for place in PLACES:
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (BEFORE / place).is_dir() else shutil.copyfile
        copy(BEFORE / place, folder / place)
    extra_images = write_beside(folder / "captioned")
    section = {"data_folder": "captioned", "image_size": 8, **extra_images}
    (folder / "data_kinds/captioned.json").write_text(json.dumps({"dataset_param": section}))
    _label(folder / "clips/annotation.json", folder / "videos/data.json")
    files = [path for path in (folder / "data_kinds").glob("*.json") if path.name != "model.json"]
    return [load_data_config(path).dataset_param for path in (*sorted(files), folder / "videos/data.json")]


def _label(annotation: Path, data: Path) -> None:
    """Give every clip of an annotation one of two classes, and have a data.json name them."""
    clips, content = json.loads(annotation.read_text()), json.loads(data.read_text())
    annotation.write_text(json.dumps([clip | {"class": ("even", "odd")[n % 2]} for n, clip in enumerate(clips)]))
    content["dataset_param"]["label_key"] = "class"
    data.write_text(json.dumps(content))


def caches(folder: Path) -> list[tuple[ModelConfig, SourceParam]]:
    """Every cache of such data, with the model it was made for, once :func:`sources` has copied them to ``folder``."""
    shutil.copytree(GOLDEN / "wan_vae_tiny", folder / "wan_vae_tiny")
    places = [folder / name for name in CACHES]
    files = [(place / "model.json", place / "data.json") for place in places]
    return [(model.load_model_config(there), load_data_config(data).dataset_param) for there, data in files]


def of_size(param: SourceParam, size: tuple[int, ...]) -> SourceParam:
    names = param.size_setting.partition(" = ")[0].removeprefix("dataset_param.").split(", ")
    return dataclasses.replace(param, **dict(zip(names, size)))  # type: ignore[type-var]


def autoencoders(folder: Path) -> list[Any]:
    """Every autoencoder that the active framework runs, those whose weights are files with small ones."""
    places = [BEFORE / "vae", GOLDEN / "wan_vae_tiny", write_flux2(folder / "flux2")]
    if active() == "pytorch":  # diffusers writes, and reads, what runs there alone
        import diffusers

        from tests.models.test_autoencoder_kl_wan import DC, TINY

        own = {"AutoencoderTiny": TINY, "AutoencoderDC": DC, "AutoencoderKLQwenImage": {"base_dim": 4}}
        for name, settings in own.items():
            getattr(diffusers, name)(**settings).save_pretrained(folder / name)
            places.append(folder / name)
    found = [model.autoencoder_config_of(str(place), "ae") for place in places]
    found += [config for kind in AE_CONFIGS.values() for config in _without_files(kind)]
    return [config for config in found if active() in config.frameworks]


def text_encoders(folder: Path) -> list[Any]:
    """Every text encoder that the active framework runs, in the same way."""
    found = [config for kind in TEXT_ENCODER_CONFIGS.values() for config in _without_files(kind)]
    if active() == "pytorch":
        from tests.text_encoder_fixtures import write_bert, write_clip, write_language_model, write_t5

        write_bert(folder / "bert")
        write_clip(folder / "clip", projected=True)
        write_t5(folder / "t5")
        names = ("qwen2_5_vl", "qwen3", "mistral3")
        places = [BEFORE / "clips/text_encoder", *(folder / name for name in ("bert", "clip", "t5", *names))]
        for name in names:
            write_language_model(folder / name, name)
        kinds = [kind for kind in TEXT_ENCODER_CONFIGS.values() if not _without_files(kind)]
        for kind, place in itertools.product(kinds, places):
            settings: dict[str, Any] = {"max_length": 16, "dtype": "fp32"}
            if place.name == "mistral3":  # whose prompt is long, and which has few layers here
                settings |= {"max_length": 48, "layers": (1, 2)}
            if kind.model_id == "mistral3" or place.name != "mistral3":
                config = kind(str(place), **settings).with_published_settings({})
                found += [config] if _is_of(config) else []
    return list({config.model_id.lower(): config for config in found}.values())


def _is_of(encoder: Any) -> bool:
    """Whether the files that a section names are of its kind."""
    try:
        open_tokenizer(encoder)
    except UserError:
        return False
    return True


def _without_files(kind: type) -> list[Any]:
    """Return [the config as it is by default], or [] for a kind that is told where its files are."""
    required = [field for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return [] if required else _made(kind, {})


def name_of(*sections: Any) -> str:
    """The words of sections of a model.json, for the name of a test."""
    words = [(section.model_id, *(getattr(section, name) for name in _words(type(section)))) for section in sections]
    return "-".join(map(str, itertools.chain(*words)))


def _of_kind(kind: type, channels: int) -> Iterator[Any]:
    small, choices = _small(kind, channels), _words(kind, switches=True)
    if "out_channels" in small:
        choices["out_channels"] = (2 * channels,)
    each = [{name: value} for name, values in choices.items() for value in values]
    known: set[Any] = set()
    for count in range(4):
        for some in itertools.combinations(each, count):
            for config in _made(kind, small | dict(itertools.chain(*(one.items() for one in some)))):
                steered = tuple((type(condition), _encoders(condition)) for condition in config.conditions)
                ways = {(steered, config.out_channels), (config.num_time_inputs, config.out_channels)}
                if count < 2 or ways - known:
                    known |= ways
                    yield _with_several_tokens(config)


def _encoders(condition: Any) -> tuple[int, ...]:
    return tuple(part.encoder for part in condition.parts) if isinstance(condition, TextCondition) else ()


def _small(kind: type, channels: int) -> dict[str, Any]:
    """Return each number of ``kind`` as small as the class lets it be, one after the other."""
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    small = {name: 4 for name, default in fields.items() if default is dataclasses.MISSING}
    small |= {name: channels for name in ("in_channels", "out_channels") if name in fields}
    for name, default in fields.items():
        if name not in small and type(default) in (int, tuple):
            sizes = NONE_OR_SOME if default == 0 else SIZES
            sizes = sizes if type(default) is int else [(size,) * len(default) for size in SIZES]
            small[name] = next((size for size in sizes if _made(kind, small | {name: size})), default)
    return small


def _with_several_tokens(predictor: Any) -> Any:
    return resized(predictor, tuple(2 * size for size in predictor.latent_shape[1:])) or predictor


def resized(predictor: Any, size: tuple[int, ...]) -> Any:
    """Return the same network for latents of another size; None where it takes its own alone."""
    try:
        return predictor.resized((predictor.in_channels, *size))
    except ConfigError:
        return None


def _words(kind: type, switches: bool = False) -> dict[str, tuple[Any, ...]]:
    """Return what each field of ``kind`` may be that is chosen by a word, and with ``switches`` is on or off."""
    hints = typing.get_type_hints(kind)
    choices = {field.name: _choices(hints[field.name], switches) for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind) if switches else ():
        if type(field.default) is int and field.default == 0:  # a number of something that there is none of by default
            choices[field.name] = NONE_OR_SOME
    return {name: values for name, values in choices.items() if values}


def _choices(hint: Any, switches: bool) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if hint is bool:
        return (False, True) if switches else ()
    parts = typing.get_args(hint)
    if switches and set(parts) == {int, types.NoneType}:
        return (SOME,)
    words = [word for part in parts for word in _choices(part, False)]
    return (*words, None) if words else ()


def _made(kind: type, settings: Any) -> list[Any]:
    """Return [the config], or [] where its class refuses it."""
    try:
        return [kind(**dict(settings))]
    except ConfigError:
        return []

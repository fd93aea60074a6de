"""Opens the data of a run for its model, and checks sizes, items, captions and caches before any weights are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mindspeed_mm_dit.configs.buckets import Budget
from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.configs.condition import TextCondition
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.source import SourceParam
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.cache_before import text_made_by
from mindspeed_mm_dit.data.cache_index import check_same
from mindspeed_mm_dit.data.cache_sources import check_sources
from mindspeed_mm_dit.data.captions import caption_problems
from mindspeed_mm_dit.data.labels import check_labels
from mindspeed_mm_dit.data.rows import SourceRequest
from mindspeed_mm_dit.data.samples import Opened
from mindspeed_mm_dit.data.sources import source_of
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import open_tokenizer

_AXES = {2: "images", 3: "videos"}


def open_data(
    model: ModelConfig, param: SourceParam, decode_all: bool = False, classes: tuple[str, ...] = ()
) -> Opened:
    """Open the samples of data.json for ``model`` and check each one; or open the cache that data.json names.

    classes: class names of a run that goes on.

    Raises:
        ConfigError: sizes, items, text encoders or the cache do not fit model.json.
        DataError: naming every sample and caption that cannot be used.
    """
    conditions, source = model.predictor.conditions, source_of(param)
    check_sizes(model, param)
    param.check_gives(conditions.items)
    if param.cache is not None:
        return _open_cache(model, param)
    source.provide(param)
    reads = "caption" in conditions.items
    tokenizers = tuple(open_tokenizer(section) for section in model.text_encoders) if reads else ()
    if reads:
        check_text_widths(model)
    problems = tuple(partial(caption_problems, tokenizer) for tokenizer in tokenizers)
    num_classes = conditions.label.num_classes if conditions.label else None
    check_feature_widths(model)
    rate = model.predictor.frame_rate
    rows = source.open(param, SourceRequest(conditions.items, num_classes, problems, decode_all, classes, rate))
    return _checked(Opened(model, param, rows, tokenizers))


def check_sizes(model: ModelConfig, param: SourceParam) -> None:
    """Raise ConfigError if the sample sizes of model.json and data.json differ; opens no sample."""
    size = param.sample_size
    learns, has = _AXES.get(len(model.latent_shape) - 1, "latents"), _AXES[len(size)]
    if learns != has:
        raise ConfigError(
            f"data.json: dataset_param.dataset_type = {param.dataset_type!r}",
            f"its samples are {has}, and predictor {model.predictor.model_id!r} learns {learns}",
            f"use a data.json of {learns}, or a predictor of {has}",
        )
    if param.buckets is not None:
        _check_buckets(model, param)
        return
    made = model.ae.latent_shape(size)
    if made != model.latent_shape:
        wanted = " x ".join(map(str, model.ae.sample_size(model.latent_shape)))
        raise ConfigError(
            f"data.json: {param.size_setting}",
            f"makes latents of {_sides(made)}, and the predictor takes {_sides(model.latent_shape)}: {has} of {wanted} "
            "pixels",
            "make the two agree; no weight of wan or custom_dit depends on latent_size"
            if has == "videos" else f"set image_size to {wanted.split(' x ')[0]}, or change predictor.input_size",
        )  # fmt: skip


def with_budget(model: ModelConfig, param: SourceParam) -> SourceParam:
    """Return ``param`` with a budget of videos whose sides are multiples of what ``model`` takes too.

    MindSpeed-MM's data.json has one for all its Wan, and the autoencoder of TI2V-5B divides sides by twice as much.
    """
    if not (isinstance(param, ClipsParam) and isinstance(param.buckets, Budget)) or len(model.latent_shape) != 4:
        return param
    for times in (1, 2, 4):
        side = times * param.buckets.multiple_of
        try:
            with_size(model, (param.buckets.shapes[0][0], side, side))
        except ConfigError:
            continue
        if side**2 <= param.buckets.area:
            return replace(param, buckets=replace(param.buckets, multiple_of=side))
    return param


def with_size(model: ModelConfig, size: tuple[int, ...]) -> ModelConfig:
    """Return ``model`` for samples of ``size``, (H, W) or (F, H, W) in pixels; no weight depends on the size."""
    return replace(model, predictor=model.predictor.resized(model.ae.latent_shape(size)))


def models_of(model: ModelConfig, param: SourceParam) -> list[ModelConfig]:
    """Return ``model`` for each sample shape of data.json."""
    return [model] if param.buckets is None else [with_size(model, size) for size in param.sizes]


def most_expensive_shape(model: ModelConfig, param: SourceParam) -> ModelConfig:
    """Return ``model`` for the sample shape of data.json that takes the most arithmetic."""
    return max(models_of(model, param), key=lambda each: each.predictor.num_tokens)


def _check_buckets(model: ModelConfig, param: SourceParam) -> None:
    """Raise ConfigError unless autoencoder and predictor accept every possible sample shape."""
    if model.teachers:
        raise ConfigError(param.size_setting, "make latents of several shapes, but a teacher's features have one shape",
                          "drop section teacher and predictor.z_dims, or use image_size")  # fmt: skip
    for size in param.sizes:
        try:
            with_size(model, size)
        except ConfigError as error:
            raise ConfigError(f"data.json: {param.size_setting}: {' x '.join(map(str, size))}",
                              f"{error.what}: {error.reason}", error.cure) from None  # fmt: skip


def _sides(latent_shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, latent_shape[1:]))


def check_text_widths(model: ModelConfig) -> None:
    """Raise ConfigError unless each text encoder's output, by its config.json, has the width the predictor takes."""
    for condition in model.predictor.conditions:
        if isinstance(condition, TextCondition):
            condition.check_encoders(model.text_encoders)


def check_feature_widths(model: ModelConfig) -> None:
    """Raise ConfigError unless each teacher's features, by its config.json, have the width of its projector."""
    for number, (teacher, width) in enumerate(zip(model.teachers, model.predictor.z_dims)):
        if teacher.width() != width:
            raise ConfigError(
                f"predictor.z_dims[{number}] = {width}",
                f"the teacher's features have width {teacher.width()} (by its config.json)", f"write {teacher.width()}",
            )  # fmt: skip


def made_by(model: ModelConfig, param: SourceParam) -> dict[str, str]:
    """Return what a cache for model.json and data.json must have been made with, except the rows.

    Raises ConfigError if there is nothing to cache: images that are their own latents, without captions or teachers.
    """
    texts = [c for c in model.predictor.conditions if c.item == "caption"]
    if not model.ae.is_cacheable and not texts and not model.teachers:
        raise ConfigError(
            f"{param.cache_key} with ae.model_id = {model.ae.model_id!r}",
            "there is nothing to cache: this autoencoder has no latents, a model trains on the images themselves",
            f"train without a cache, and without {param.cache_key} in data.json",
        )
    found = {"pixels": param.pixel_cache_key(), "autoencoder": model.ae.identity()}
    for number, section in enumerate(model.text_encoders if texts else ()):
        suffix = f"[{number}]" if number else ""
        found[f"text_encoder{suffix}"] = section.identity()
        found[f"text{suffix}"] = text_made_by(section.max_length, section.zero_padding)
    if model.predictor.conditions.cached_names(param.beside):
        last, own = model.predictor.conditions.frames.with_last, ("first_image", "last_image")
        words = [f"beside clips ({param.beside[n]})" if n in param.beside else "their own" for n in own[: 1 + last]]
        found["frames"] = ", ".join(words)
    if model.image_encoder is not None:
        found["image_encoder"] = model.image_encoder.identity()
    for name, teacher in zip(model.feature_shapes, model.teachers):
        found[name] = f"{model.predictor.num_tokens} tokens of {teacher.identity()}"
    return found


def _open_cache(model: ModelConfig, param: SourceParam) -> Opened:
    """Open the cache that data.json names, after checking that model.json and data.json would make the same one."""
    assert param.cache is not None
    wanted, cache = made_by(model, param), Cache(param.cache, param.cache_key)
    what = f"{param.cache_key} = {param.cache}"
    check_same(what, cache.index.made_by, wanted)
    taken = {each.latent_shape for each in models_of(model, param)}
    for shape in cache.latent_shapes:
        if shape not in taken:
            raise ConfigError(
                what, f"holds latents of {shape}, and model.json makes {model.latent_shape} of a sample",
                "correct ae.latent_channels, ae.downsample_factor or the predictor's size of latents",
            )  # fmt: skip
    if model.ae.samples_posterior and not cache.index.with_std:
        raise ConfigError(what, "keeps the mean of the posterior alone, and model.json draws from it",
                          "make a cache of its own, or do not sample the posterior")  # fmt: skip
    cache.check_features(model.feature_shapes, what)
    for condition in model.predictor.conditions:
        for part in condition.parts if isinstance(condition, TextCondition) else ():
            _check_kept(what, cache, part)
    check_text_widths(model)
    rows = cache.rows(param.data_folder)
    if cache.index.lists_files:
        rows = source_of(param).as_listed(param, rows)
    notes = check_sources(cache.folder, param.cache_key, param.data_folder, rows.files)
    return _checked(Opened(model, param, replace(rows, notes=(*rows.notes, *notes)), cache=cache))


def _check_kept(what: str, cache: Cache, condition: Any) -> None:
    if condition.name not in cache.index.texts:
        raise ConfigError(what, f"keeps no {condition.name}, which the predictor is steered by",
                          "make a cache of its own, in another folder: mm-dit cache-latents")  # fmt: skip
    for width in cache.widths(condition.name):
        if width != condition.width and condition.width:  # (0: any, of parts that are joined)
            raise ConfigError(
                what, f"holds {condition.name} of width {width}, and the predictor takes {condition.width}",
                f"correct predictor.{condition.setting}",
            )  # fmt: skip


def _checked(opened: Opened) -> Opened:
    """Return ``opened`` after checking that every condition has its items and every label is a class of the model."""
    for item in opened.model.predictor.conditions.items:
        if item not in opened.rows.items:
            where = f"{opened.param.cache_key} = {opened.param.cache}" if opened.cache else opened.param.where
            raise ConfigError(
                where, f"its samples have no {item}, and the predictor is steered by it",
                "make the cache again, in an empty folder: mm-dit cache-latents"
                if opened.cache else "use a data set whose samples have one",
            )  # fmt: skip
    opened.collators(opened.rows, 0)
    label = opened.model.predictor.conditions.label
    if label is not None:
        rows = opened.rows
        check_labels(rows.labels, label.num_classes, rows.paths.__getitem__, rows.classes)
    return opened

"""Opens the data of a run for its model, and checks sizes, items, captions and caches before any weights are read."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mindspeed_mm_dit.configs.condition import TextCondition
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.configs.source import Budget, SourceParam
from mindspeed_mm_dit.data.cache import Cache
from mindspeed_mm_dit.data.cache_index import check_same, check_sources
from mindspeed_mm_dit.data.captions import caption_problems
from mindspeed_mm_dit.data.labels import check_labels
from mindspeed_mm_dit.data.samples import OpenedDataset
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import open_tokenizer

_AXES = {2: "images", 3: "videos"}


def open_data(
    model: ModelConfig, param: SourceParam, decode_all: bool = False, classes: tuple[str, ...] = ()
) -> OpenedDataset:
    """Open the samples of data.json for ``model`` and check each one; or open the cache that data.json names.

    classes: class names of a resumed run.

    Raises:
        ConfigError: sizes, items, text encoders or the cache do not fit model.json.
        DataError: naming every sample and caption that cannot be used.
    """
    conditions, source = model.predictor.conditions, source_of(param)
    check_sizes(model, param)
    param.check_items(conditions.items)
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
    return _check_opened(OpenedDataset(model, param, rows, tokenizers))


def check_sizes(model: ModelConfig, param: SourceParam) -> None:
    """Raise ConfigError if the sample sizes of model.json and data.json differ; opens no sample."""
    size = param.sample_size
    learns, has = _AXES.get(len(model.latent_shape) - 1, "latents"), _AXES[len(size)]
    if learns != has:
        raise ConfigError(
            f"data.json: dataset_param.dataset_type = {param.dataset_type!r} has samples that are {has}, but predictor "
            f"{model.predictor.model_id!r} learns {learns}. Use a data.json of {learns}, or a predictor of {has}."
        )
    if param.buckets is not None:
        _check_buckets(model, param)
        return
    latent_shape = model.ae.latent_shape(size)
    if latent_shape != model.latent_shape:
        expected = " x ".join(map(str, model.ae.sample_size(model.latent_shape)))
        if has == "videos":
            hint = "Make the two agree; no weight of wan or custom_dit depends on latent_size."
        else:
            hint = f"Set image_size to {expected.split(' x ')[0]}, or change predictor.input_size."
        raise ConfigError(
            f"data.json: {param.size_setting} makes latents of {_sides(latent_shape)}, but the predictor takes "
            f"{_sides(model.latent_shape)}, which are {has} of {expected} pixels. {hint}"
        )


def with_budget(model: ModelConfig, param: SourceParam) -> SourceParam:
    """Return ``param`` with a budget of videos whose sides are also multiples of what ``model`` accepts.

    MindSpeed-MM uses one data.json for all Wan models, but the autoencoder of TI2V-5B downsamples twice as much.
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


def models_by_shape(model: ModelConfig, param: SourceParam) -> list[ModelConfig]:
    """Return ``model`` for each sample shape of data.json."""
    return [model] if param.buckets is None else [with_size(model, size) for size in param.sizes]


def most_expensive_shape(model: ModelConfig, param: SourceParam) -> ModelConfig:
    """Return ``model`` for the sample shape of data.json that takes the most arithmetic."""
    return max(models_by_shape(model, param), key=lambda each: each.predictor.num_tokens)


def _check_buckets(model: ModelConfig, param: SourceParam) -> None:
    """Raise ConfigError unless autoencoder and predictor accept every possible sample shape."""
    if model.teachers:
        raise ConfigError(
            f"{param.size_setting} makes latents of several shapes, but a teacher's features have one shape. Drop "
            "section teacher and predictor.z_dims, or use image_size."
        )
    for size in param.sizes:
        try:
            with_size(model, size)
        except ConfigError as error:
            raise ConfigError(
                f"data.json: {param.size_setting} makes samples of {' x '.join(map(str, size))}, which do not fit. "
                f"{error}"
            ) from None


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
                f"predictor.z_dims[{number}] = {width} is not the width of the teacher's features, {teacher.width()} "
                f"(by its config.json). Write {teacher.width()}."
            )


def cache_identity(model: ModelConfig, param: SourceParam) -> dict[str, str]:
    """Return what identifies a cache for model.json and data.json, except its samples.

    Raises ConfigError if there is nothing to cache: images without an autoencoder, captions or teachers.
    """
    texts = [c for c in model.predictor.conditions if c.item == "caption"]
    if not model.ae.is_cacheable and not texts and not model.teachers:
        raise ConfigError(
            f"There is nothing to cache with ae.model_id = {model.ae.model_id!r}: this autoencoder has no latents, so "
            f"a model trains on the images themselves. Train without a cache, and without {param.cache_key} in "
            "data.json."
        )
    identity = {"pixels": param.pixel_cache_key(), "autoencoder": model.ae.identity()}
    for number, section in enumerate(model.text_encoders if texts else ()):
        suffix = f"[{number}]" if number else ""
        identity[f"text_encoder{suffix}"] = section.identity()
        padding = "zero" if section.zero_padding else "as the encoder leaves it"
        identity[f"text{suffix}"] = f"{section.max_length} tokens, padding {padding}"
    if model.predictor.conditions.cached_names(param.extra_images):
        last, names = model.predictor.conditions.frames.with_last, ("first_image", "last_image")
        words = [
            f"beside clips ({param.extra_images[n]})" if n in param.extra_images else "their own"
            for n in names[: 1 + last]
        ]
        identity["frames"] = ", ".join(words)
    if model.image_encoder is not None:
        identity["image_encoder"] = model.image_encoder.identity()
    for name, teacher in zip(model.feature_shapes, model.teachers):
        identity[name] = f"{model.predictor.num_tokens} tokens of {teacher.identity()}"
    return identity


def _open_cache(model: ModelConfig, param: SourceParam) -> OpenedDataset:
    """Open the cache that data.json names, after checking that it was made with this model.json and data.json."""
    assert param.cache is not None
    expected, cache = cache_identity(model, param), Cache(param.cache, param.cache_key)
    what = f"{param.cache_key} = {param.cache}"
    check_same(what, cache.index.made_by, expected)
    shapes = {each.latent_shape for each in models_by_shape(model, param)}
    for shape in cache.latent_shapes:
        if shape not in shapes:
            raise ConfigError(
                f"{what} contains latents of {shape}, but model.json makes {model.latent_shape} of a sample. Correct "
                "ae.latent_channels, ae.downsample_factor or the predictor's size of latents."
            )
    if model.ae.samples_posterior and not cache.index.with_std:
        raise ConfigError(
            f"{what} contains only the mean of the posterior, but model.json samples from it. Make another cache, or "
            "do not sample the posterior."
        )
    cache.check_features(model.feature_shapes, what)
    for condition in model.predictor.conditions:
        for part in condition.parts if isinstance(condition, TextCondition) else ():
            _check_cached_text(what, cache, part)
    check_text_widths(model)
    rows = source_of(param).as_listed(param, cache.rows(param.data_folder))
    notes = check_sources(cache.folder, param.cache_key, param.data_folder, rows.files)
    return _check_opened(OpenedDataset(model, param, replace(rows, notes=(*rows.notes, *notes)), cache=cache))


def _check_cached_text(what: str, cache: Cache, condition: Any) -> None:
    if condition.name not in cache.index.texts:
        raise ConfigError(
            f"{what} contains no {condition.name}, which the predictor is conditioned on. Make another cache in "
            "another folder with mm-dit cache-latents."
        )
    for width in cache.widths(condition.name):
        if width != condition.width and condition.width:  # (0: any width, for parts that are concatenated)
            raise ConfigError(
                f"{what} contains {condition.name} of width {width}, but the predictor takes {condition.width}. "
                f"Correct predictor.{condition.setting}."
            )


def _check_opened(opened: OpenedDataset) -> OpenedDataset:
    """Return ``opened`` after checking that every condition has its items and every label is a class of the model."""
    for item in opened.model.predictor.conditions.items:
        if item not in opened.rows.items:
            if opened.cache:
                where = f"{opened.param.cache_key} = {opened.param.cache}"
                hint = "Make the cache again, in an empty folder, with mm-dit cache-latents."
            else:
                where, hint = opened.param.where, "Use a data set whose samples have one."
            raise ConfigError(f"{where} has samples without {item}, but the predictor is conditioned on it. {hint}")
    opened.collators(opened.rows, 0)
    label = opened.model.predictor.conditions.label
    if label is not None:
        rows = opened.rows
        check_labels(rows.labels, label.num_classes, rows.paths.__getitem__, rows.classes)
    return opened

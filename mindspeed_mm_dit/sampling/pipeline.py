"""A model in Python: sample it as ``mm-dit sample`` does, and train it on your own batches.

``mindspeed_mm_dit.load`` and ``mindspeed_mm_dit.create`` return a :class:`Pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.limits import BYTES, LARGEST, number, path_of, short_repr, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.conditions import kind_of, request_arrays
from mindspeed_mm_dit.data.order import Stream, coins, normals
from mindspeed_mm_dit.errors import ConfigError, names_arguments
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import check_text_widths
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.text_encoder import check_captions
from mindspeed_mm_dit.models.words_encoder import note_of_words
from mindspeed_mm_dit.objectives.guidance import GuidedChannels, Rescale
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.generate import generate_path, settings_for
from mindspeed_mm_dit.sampling.load import (
    ONE_NETWORK,
    Experts,
    check_weaker,
    describe,
    experts,
    load_adapters,
    load_model,
    other_expert,
)
from mindspeed_mm_dit.sampling.outputs import FPS, Output, draw_samples, png_of
from mindspeed_mm_dit.sampling.pictures import to_pil_image
from mindspeed_mm_dit.sampling.request import (
    SampleRequest,
    check_amount,
    check_request,
    labels_of,
    requested_images,
    resized,
    together,
)
from mindspeed_mm_dit.terminal import logger

Tensor = Any
CAPTION_DROPOUT = 0.1
"""Fraction of captions that ``Pipeline.loss`` drops; in a run, data.json sets it."""


@dataclass(frozen=True, repr=False)
class GeneratedSamples(Sequence[Any]):
    """Generated samples: a sequence of PIL images or, from a video model, of lists of frames."""

    arrays: np.ndarray
    """(N, H, W, 3 or 1) uint8, or for videos (N, F, H, W, 3 or 1)."""
    titles: tuple[str, ...]
    """What each sample should show: the name of its class, or its prompt."""
    labels: np.ndarray | None
    """(N,) int64; None if no classes were requested."""
    seed: int
    """The seed that they were generated with."""
    path: np.ndarray | None = None
    """(N, points, H, W, 3 or 1) uint8, or for videos (N, points, F, ...): states of the trajectory from noise, the last
    of which are the samples; None if ``path`` was not requested."""

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, number: Any) -> Any:
        """Return sample ``number``, or a list of them for a slice."""
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        sample = self.arrays[number]
        return to_pil_image(sample) if sample.ndim == 3 else [to_pil_image(frame) for frame in sample]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def grid(self) -> Image.Image:
        """Return one picture of all samples: a row for each class or prompt, or a strip of frames for each video."""
        return draw_samples(self.arrays, self.titles)

    @names_arguments(output="path")
    def save(self, path: str | Path, fps: float = FPS) -> str:
        """Write the samples as ``mm-dit sample --output PATH`` does, and return the names of the files.

        path: ``.png``, ``.jpg``, ``.npz``, ``.html``, or ``FOLDER/``; videos: ``.mp4``, ``.gif``, ``.png``, ``.npz``.
        """
        output = Output(path_of("path", path), number("fps", fps, 0.1, 1000))
        output.check(self.titles, self.arrays.shape[1:-1])
        return output.save(self.arrays, self.labels, self.titles, self.seed, {})

    def __repr__(self) -> str:
        titles = ", ".join(dict.fromkeys(self.titles))
        return f"<{len(self)} samples of {' x '.join(map(str, self.arrays.shape[1:-1]))}, seed {self.seed}: {titles}>"

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        return png_of(np.asarray(self.grid()))


def _as_list(name: str, argument: Any) -> list[Any] | None:
    """Return an argument as a list; a single name, number or prompt becomes a list of one."""
    value = argument.tolist() if hasattr(argument, "tolist") else argument  # (an array or tensor)
    if value is None or isinstance(value, (str, int, float)):
        return None if value is None else [value]
    try:
        items = None if isinstance(value, BYTES) else list(value)
    except TypeError:
        items = None
    if items is None:
        raise ConfigError(f"{name} = {short_repr(argument)}", "is not a list")
    if not items:
        raise ConfigError(name, "is empty", "request at least one")
    return items


def _argument_or_alias(name: str, value: Any, alias: str, alias_value: Any) -> Any:
    """Return the value of an argument with two names; raises ConfigError if both are passed."""
    if value is not None and alias_value is not None:
        reason = f"is the same argument as {alias}, and both are passed"
        raise ConfigError(f"{name} = {short_repr(value)}", reason, "drop one")
    return value if alias_value is None else alias_value


def _size_flag(size: Any) -> str | None:
    """Return (H, W) in the form of the flag --size."""
    if size is None or isinstance(size, str):
        return size
    sides = size.tolist() if hasattr(size, "tolist") else size
    if not isinstance(sides, Sequence) or isinstance(sides, BYTES) or len(sides) != 2:
        raise ConfigError(f"size = {short_repr(size)}", "is not height and width", 'write (480, 832), or "480x832"')
    return f"{sides[0]}x{sides[1]}"


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A model with everything needed to sample it and to train it."""

    model: Any
    """The composite: ``ae``, ``text_encoders``, ``diffusion`` and ``predictor``."""
    config: ModelConfig
    """Its model.json."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty if unknown."""
    experts: Experts | None = None
    """The low-noise expert; ``model`` is then the high-noise expert."""
    captions: tuple[str, ...] = ()
    """A few of its training captions; empty if unknown."""
    words: tuple[str, ...] = ()
    """All words of its training captions, if its text encoder knows no others; empty if unknown."""

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: str | Path,
        model_json: str | Path | None,
        use_ema: bool,
        bf16: bool,
        loras: tuple[Sequence[str], Sequence[str]] = ((), ()),
        low: str | Path | None = None,
        boundary: float | None = None,
    ) -> Pipeline:
        """Load a checkpoint of any format, and ``low``, the low-noise expert; ``loras``: adapters of each.

        Raises CheckpointError or ConfigError if that fails.
        """
        _, config, classes, captions, words = describe(checkpoint, model_json)
        low, both = other_expert(checkpoint, low), None
        if low is not None:
            both = experts(checkpoint, low, model_json, use_ema, loras, boundary)
        elif boundary is not None or loras[1]:
            raise ConfigError("low_noise_lora" if boundary is None else f"boundary = {boundary}", *ONE_NETWORK)
        adapters = load_adapters(loras[0], config)
        return cls(*load_model(checkpoint, model_json, use_ema, adapters, bf16=bf16), classes, both, captions, words)

    @classmethod
    def untrained(cls, config: ModelConfig, seed: int) -> Pipeline:
        """Return a model with initial weights, on the device."""
        check_text_widths(config)
        seed = whole_number("seed", seed, 0)
        model = DiTModel(config)
        runtime.load_arrays(model.predictor, model.initial_weights(seed))
        return cls(runtime.to_runtime_device(model), config)

    def __repr__(self) -> str:
        """Return in three lines what it generates, its conditions, and what to call."""
        size = parameters_of(self.config.predictor).num_elements()
        items, classes = self.config.predictor.conditions.items, ", ".join(self.classes[:10])
        more = ", ..." if len(self.classes) > 10 else ""
        return (
            f"<{self.config.predictor.model_id} of {size:,} parameters, {self.config.diffusion.model_id}, "
            f"generates {' x '.join(map(str, self.config.sample_size))}\n"
            f" conditioned on {' and '.join(items)}{f': {classes}{more}' if classes else ''}\n"
            f" .sample(...) generates, .loss(...) trains, .config and .predictor are its parts>"
        )

    @property
    def predictor(self) -> Any:
        """The network, an ordinary module: ``predictor(x_t, t, *condition)``."""
        return self.model.predictor

    @names_arguments(
        cfg_scale="guidance", cfg_channels="channels", cfg_interval="interval", cfg_rescale="rescale", prompt="prompts",
        low_noise_cfg_scale="low_noise_guidance", guidance_checkpoint="weaker", num_per_class="num",
        num_per_prompt="num",
    )  # fmt: skip
    def sample(
        self,
        classes: Sequence[str | int] | np.ndarray | str | int | None = None,
        *,
        prompts: Sequence[str] | str | None = None,
        vectors: np.ndarray | None = None,
        image: Any = None,
        last_image: Any = None,
        num: int = 1,
        steps: int | None = None,
        guidance: float | None = None,
        cfg_scale: float | None = None,
        low_noise_guidance: float | None = None,
        sampler: str | None = None,
        seed: int = 0,
        negative_prompt: str | None = None,
        frames: int | None = None,
        size: tuple[int, int] | str | None = None,
        channels: GuidedChannels | None = None,
        cfg_channels: GuidedChannels | None = None,
        interval: tuple[float, float] = (0.0, 1.0),
        rescale: Rescale | None = None,
        weaker: Pipeline | None = None,
        batch_size: int = 64,
        bf16: bool = False,
        options: Mapping[str, Any] | None = None,
        path: int = 1,
        on_step: Callable[[int], object] = lambda samples: None,
    ) -> GeneratedSamples:
        """Generate ``num`` samples of each class, prompt or vector (P,), bit for bit those of ``mm-dit sample``.

        classes: names that the checkpoint knows, or labels; the items of a list are read as those of ``mm-dit sample
        --classes``, an array contains labels. A single class or prompt needs no list. steps, sampler: None for the
        objective's defaults. image, last_image: first and last frame of a video, if the model takes them: a file, a PIL
        image, or an array (H, W, 3 or 1) uint8, of the video's size; or a list, one for each prompt. guidance: 1 is
        none, larger follows the condition more closely; None is 4, or 1 if the network takes the strength of guidance
        as an input; ``channels`` and ``interval`` limit it, ``rescale`` ("token" or "sample") restores the norm of the
        conditional prediction; ``low_noise_guidance``: that of the low-noise expert. weaker: autoguidance, away from
        the prediction of this model. cfg_scale, cfg_channels: ``guidance`` and ``channels`` by the names of the flags.
        frames, size (H, W) or "HxW": generate another size. options: further options of the sampler, by name. path:
        number of states of the trajectory to return, e.g. 8; 1 returns only the samples. on_step: called after every
        step with the number of samples it worked on.

        Raises:
            ConfigError: the model cannot generate this; the message names the argument.
        """
        config = resized(self.config, frames, _size_flag(size))
        guidance = _argument_or_alias("guidance", guidance, "cfg_scale", cfg_scale)
        channels = _argument_or_alias("channels", channels, "cfg_channels", cfg_channels)
        settings = settings_for(
            config,
            sampler=sampler,
            steps=steps,
            scale=guidance,
            channels=channels,
            interval=interval,
            rescale=rescale,
            seed=seed,
            batch_size=batch_size,
            options=options,
            bf16=bf16,
            weaker=self._weaker(weaker, config),
            experts=self.experts,
            low_scale=low_noise_guidance,
        )
        request = self._request(config, self._values(classes, prompts, vectors), image, last_image, negative_prompt)
        num, path = whole_number("num", num, 1), whole_number("path", path, 1)
        total = len(request) * num * path
        check_amount(f"num = {num}, path = {path}" if path > 1 else f"num = {num}", total, config, Path("as.npz"))
        request = request.each(num)
        states = generate_path(self.model, config, request, settings, path, on_step)
        titles = tuple(request.titles(self.classes))
        return GeneratedSamples(states[:, -1], titles, request.labels, settings.seed, states if path > 1 else None)

    @names_arguments(prompt="prompts")
    def loss(
        self,
        pixels: np.ndarray,
        classes: Sequence[str | int] | np.ndarray | str | int | None = None,
        *,
        prompts: Sequence[str] | str | None = None,
        vectors: np.ndarray | None = None,
        step: int = 0,
        seed: int = 0,
    ) -> Tensor:
        """Return the training loss of each sample, (B,) float32, to call ``.mean().backward()`` on.

        pixels: (B, C, H, W) uint8, or for videos (B, C, F, H, W), of any size that the model takes. Noise, times and
        dropped conditions depend only on ``seed`` and the sample index, ``step`` * B + the number in the batch.

        Raises:
            ConfigError: the model cannot learn from these pixels, or a sample has no class, prompt or vector.
        """
        if self.experts is not None:
            raise ConfigError("loss", "needs a single expert, and this pipeline has two", "load the one that you train")
        pixels, shape = self._check_pixels(np.asarray(pixels))
        step, seed = whole_number("step", step, 0, LARGEST // len(pixels) - 1), whole_number("seed", seed, 0)
        sample_indices = step * len(pixels) + np.arange(len(pixels))
        if classes is None and "label" in self.config.predictor.conditions.items:
            raise ConfigError("classes", "is missing: this model is conditioned on it")
        values = self._values(classes, prompts, vectors)
        for item, value in values.items():
            if len(value) != len(pixels):
                reason = f"come with {len(value)} of {item}"
                raise ConfigError(f"pixels: {len(pixels)} samples", reason, "pass one for each sample")
        batch = {"pixels": pixels, **self._condition_arrays(values, sample_indices, seed)}
        batch |= objective_of(self.config.diffusion).draws(self.config.diffusion, seed, sample_indices, shape)
        if self.config.ae.samples_posterior:
            batch["posterior_noise"] = normals(seed, Stream.POSTERIOR, sample_indices, shape)
        return self.model(**runtime.to_device(batch))

    def _check_pixels(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return a training batch and the shape of its latents; raises ConfigError if it is not a batch."""
        axes, what = len(self.config.latent_shape), f"pixels: {pixels.dtype} of shape {short_repr(pixels.shape)}"
        if pixels.dtype != np.uint8 or pixels.ndim != 1 + axes or not pixels.size:
            letters = "(B, C, H, W)" if axes == 3 else "(B, C, F, H, W)"
            raise ConfigError(what, f"are not {letters} of uint8", "pass values from 0 to 255")
        if pixels.shape[1] != self.config.ae.channels:
            raise ConfigError(what, f"have {pixels.shape[1]} channels, and the model {self.config.ae.channels}")
        shape = self.config.ae.latent_shape(pixels.shape[2:])
        return pixels, self.config.predictor.resized(shape).latent_shape

    def _condition_arrays(
        self, values: Mapping[str, Sequence[Any]], sample_indices: np.ndarray, seed: int
    ) -> dict[str, np.ndarray]:
        """Return the arrays of the conditions of a training batch, some of them dropped."""
        conditions, tokenizers = (
            self.config.predictor.conditions,
            [encoder.tokenizer for encoder in self.model.text_encoders],
        )
        arrays, numbers = dict(request_arrays(conditions.guided, values, tokenizers)), conditions.coins()
        for condition in conditions.guided:  # (the frames of a clip are among its pixels)
            dropout = CAPTION_DROPOUT if condition.item == "caption" else condition.dropout
            drops = coins(seed, Stream.LABEL_DROP, sample_indices, dropout, numbers[condition.dropout_key])
            for name, unconditional in kind_of(condition).unconditional(condition, None, tokenizers).items():
                arrays[name] = np.where(
                    drops.reshape(-1, *(1 for _ in unconditional.shape[1:])), unconditional, arrays[name]
                )
        return arrays

    def _request(
        self, config: ModelConfig, values: dict[str, list[Any]], image: Any, last_image: Any, negative_prompt: Any
    ) -> SampleRequest:
        """Return the request; raises ConfigError if the model of ``config`` cannot generate it."""
        if note := note_of_words(config, self.words, values.get("caption", ())):
            logger.warning(note)
        if image is not None or last_image is not None or config.predictor.conditions.frames:
            values["image"] = requested_images(config, image, last_image)
        request = SampleRequest(together(values), self._negative(negative_prompt))
        check_request(request, config)
        return request

    def _weaker(self, other: Any, config: ModelConfig) -> Callable[[], Any] | None:
        """Return a function that returns the weaker network; raises ConfigError if it cannot guide this model."""
        if other is None:
            return None
        if not isinstance(other, Pipeline):
            cure = "pass what mindspeed_mm_dit.load returns"
            raise ConfigError(f"weaker = {short_repr(other)}", "is not a model", cure)
        if self.experts is not None or other.experts is not None:
            raise ConfigError("weaker", "does not go with two experts", "leave it out")
        check_weaker("weaker", other.config, config)
        return lambda: other.predictor

    def _negative(self, negative_prompt: Any) -> dict[str, str]:
        """Return what guidance leads away from, by item; raises ConfigError if the model reads no such text."""
        if negative_prompt is None:
            return {}
        if "caption" not in self.config.predictor.conditions.items:
            raise ConfigError(
                f"negative_prompt = {short_repr(negative_prompt)}", "this model reads no text", "leave it out"
            )
        self._check_texts("negative_prompt", [negative_prompt] if negative_prompt != "" else [])
        return {"caption": negative_prompt}

    def _check_texts(self, name: str, texts: Sequence[Any]) -> None:
        for text in texts:
            if not isinstance(text, str):
                raise ConfigError(f"{name}: {short_repr(text)}", "is not a string")
        for encoder in self.model.text_encoders:
            check_captions(encoder.tokenizer, texts, name)

    def _values(self, classes: Any, prompts: Any, vectors: Any) -> dict[str, list[Any]]:
        """Return the requested conditions by item; raises ConfigError if the model does not take them."""
        conditions = self.config.predictor.conditions
        values: dict[str, list[Any]] = {}
        for item, name, requested in (
            ("label", "classes", _as_list("classes", classes)),
            ("caption", "prompts", _as_list("prompts", prompts)),
            ("vector", "vectors", _as_list("vectors", vectors)),
        ):
            if requested is None and item in conditions.items and item != "label":
                raise ConfigError(name, "is missing: this model is conditioned on it")
            if requested is not None and item not in conditions.items:
                reason = f"this model is conditioned on {' and '.join(conditions.items)}"
                raise ConfigError(name, reason, "leave it out")
            if requested is not None:
                values[item] = requested
        self._check_texts("prompts", values.get("caption", []))
        if conditions.label is not None:
            count = conditions.label.num_classes
            labels = values.get("label", range(min(10, count)))
            holds_labels = classes is None or (hasattr(classes, "tolist") and not isinstance(labels[0], str))
            values["label"] = labels_of([str(label) for label in labels], () if holds_labels else self.classes, count)
        return values

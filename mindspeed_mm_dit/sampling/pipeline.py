"""A model in Python: sample it as ``mm-dit sample`` does, and train it on your own batches.

``mindspeed_mm_dit.load`` and ``mindspeed_mm_dit.create`` return a :class:`Pipeline`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.limits import BYTES, LARGEST, number, path_of, short_repr, whole_number
from mindspeed_mm_dit.configs.model import ModelConfig
from mindspeed_mm_dit.data.conditions.registry import kind_of, request_arrays
from mindspeed_mm_dit.data.draws import Stream, coins, normals
from mindspeed_mm_dit.errors import ConfigError, names_arguments
from mindspeed_mm_dit.framework import runtime
from mindspeed_mm_dit.models.composite import DiTModel
from mindspeed_mm_dit.models.data import check_text_widths
from mindspeed_mm_dit.models.known_words import note_of_words
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.text_encoder import check_captions
from mindspeed_mm_dit.objectives.guidance import GuidedChannels, Rescale
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.experts import ONE_NETWORK, Experts
from mindspeed_mm_dit.sampling.generate import generate_path, settings_for
from mindspeed_mm_dit.sampling.grid import image_of
from mindspeed_mm_dit.sampling.image_files import draw_samples, png_of
from mindspeed_mm_dit.sampling.load import (
    check_weaker,
    describe,
    experts,
    load_adapters,
    load_model,
    other_expert,
)
from mindspeed_mm_dit.sampling.outputs import Output
from mindspeed_mm_dit.sampling.request import (
    SampleRequest,
    check_amount,
    check_request,
    labels_of,
    requested_images,
    resized,
    together,
)
from mindspeed_mm_dit.sampling.video_files import FPS
from mindspeed_mm_dit.terminal import echo_if_open

Tensor = Any
CAPTION_DROPOUT = 0.1
"""Fraction of captions that ``Pipeline.loss`` drops, as it has no data.json that says how many."""


@dataclass(frozen=True, repr=False)
class GeneratedSamples(Sequence[Any]):
    """Generated samples: a sequence of PIL images or, from a video model, of lists of frames."""

    arrays: np.ndarray
    """(N, H, W, 3 or 1) uint8, or for videos (N, F, H, W, 3 or 1)."""
    titles: tuple[str, ...]
    """What each sample should show: the name of its class, or its prompt."""
    labels: np.ndarray | None
    """(N,) int64; None if no classes were asked for."""
    seed: int
    """The seed that they were generated with."""
    path: np.ndarray | None = None
    """(N, points, H, W, 3 or 1) uint8, or for videos (N, points, F, ...): states on the path from noise, the last of
    which are the samples; None if ``path`` was not asked for."""

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, number: Any) -> Any:
        """Return sample ``number``, or a list of them for a slice."""
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        sample = self.arrays[number]
        return image_of(sample) if sample.ndim == 3 else [image_of(frame) for frame in sample]

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


def _listed(name: str, asked: Any) -> list[Any] | None:
    """Return what is asked for as a list; a single name, number or prompt becomes a list of one."""
    own = asked.tolist() if hasattr(asked, "tolist") else asked  # (an array or tensor)
    if own is None or isinstance(own, (str, int, float)):
        return None if own is None else [own]
    try:
        found = None if isinstance(own, BYTES) else list(own)
    except TypeError:
        found = None
    if found is None:
        raise ConfigError(f"{name} = {short_repr(asked)}", "is no list")
    if not found:
        raise ConfigError(name, "is empty", "ask for at least one")
    return found


def _one_of(name: str, given: Any, by_flag: str, flag: Any) -> Any:
    """Return what one of two names of an argument says; raises ConfigError if both do."""
    if given is not None and flag is not None:
        raise ConfigError(
            f"{name} = {short_repr(given)}", f"is {by_flag} by another name, and both are given", "drop one"
        )
    return given if flag is None else flag


def _written(size: Any) -> str | None:
    """Return (H, W) in the form of the flag --size."""
    if size is None or isinstance(size, str):
        return size
    own = size.tolist() if hasattr(size, "tolist") else size
    if not isinstance(own, Sequence) or isinstance(own, BYTES) or len(own) != 2:
        raise ConfigError(f"size = {short_repr(size)}", "is not height and width", 'write (480, 832), or "480x832"')
    return f"{own[0]}x{own[1]}"


@dataclass(frozen=True, repr=False)
class Pipeline:
    """A model with all that is needed to sample it and to train it."""

    model: Any
    """The composite: ``ae``, ``text_encoders``, ``diffusion`` and ``predictor``."""
    config: ModelConfig
    """Its model.json."""
    classes: tuple[str, ...] = ()
    """Name of each label; empty if unknown."""
    experts: Experts | None = None
    """The expert of low noise beside ``model``, which then is the one of high noise."""
    captions: tuple[str, ...] = ()
    """A few captions that it learned; empty if unknown."""
    words: tuple[str, ...] = ()
    """All words of the captions, where others say nothing to it; empty if unknown."""

    @classmethod
    def of_checkpoint(
        cls, checkpoint: str | Path, model_json: str | Path | None, use_ema: bool, bf16: bool,
        loras: tuple[Sequence[str], Sequence[str]] = ((), ()), low: str | Path | None = None,
        boundary: float | None = None,
    ) -> Pipeline:  # fmt: skip
        """Load a checkpoint of any format, and ``low``, the expert of low noise; ``loras``: adapters of each.

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
        """Return a model with its initial weights, on the device."""
        check_text_widths(config)
        seed = whole_number("seed", seed, 0)
        model = DiTModel(config)
        runtime.load_arrays(model.predictor, model.initial_weights(seed))
        return cls(runtime.to_runtime_device(model), config)

    def __repr__(self) -> str:
        """Return in three lines what it draws, what steers it, and what to call."""
        size = parameters_of(self.config.predictor).num_elements()
        items, classes = self.config.predictor.conditions.items, ", ".join(self.classes[:10])
        more = ", ..." if len(self.classes) > 10 else ""
        return (
            f"<{self.config.predictor.model_id} of {size:,} parameters, {self.config.diffusion.model_id}, "
            f"draws {' x '.join(map(str, self.config.sample_size))}\n"
            f" steered by {' and '.join(items)}{f': {classes}{more}' if classes else ''}\n"
            f" .sample(...) draws, .loss(...) trains, .config and .predictor are its parts>"
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

        classes: names that the checkpoint knows, or labels; a list says which as ``mm-dit sample --classes`` does, an
        array holds labels. A single class or prompt needs no list. steps, sampler: None for the objective's defaults.
        image, last_image: what a video begins and ends with, if the model takes it: a file, a PIL image, or an array
        (H, W, 3 or 1) uint8, of the video's size; or a list, one for each prompt. guidance: 1 is none, larger follows
        the condition more closely; None is 4, or 1 if the network takes the strength of guidance as an input;
        ``channels`` and ``interval`` limit it, ``rescale`` ("token" or "sample") gives what is guided its norm back;
        ``low_noise_guidance``: that of the expert. weaker: autoguidance, away from what this model says.
        cfg_scale, cfg_channels: ``guidance`` and ``channels`` under the names of the flags.
        frames, size (H, W) or "HxW": draw another size. options: further options of the sampler, by name. path: number
        of states on the path from noise to keep, e.g. 8; 1 keeps only the samples. on_step: called
        after every step with the number of samples it worked on.

        Raises:
            ConfigError: the model cannot generate this; the message names the argument.
        """
        config = resized(self.config, frames, _written(size))
        guidance = _one_of("guidance", guidance, "cfg_scale", cfg_scale)
        channels = _one_of("channels", channels, "cfg_channels", cfg_channels)
        settings = settings_for(
            config, sampler=sampler, steps=steps, scale=guidance, channels=channels, interval=interval, rescale=rescale,
            seed=seed, batch_size=batch_size, options=options, bf16=bf16, weaker=self._weaker(weaker, config),
            experts=self.experts, low_scale=low_noise_guidance,
        )  # fmt: skip
        asked = self._asked(config, self._values(classes, prompts, vectors), image, last_image, negative_prompt)
        num, path = whole_number("num", num, 1), whole_number("path", path, 1)
        total = len(asked) * num * path
        check_amount(f"num = {num}, path = {path}" if path > 1 else f"num = {num}", total, config, Path("as.npz"))
        asked = asked.each(num)
        walked = generate_path(self.model, config, asked, settings, path, on_step)
        titles = tuple(asked.titles(self.classes))
        return GeneratedSamples(walked[:, -1], titles, asked.labels, settings.seed, walked if path > 1 else None)

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
            raise ConfigError("loss", "is of one expert, and this pipeline has two", "load the one that you train")
        pixels, shape = self._checked(np.asarray(pixels))
        step, seed = whole_number("step", step, 0, LARGEST // len(pixels) - 1), whole_number("seed", seed, 0)
        places = step * len(pixels) + np.arange(len(pixels))
        if classes is None and "label" in self.config.predictor.conditions.items:
            raise ConfigError("classes", "is missing: this model is steered by it")
        values = self._values(classes, prompts, vectors)
        for item, own in values.items():
            if len(own) != len(pixels):
                raise ConfigError(
                    f"pixels: {len(pixels)} samples", f"come with {len(own)} of {item}", "give each its own"
                )
        batch = {"pixels": pixels, **self._given(values, places, seed)}
        batch |= objective_of(self.config.diffusion).draws(self.config.diffusion, seed, places, shape)
        if self.config.ae.samples_posterior:
            batch["posterior_noise"] = normals(seed, Stream.POSTERIOR, places, shape)
        return self.model(**runtime.to_device(batch))

    def _checked(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return a training batch and the shape of its latents; raises ConfigError if it is not a batch."""
        axes, what = len(self.config.latent_shape), f"pixels: {pixels.dtype} of shape {short_repr(pixels.shape)}"
        if pixels.dtype != np.uint8 or pixels.ndim != 1 + axes or not pixels.size:
            letters = "(B, C, H, W)" if axes == 3 else "(B, C, F, H, W)"
            raise ConfigError(what, f"are not {letters} of uint8", "pass values from 0 to 255")
        if pixels.shape[1] != self.config.ae.channels:
            raise ConfigError(what, f"have {pixels.shape[1]} channels, and the model {self.config.ae.channels}")
        shape = self.config.ae.latent_shape(pixels.shape[2:])
        return pixels, self.config.predictor.resized(shape).latent_shape

    def _given(self, values: Mapping[str, Sequence[Any]], places: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the arrays of the conditions of a training batch, some of them dropped."""
        conditions, tokenizers = self.config.predictor.conditions, [own.tokenizer for own in self.model.text_encoders]
        given, numbers = dict(request_arrays(conditions.guided, values, tokenizers)), conditions.coins()
        for condition in conditions.guided:  # (a clip's own frames are among its pixels)
            dropout = CAPTION_DROPOUT if condition.item == "caption" else condition.dropout
            drops = coins(seed, Stream.LABEL_DROP, places, dropout, numbers[condition.dropout_key])
            for name, unconditional in kind_of(condition).unconditional(condition, None, tokenizers).items():
                given[name] = np.where(
                    drops.reshape(-1, *(1 for _ in unconditional.shape[1:])), unconditional, given[name]
                )
        return given

    def _asked(
        self, config: ModelConfig, values: dict[str, list[Any]], image: Any, last_image: Any, negative_prompt: Any
    ) -> SampleRequest:
        """Return what is asked for; raises ConfigError if the model of ``config`` cannot draw it."""
        if note := note_of_words(config, self.words, values.get("caption", ())):
            echo_if_open(note, sys.stderr)
        if image is not None or last_image is not None or config.predictor.conditions.frames:
            values["image"] = requested_images(config, image, last_image)
        asked = SampleRequest(together(values), self._instead(negative_prompt))
        check_request(asked, config)
        return asked

    def _weaker(self, other: Any, config: ModelConfig) -> Callable[[], Any] | None:
        """Return what gives the network that guidance leads away from; raises ConfigError if it cannot guide this."""
        if other is None:
            return None
        if not isinstance(other, Pipeline):
            raise ConfigError(f"weaker = {short_repr(other)}", "is no model", "pass what mindspeed_mm_dit.load returns")
        if self.experts is not None or other.experts is not None:
            raise ConfigError("weaker", "does not go with two experts", "leave it out")
        check_weaker("weaker", other.config, config)
        return lambda: other.predictor

    def _instead(self, negative_prompt: Any) -> dict[str, str]:
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
                raise ConfigError(f"{name}: {short_repr(text)}", "is no text")
        for encoder in self.model.text_encoders:
            check_captions(encoder.tokenizer, texts, name)

    def _values(self, classes: Any, prompts: Any, vectors: Any) -> dict[str, list[Any]]:
        """Return the conditions asked for, by item; raises ConfigError if they do not steer the model."""
        conditions = self.config.predictor.conditions
        values: dict[str, list[Any]] = {}
        for item, name, own in (
            ("label", "classes", _listed("classes", classes)),
            ("caption", "prompts", _listed("prompts", prompts)),
            ("vector", "vectors", _listed("vectors", vectors)),
        ):
            if own is None and item in conditions.items and item != "label":
                raise ConfigError(name, "is missing: this model is steered by it")
            if own is not None and item not in conditions.items:
                raise ConfigError(name, f"this model is steered by {' and '.join(conditions.items)}", "leave it out")
            if own is not None:
                values[item] = own
        self._check_texts("prompts", values.get("caption", []))
        if conditions.label is not None:
            count = conditions.label.num_classes
            asked = values.get("label", range(min(10, count)))
            holds_labels = classes is None or (hasattr(classes, "tolist") and not isinstance(asked[0], str))
            values["label"] = labels_of([str(one) for one in asked], () if holds_labels else self.classes, count)
        return values

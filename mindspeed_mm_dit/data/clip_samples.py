"""The samples of a run on clips, by position: pixels and captions, and every random draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindspeed_mm_dit.configs.clips import ClipsParam
from mindspeed_mm_dit.data import draws
from mindspeed_mm_dit.data.captions import Tokens
from mindspeed_mm_dit.data.clips import Clip, ClipIndex, is_still
from mindspeed_mm_dit.data.dataset import Batch, Draw
from mindspeed_mm_dit.data.draws import Stream
from mindspeed_mm_dit.data.files import UnusableFile
from mindspeed_mm_dit.data.frames import fit_frames, frame_numbers
from mindspeed_mm_dit.data.order import SampleOrder
from mindspeed_mm_dit.data.transforms import load_still
from mindspeed_mm_dit.data.video_file import read_frames
from mindspeed_mm_dit.errors import DataError

CACHE_BYTES = 256 * 2**20
"""Clips that fit in this are decoded once and kept, where each is always the same frames."""
NO_CAPTION = -1
"""In the place of a caption's number: the empty one."""


class ClipReader:
    """The pixels of an index's clips; safe to call from several threads."""

    def __init__(self, index: ClipIndex, param: ClipsParam, channels: int = 3) -> None:
        self.index, self.param, self._channels = index, param, channels
        bytes_a_clip = math.prod(param.pixels_shape) * (1 if param.crop == "exact" else 4)
        fits = len(index) * bytes_a_clip <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if fits and param.clip_start == "first" else None

    def read(self, clips: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return pixels (B, 3 or 1, F, H, W) of ``clips`` (B,), uint8 (float32 with ``crop`` "mindspeed_mm").

        starts: (B,) in [0, 1), where each begins with ``clip_start`` "random", from its first frame to the last that
        leaves it long enough.
        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        return np.stack([self._pixels(clip, start) for clip, start in zip(clips.tolist(), starts.tolist())])

    def _pixels(self, number: int, start: float) -> np.ndarray:
        if self._decoded is not None and number in self._decoded:
            return self._decoded[number]
        clip = self.index.clips[number]
        path = Path(self.param.data_folder) / clip.entry.path
        try:
            pixels = fit_frames(self._frames(path, clip, start), self.param.size, self.param.crop)
            pixels = pixels if self._channels == 3 else grey(pixels)
        except UnusableFile as problem:
            raise DataError(
                str(path), f"{problem} (line {clip.entry.line} of {self.param.json_path})",
                "repair the file or take its line out; a run can be resumed from its last checkpoint",
            ) from None  # fmt: skip
        if self._decoded is not None:
            self._decoded[number] = pixels
        return pixels

    def _frames(self, path: Path, clip: Clip, start: float) -> np.ndarray:
        """Return frames (F, h, w, 3) uint8 as they stand in the file."""
        if is_still(path):
            return load_still(path, max(self.param.size))[None]
        first = int(start * (clip.spare + 1)) if self.param.clip_start == "random" else 0
        return read_frames(path, frame_numbers(self.param.num_frames, clip.step, first))


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return the luma (1, F, H, W) of colours (3, F, H, W), in their dtype (ITU-R BT.601, as Pillow's mode L)."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), pixels, 1)[None]
    return np.round(luma).astype(pixels.dtype) if pixels.dtype == np.uint8 else luma


@dataclass(frozen=True)
class ClipDraws:
    """What stands at each position of a run, as a function of the seed; the same for files and for a cache."""

    clips: np.ndarray
    """Numbers of the clips that stand somewhere, (N,) int64."""
    offered: np.ndarray
    """Captions of every clip there is, by its number, int64."""
    order: SampleOrder
    """Which of ``clips`` stands where."""
    seed: int
    """Of every draw."""
    caption_dropout_prob: float
    """Probability that a sample loses its caption."""
    draw: Draw
    """The objective's own draws."""
    latent_shape: tuple[int, ...]
    """(C, f, h, w) of a sample's latents, which ``draw`` is asked for."""
    posterior_noise: bool = False
    """Whether latents are drawn from their posterior, so that a sample carries noise for it."""

    def clips_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the number of the clip at each of ``positions`` (B,), int64."""
        return self.clips[self.order.images(positions)]

    def captions(self, positions: np.ndarray) -> np.ndarray:
        """Return which of its clip's captions stands at each of ``positions`` (B,), int64; NO_CAPTION where dropped."""
        dropped = draws.coins(self.seed, Stream.LABEL_DROP, positions, self.caption_dropout_prob)
        chosen = draws.uniforms(self.seed, Stream.CAPTION, positions) * self.offered[self.clips_at(positions)]
        return np.where(dropped, NO_CAPTION, chosen.astype(np.int64))

    def starts(self, positions: np.ndarray) -> np.ndarray:
        """Return where a clip begins that begins anywhere, (B,) in [0, 1)."""
        return draws.uniforms(self.seed, Stream.CLIP_START, positions)

    def others(self, positions: np.ndarray) -> Batch:
        """Return what the objective draws and, for a sampled posterior, posterior_noise (B, C, f, h, w) float32."""
        batch = self.draw(self.seed, positions, self.latent_shape)
        if not self.posterior_noise:
            return batch
        noise = draws.normals(self.seed, Stream.POSTERIOR, positions, self.latent_shape)
        return {**batch, "posterior_noise": noise}


class ClipSamples:
    """The samples of a run from the files of its clips; safe to call from several threads."""

    def __init__(self, reader: ClipReader, drawn: ClipDraws, tokenizer: Callable[[Sequence[str]], Tokens]) -> None:
        self._reader, self._drawn, self._tokenizer = reader, drawn, tokenizer

    def batch(self, positions: np.ndarray) -> Batch:
        """Return the samples at ``positions`` (B,) int64.

        pixels (B, 3 or 1, F, H, W), uint8 (float32 with ``crop`` "mindspeed_mm"); caption_ids and caption_mask (B, L)
        int64, of the empty caption where the coin drops it; and the other draws.
        """
        tokens = self._tokenizer(self.captions(positions))
        return {
            "pixels": self._reader.read(self._drawn.clips_at(positions), self._drawn.starts(positions)),
            "caption_ids": tokens.ids,
            "caption_mask": tokens.mask,
            **self._drawn.others(positions),
        }

    def captions(self, positions: np.ndarray) -> list[str]:
        """Return the caption at each of ``positions`` (B,); no video is opened."""
        clips, numbers = self._drawn.clips_at(positions).tolist(), self._drawn.captions(positions).tolist()
        offered = [self._reader.index.clips[clip].entry.captions for clip in clips]
        return ["" if number == NO_CAPTION else some[number] for some, number in zip(offered, numbers)]

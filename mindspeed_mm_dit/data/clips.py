"""Clips: the rows of an annotation, each one checked; which frames of a file are read, and as pixels of one size."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.configs.limits import MOST_FRAMES
from mindspeed_mm_dit.data.annotation import KEYS, Entry, Line, UnusableEntry, entry_of, image_paths, read_annotation
from mindspeed_mm_dit.data.buckets import fits, shapes_of
from mindspeed_mm_dit.data.builtin import CLIPS, provide
from mindspeed_mm_dit.data.captions import first_problems
from mindspeed_mm_dit.data.check_images import notes_on_colours
from mindspeed_mm_dit.data.colours import Colours, colours_of
from mindspeed_mm_dit.data.labels import check_labels, composed, labels_of, named_to_the_last
from mindspeed_mm_dit.data.order import Stream, uniforms
from mindspeed_mm_dit.data.rows import Read, Rows, SourceRequest
from mindspeed_mm_dit.data.transforms import MAX_SCALED_PIXELS, load_still, open_image, readable_formats, still_size
from mindspeed_mm_dit.data.video_file import VideoFacts, look_at_video, read_frames
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.terminal import progress

SAME_RATE = 0.1
"""Frame rates that differ by less than this, in frames per second, count as the same: 23.976 is 24."""

Size = tuple[int, int]
"""(H, W) in pixels."""


def step_between(fps: float | None, train_fps: float | None) -> float:
    """Return the frames of a video of ``fps`` per frame of its clip; below 1 some frames are repeated."""
    if train_fps is None or fps is None or abs(fps - train_fps) < SAME_RATE:
        return 1.0
    return fps / train_fps


def frame_numbers(num_frames: int, step: float, start: int = 0) -> np.ndarray:
    """Return the frame numbers of a clip, (num_frames,) int64: every ``step``-th from ``start`` on, rounded down."""
    return np.floor(start + step * np.arange(num_frames)).astype(np.int64)


def covering_size(size: Size, target: Size) -> Size:
    """Return the smallest size with the aspect ratio of ``size`` that covers ``target``, in integer arithmetic."""
    (h, w), (high, wide) = size, target
    return (high, w * high // h) if h * wide < w * high else (h * wide // w, wide)


def covering_size_of_mindspeed_mm(size: Size, target: Size) -> Size:
    """Return the covering size as MindSpeed-MM's ``shortsideresize`` computes it, in floats."""
    (h, w), (high, wide) = size, target
    return (high, int(high / h * w)) if h / w < high / wide else (int(wide / w * h), wide)


def crop_of_mindspeed_mm(size: Size, target: Size) -> Size:
    """Return the size that CenterCropResizeVideo cuts out of ``size`` before stretching it to ``target``."""
    (h, w), proportion = size, target[0] / target[1]
    return (int(w * proportion), w) if h / w > proportion else (h, int(h / proportion))


def fit_frames(frames: np.ndarray, target: Size, crop: str = "exact") -> np.ndarray:
    """Turn frames (F, h, w, 3) uint8 into pixels (3, F, H, W) of the size ``target``, levels 0 ... 255.

    Pixels are uint8 with ``crop`` "exact" and float32 with "mindspeed_mm": there a crop that lost a row or column is
    stretched, and levels are not rounded afterwards.

    Raises UnusableFile for frames so narrow that they would not fit into memory.
    """
    size = (frames.shape[1], frames.shape[2])
    check_proportions(size, target)
    if crop == "exact":
        resized = resize_levels(frames, covering_size(size, target))
        pixels = _centre(resized, target)
    else:
        resized = resize_levels(frames, covering_size_of_mindspeed_mm(size, target))
        cut = _centre(resized, crop_of_mindspeed_mm((resized.shape[1], resized.shape[2]), target))
        pixels = _stretch(cut.astype(np.float32), target)
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2))


def check_proportions(size: Size, target: Size) -> None:
    """Raise UnusableFile for a frame so narrow that, scaled to cover ``target``, it would not fit into memory."""
    high, wide = covering_size(size, target)
    if high * wide >= MAX_SCALED_PIXELS:
        raise UnusableFile(f"is too narrow: its frames of {size[0]} x {size[1]} would become {high} x {wide}")


def resize_levels(frames: np.ndarray, size: Size) -> np.ndarray:
    """Scale frames (F, h, w, 3) uint8 bilinearly with antialiasing, rounded to whole levels."""
    if frames.shape[1:3] == size:
        return frames
    scaled = (Image.fromarray(frame).resize(size[::-1], Image.Resampling.BILINEAR) for frame in frames)
    return np.stack([np.asarray(frame) for frame in scaled])


def _centre(frames: np.ndarray, size: Size) -> np.ndarray:
    """Cut the centre; odd margins are rounded by Python's round(), as in MindSpeed-MM."""
    top, left = (round((whole - part) / 2) for whole, part in zip(frames.shape[1:3], size))
    return frames[:, top : top + size[0], left : left + size[1]]


def _stretch(frames: np.ndarray, size: Size) -> np.ndarray:
    """Scale frames (F, h, w, 3) float32 bilinearly."""
    if frames.shape[1:3] == size:
        return frames
    planes = (Image.fromarray(plane) for frame in frames for plane in frame.transpose(2, 0, 1))
    scaled = [np.asarray(plane.resize(size[::-1], Image.Resampling.BILINEAR)) for plane in planes]
    return np.stack(scaled).reshape(len(frames), 3, *size).transpose(0, 2, 3, 1)


DECODE_CHECK_LIMIT = 1000
"""Up to this many clips, every frame is decoded before a run; beyond, only the first, and the rest are counted."""
MAX_PROBLEMS, MAX_NAMES = 100, 5


EARLY = 0.05
"""A frame that comes this much late, in frames of the clip, is on time: containers round to a millisecond."""


SAME_SPEED = 1.2
"""Rates that differ by more than this factor get a warning."""


class Clip(NamedTuple):
    """A clip that can be used."""

    entry: Entry
    """Its entry in the annotation."""
    step: float
    """Frames of the video from one frame of the clip to the next, on average."""
    num_frames: int
    """Usable frames of the video."""
    size: Size
    """(H, W) of a frame, in pixels."""
    due: np.ndarray | None = None
    """If frames are chosen by time: when each is due and the last ends, in frames of the clip, (num_frames + 1,)."""

    images: tuple[str, ...] = ()
    """Paths of its first and last image, relative to ``data_folder``, if the annotation names them."""

    @property
    def longest(self) -> int:
        """Frames of the longest clip that fits in the video."""
        if self.due is not None:
            return min(MOST_FRAMES, math.ceil(self.due[-1] - EARLY))
        numbers = frame_numbers(math.ceil(self.num_frames / self.step) + 1, self.step)
        return int((numbers < self.num_frames).sum())

    def numbers(self, num_frames: int, first: int = 0) -> np.ndarray:
        """Return the frames of the video for a clip that begins with frame ``first``, (num_frames,) int64."""
        if self.due is None:
            return frame_numbers(num_frames, self.step, first)
        return np.searchsorted(self.due, self.due[first] + np.arange(num_frames) + EARLY, side="right") - 1

    def spare(self, num_frames: int) -> int:
        """Return how many frames after the first a clip of ``num_frames`` may begin."""
        if self.due is None:
            return self.num_frames - 1 - int(self.numbers(num_frames)[-1])
        return int(np.searchsorted(self.due, self.due[-1] - (num_frames - 1) - EARLY)) - 1


class _Look(NamedTuple):
    """Result of checking one entry: a clip, the bytes and facts of its file, or a problem."""

    clip: Clip | None
    bytes: int = 0
    problem: str = ""
    facts: VideoFacts | None = None
    colours: Colours = Colours.SRGB


def open_clips(param: ClipsParam, request: SourceRequest) -> Rows:
    """Read the annotation and check every clip: its captions or label, its file, and that the file fits the annotation.

    Raises:
        DataError: naming every unusable clip, by file and line (``skip_bad_clips`` leaves them out).
    """
    provide_clips(param)
    path = Path(param.json_path)
    lines = read_annotation(path)
    decode = len(lines) <= DECODE_CHECK_LIMIT
    with ThreadPoolExecutor() as pool:
        looking = pool.map(lambda line: _look(line, param, decode, request.items), lines)
        looks = list(progress("checking clips", looking, total=len(lines), unit="clip", delay=2))
    captions = [look.clip.entry.captions if look.clip else () for look in looks]
    wrong = first_problems(captions, request.caption_problems)
    looks = [_Look(None, problem=problem) if problem else look for look, problem in zip(looks, wrong)]
    clips = tuple(look.clip for look in looks if look.clip is not None)
    problems = tuple(
        f"{location} {look.problem}" for location, look in zip(_locations(lines), looks) if look.clip is None
    )
    if problems and not (param.skip_bad_clips and clips):
        raise DataError(
            str(path),
            f"{len(problems)} of {len(lines)} clips cannot be used{_listed(problems)}",
            f"remove {param.data_folder}: an earlier version wrote it, and it is written again"
            if param.source
            else "correct these lines or files, or set dataset_param.skip_bad_clips to true",
        )
    items, classes, notes = _items(param, clips, request)
    sizes = np.array([(clip.longest, *clip.size) for clip in clips], np.int64)
    shapes = None if param.buckets is None else shapes_of(sizes, param)
    return Rows(
        tuple(str(Path(param.data_folder) / clip.entry.path) for clip in clips),
        items,
        classes,
        skipped=len(problems),
        problems=problems,
        notes=(
            *notes,
            *_notes(lines, clips, decode, param),
            *_note_of_rates(looks, param, request.frame_rate),
            *_notes_on_display(looks, param),
            *_note_of_unused(param, shapes),
        ),
        digest=_digest_of(clips, looks),
        facts=clips,
        shapes=shapes,
        sizes=sizes,
        files=tuple(str(Path(param.data_folder) / name) for clip in clips for name in (clip.entry.path, *clip.images)),
    )


def clips_as_listed(param: ClipsParam, rows: Rows) -> Rows:
    """Return the rows of a cache, compared with the annotation if that is there, and the images that it names.

    Raises:
        DataError: clips of the cache have other captions or labels there, or it lists more clips.
    """
    if not Path(param.json_path).is_file():
        return rows
    known = {name: label for label, name in enumerate(rows.classes)}
    captioned = any(rows.items.get("caption", ()))
    label_key = param.label_key if "label" in rows.items else None
    captions = rows.captions if captioned else [()] * len(rows)
    labels = rows.labels.tolist() if label_key else [None] * len(rows)
    cached, listed = Counter[tuple[Any, ...]](zip(rows.paths, captions, labels)), Counter[tuple[Any, ...]]()
    images: list[str] = []
    for line in read_annotation(Path(param.json_path)):
        with suppress(UnusableEntry):  # (such a clip is not in the cache)
            entry = entry_of(line, captioned, label_key)
            word = composed([str(entry.label).strip()])[0]
            label = known.get(word, int(word) if word.isdecimal() else None) if label_key else None
            names = image_paths(line, param.extra_images.values())
            clip = (str(Path(param.data_folder, entry.path)), entry.captions, label)
            listed[clip] += 1
            images += [str(Path(param.data_folder, name)) for name in names if clip in cached]
    changed = sorted({path for path, _, _ in cached - listed})
    if changed or listed.total() > len(rows) + rows.skipped:
        first_changed = ", ".join(changed[:MAX_NAMES]) + (", ..." if len(changed) > MAX_NAMES else "")
        raise DataError(
            f"{param.cache_key} = {param.features}",
            f"was made of {len(rows) + rows.skipped:,} clips, and {param.json_path} lists {listed.total():,}"
            + (f"; of {len(changed):,} it has another caption or label, or none: {first_changed}" if changed else ""),
            "make the cache again, in an empty folder: mm-dit cache-latents --model ... --data ... --output ...",
        )
    return replace(rows, files=tuple(images))


def _items(
    param: ClipsParam, clips: tuple[Clip, ...], request: SourceRequest
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]:
    """Return the items of each clip besides its video, the class names, and notes on them."""
    items: dict[str, Any] = {"caption": tuple(clip.entry.captions for clip in clips)}
    if "label" not in request.items:
        return items, (), ()
    words = [str(clip.entry.label).strip() for clip in clips]
    location = lambda row: f"{param.json_path}: line {clips[row].entry.line}"  # noqa: E731
    labels = labels_of(words, param.json_path, location, known_classes=request.classes)
    check_labels(labels.numbers, request.num_classes, location, labels.classes)
    return items | {"label": labels.numbers}, named_to_the_last(labels.classes, labels.numbers), labels.notes


def provide_clips(param: ClipsParam) -> None:
    """Write the built-in clips that ``param`` names, unless they exist."""
    if param.source is not None:
        provide(CLIPS, param.source, Path(param.data_folder))


def _locations(lines: list[Line]) -> list[str]:
    """Return a name for each object of an annotation: its line and, if several share the line, its number."""
    sharing = Counter(line.line for line in lines)
    return [
        f"line {line.line}" if sharing[line.line] == 1 else f"line {line.line}, clip {number},"
        for number, line in enumerate(lines, 1)
    ]


def _listed(problems: tuple[str, ...]) -> str:
    """Return the first PROBLEMS_SHOWN of ``problems``, each on a new line, and the number of the others."""
    more = len(problems) - MAX_PROBLEMS
    rest = f"\n    ... and {more:,} more" if more > 0 else ""
    return "".join(f"\n    {problem}" for problem in problems[:MAX_PROBLEMS]) + rest


def _look(line: Line, param: ClipsParam, decode: bool, items: tuple[str, ...]) -> _Look:
    captioned, label_key = "caption" in items or not items, param.label_key if "label" in items else None
    try:
        entry = entry_of(line, captioned, label_key)
        images = image_paths(line, param.extra_images.values())
    except UnusableEntry as problem:
        return _Look(None, problem=str(problem))
    path = Path(param.data_folder) / entry.path
    try:
        facts = _facts_of(path, param, decode)
        colours = _colours_of(path, param) if is_still(path) else Colours.SRGB
        clip = _clip_of(entry, facts, param)._replace(images=images)
        return _Look(clip, check_file(path) + _image_bytes(clip, param), facts=facts, colours=colours)
    except UnusableFile as problem:
        return _Look(None, problem=f"{path} {problem}")


def _image_bytes(clip: Clip, param: ClipsParam) -> int:
    """Return the bytes of the images of a clip; raises UnusableFile unless they have the size of its frames."""
    total = 0
    for key, name in zip(param.extra_images.values(), clip.images):
        path = Path(param.data_folder) / name
        try:
            size = still_size(path, max(param.frame))
            if size == clip.size:  # (another size is refused without decoding)
                load_still(path, max(param.frame))
        except UnusableFile as problem:
            raise UnusableFile(f"begins or ends with {path}, its {key}, which {problem}") from None
        if size != clip.size:
            (h, w), (high, wide) = clip.size, size
            raise UnusableFile(f"has frames of {h} x {w}, and its {key}, {path}, {high} x {wide}")
        total += check_file(path)
    return total


def _facts_of(path: Path, param: ClipsParam, decode: bool) -> VideoFacts:
    if not is_still(path):
        return look_at_video(path, decode, param.display)
    height, width = load_still(path, max(param.frame)).shape[:2]
    return VideoFacts(1, None, (height, width), (height, width))


def _colours_of(path: Path, param: ClipsParam) -> Colours:
    with open_image(path, max(param.frame)) as image:
        return colours_of(image)


def _clip_of(entry: Entry, facts: VideoFacts, param: ClipsParam) -> Clip:
    """Compare a file with its annotation; raises UnusableFile."""
    if entry.size is not None and entry.size not in (facts.size, facts.stored_size):
        (h, w), (high, wide) = facts.size, entry.size
        raise UnusableFile(f"has frames of {h} x {w}, and the annotation says {high} x {wide}")
    if entry.fps is not None and facts.fps is not None and abs(entry.fps - facts.fps) >= SAME_RATE:
        raise UnusableFile(f"has {facts.fps:g} frames a second, and the annotation says {entry.fps:g}")
    if entry.num_frames is not None and entry.num_frames > facts.num_frames:
        raise UnusableFile(f"has {facts.num_frames} frames, and the annotation says {entry.num_frames}")
    fps = facts.fps or entry.fps
    if param.train_fps is not None and fps is None and facts.num_frames > 1:
        raise UnusableFile(f"does not state its frames a second, and train_fps = {param.train_fps:g} needs them")
    step = step_between(fps, param.train_fps)
    num_frames = entry.num_frames or facts.num_frames
    due = None
    if facts.times is not None and param.train_fps is not None and param.display == "shown":
        due = facts.times[: num_frames + 1] * param.train_fps
    clip = Clip(entry, step, num_frames, facts.size, due)
    _check_long_enough(clip, param)
    check_proportions(facts.size, param.frame)
    return clip


def _check_long_enough(clip: Clip, param: ClipsParam) -> None:
    """Raise UnusableFile if a clip is too short for every shape."""
    if fits(np.array([clip.longest, *clip.size]), np.array(param.sizes)).any():
        return
    lengths = sorted({frames for frames, _, _ in param.sizes})
    if param.buckets is None and clip.due is None:
        needed = 1 + int(frame_numbers(lengths[0], clip.step)[-1])
        raise UnusableFile(f"is short: it has {clip.num_frames} frames, and num_frames = {lengths[0]} needs {needed}")
    if param.buckets is None:
        raise UnusableFile(f"is short: it lasts for {clip.longest} frames, and num_frames = {lengths[0]}")
    if clip.longest == 1:
        raise UnusableFile("has one frame, and no bucket has one frame")
    least = min(frames for frames in lengths if frames > 1)
    raise UnusableFile(f"is short: it gives {clip.longest} frames, and the shortest video bucket has {least}")


def is_still(path: Path) -> bool:
    """Return whether a clip is an image, by its name. A GIF counts as a video, even with one frame."""
    suffix = path.suffix.lower()
    return suffix in readable_formats() and suffix != ".gif"


def _notes(lines: list[Line], clips: tuple[Clip, ...], decode: bool, param: ClipsParam) -> tuple[str, ...]:
    notes = []
    read = {*KEYS, param.label_key, *param.extra_images.values()}
    unused = Counter(key for line in lines if isinstance(line.content, dict) for key in line.content if key not in read)
    if unused:
        notes.append(f"note: keys of {param.json_path} that are not used: {', '.join(sorted(unused))}")
    if not decode:
        notes.append(f"note: of {len(lines):,} clips only the first frame was decoded, and the others were counted")
    slow = sum(clip.step < 1 for clip in clips)
    if slow:
        notes.append(f"warning: {slow:,} of {len(clips):,} videos are slower than train_fps: some frames are repeated")
    return tuple(notes)


def _note_of_rates(looks: list[_Look], param: ClipsParam, frame_rate: float | None) -> tuple[str, ...]:
    """Return a warning if every frame is used, at rates that differ from the model's or among the clips."""
    films = [look for look in looks if look.clip and look.facts and look.clip.num_frames > 1]
    rates = sorted(rate for look in films if (rate := look.facts.fps or look.clip.entry.fps))  # type: ignore[union-attr]
    if param.train_fps is not None or not rates or param.largest[0] == 1:
        return ()
    low, high, target = rates[0], rates[-1], frame_rate or rates[0]
    if max(high / target, target / low) <= SAME_SPEED:
        return ()
    span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    if frame_rate is None:
        return (
            f"warning: clips have {span} frames a second, and are learned as if all had the same rate: set "
            "dataset_param.train_fps",
        )
    return (
        f"warning: clips have {span} frames a second, and this model's videos {frame_rate:g}: without "
        f"dataset_param.train_fps, motion is learned at another speed; {frame_rate:g} keeps it",
    )


def _notes_on_display(looks: list[_Look], param: ClipsParam) -> tuple[str, ...]:
    """Return notes on how the files are to be displayed, and on what of it training ignores."""
    good = [(look.clip, look.facts) for look in looks if look.clip is not None and look.facts is not None]
    remarks = Counter(remark for _, facts in good for remark in facts.remarks)
    remarks.update(_chosen_by(clip, param) for clip, facts in good if facts.times is not None)
    doubts = Counter(doubt for _, facts in good for doubt in facts.doubts)
    notes = [f"warning: {count:,} of {len(good):,} clips {doubt}" for doubt, count in doubts.items()]
    if remarks:
        counts = ", ".join(f"{count:,} {remark}" for remark, count in sorted(remarks.items()))
        how = "a player shows them" if param.display == "shown" else "MindSpeed-MM reads them"
        notes.append(f"note: of {len(good):,} clips, learned as {how}: {counts}")
    names = [str(Path(param.data_folder) / clip.entry.path) for clip, _ in good]
    colours = [look.colours for look in looks if look.clip is not None]
    return (*notes, *notes_on_colours(names, colours, param.color_profiles))


def _chosen_by(clip: Clip, param: ClipsParam) -> str:
    how = "every frame" if param.train_fps is None else "by number" if clip.due is None else "by time"
    return f"of a varying rate ({how})"


def _note_of_unused(param: ClipsParam, shapes: np.ndarray | None) -> tuple[str, ...]:
    """Return a note on the frame counts in the buckets that no clip is assigned to, if any."""
    used = set() if shapes is None else set(shapes[:, 0].tolist())
    unused = sorted({frames for frames, _, _ in param.sizes} - used) if used else []
    words = ", ".join(map(str, unused))
    return (f"note: no clip is assigned to {words} frames, which dataset_param.buckets lists",) if unused else ()


def _digest_of(clips: tuple[Clip, ...], looks: list[_Look]) -> str:
    sizes = [look.bytes for look in looks if look.clip is not None]
    fields = ((*c.images, *c.entry.captions, *(() if c.entry.label is None else (str(c.entry.label),))) for c in clips)
    lines = ("\0".join((clip.entry.path, str(size), *texts)) for clip, size, texts in zip(clips, sizes, fields))
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass"))
    return f"{len(clips):,} clips, {digest.hexdigest()[:12]}"


CACHE_BYTES = 256 * 2**20
"""Clips whose pixels fit in this are decoded once and cached, if a clip always takes the same frames."""


class ClipReader:
    """Reads the pixels of clips (``Visuals``); safe to call from several threads.

    With ``clip_start`` "random" a view is where the clip begins, in [0, 1): from the first frame of the video to the
    last that leaves the clip long enough.
    """

    def __init__(self, rows: Rows, param: ClipsParam, channels: int = 3) -> None:
        self._rows, self._param, self._channels = rows, param, channels
        self.views = 1 if param.clip_start == "first" else None
        self._shapes = np.broadcast_to(param.sample_size, (len(rows), 3)) if rows.shapes is None else rows.shapes
        bytes_a_value = 1 if param.crop == "exact" else 4
        fits = 3 * self._shapes.prod(1).sum() * bytes_a_value <= CACHE_BYTES
        self._decoded: dict[int, np.ndarray] | None = {} if fits and self.views else None

    def views_at(self, seed: int, sample_indices: np.ndarray) -> np.ndarray:
        """Return where each clip begins, (B,) in [0, 1)."""
        if self.views:
            return np.zeros(len(sample_indices))
        return uniforms(seed, Stream.CLIP_START, sample_indices)

    def read(self, rows: np.ndarray, views: np.ndarray) -> Read:
        """Return pixels (B, 3 or 1, F, H, W) of ``rows`` (B,), all of one shape, uint8 (float32 with ``crop``
        "mindspeed_mm"), and the images that come with them, (B, 3 or 1, H, W).

        Raises:
            DataError: naming a file that cannot be read, and why.
        """
        pixels = np.stack([self._pixels(row, view) for row, view in zip(rows.tolist(), views.tolist())])
        images = {
            name: np.stack([self._image(row, position) for row in rows.tolist()])
            for position, name in enumerate(self._param.extra_images)
        }
        return Read({"pixels": pixels, **images}, rows)

    def _pixels(self, row: int, start: float) -> np.ndarray:
        if self._decoded is not None and row in self._decoded:
            return self._decoded[row]
        path, clip = Path(self._rows.paths[row]), self._rows.facts[row]
        frames = int(self._shapes[row][0])
        pixels = self._fitted(row, path, lambda: self._frames(path, clip, frames, start))
        if self._decoded is not None:
            self._decoded[row] = pixels
        return pixels

    def _image(self, row: int, position: int) -> np.ndarray:
        """Return an image that comes with a clip, (3 or 1, H, W)."""
        path = Path(self._param.data_folder) / self._rows.facts[row].images[position]
        return self._fitted(row, path, lambda: self._still(path))[:, 0]

    def _fitted(self, row: int, path: Path, frames: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the ``frames`` of a file of ``row`` at the size of its clip, (3 or 1, F, H, W)."""
        try:
            pixels = fit_frames(frames(), tuple(self._shapes[row][1:].tolist()), self._param.crop)
            return pixels if self._channels == 3 else grey(pixels)
        except UnusableFile as problem:
            raise DataError(
                str(path),
                f"{problem} (line {self._rows.facts[row].entry.line} of {self._param.json_path})",
                "repair the file or take its line out; a run can be resumed from its last checkpoint",
            ) from None

    def _still(self, path: Path) -> np.ndarray:
        return load_still(path, max(self._param.frame), self._param.color_profiles)[None]

    def _frames(self, path: Path, clip: Clip, num_frames: int, start: float) -> np.ndarray:
        """Return frames (F, h, w, 3) uint8 at the size of the file."""
        if is_still(path):
            return self._still(path)
        first = int(start * (clip.spare(num_frames) + 1))
        return read_frames(path, clip.numbers(num_frames, first), self._param.display)


def grey(pixels: np.ndarray) -> np.ndarray:
    """Return the luma (1, F, H, W) of RGB pixels (3, F, H, W), in their dtype (ITU-R BT.601, as Pillow's mode L)."""
    luma = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), pixels, 1)[None]
    return np.round(luma).astype(pixels.dtype) if pixels.dtype == np.uint8 else luma

"""Data sets of clips: the rows of an annotation, with captions or labels, each one checked."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mindspeed_mm_dit.configs.files import UnusableFile, check_file
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.data import builtin
from mindspeed_mm_dit.data.buckets import fits, shapes_of
from mindspeed_mm_dit.data.captions import first_problems
from mindspeed_mm_dit.data.check_images import colour_notes
from mindspeed_mm_dit.data.clip_reader import (
    SAME_RATE,
    Clip,
    ClipReader,
    check_proportions,
    frame_numbers,
    is_still,
    step_between,
)
from mindspeed_mm_dit.data.labels import check_labels, names_for_labels, normalize_names, parse_labels
from mindspeed_mm_dit.data.sources import CACHE_AGAIN, Rows, Source, SourceRequest, first_names, map_in_threads
from mindspeed_mm_dit.data.tables import (
    KEYS,
    AnnotationLine,
    ClipEntry,
    UnusableEntry,
    image_paths,
    parse_entry,
    read_annotation,
)
from mindspeed_mm_dit.data.transforms import Colours, colours_of, load_still, open_image, still_size
from mindspeed_mm_dit.data.video_file import VideoFacts, read_video_facts
from mindspeed_mm_dit.errors import DataError

DECODE_CHECK_LIMIT = 1000
"""Up to this many clips, every frame is decoded before a run; beyond, only the first, and the rest are counted."""
MAX_PROBLEMS = 100
SAME_SPEED = 1.2
"""Rates that differ by more than this factor get a warning."""


class _ClipCheck(NamedTuple):
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
    _provide(param)
    path = Path(param.json_path)
    lines = read_annotation(path)
    decode = len(lines) <= DECODE_CHECK_LIMIT
    look = lambda line: _look(line, param, decode, request.items)  # noqa: E731
    looks = list(map_in_threads(look, lines, "checking clips", "clip", per_task=1))
    captions = [look.clip.entry.captions if look.clip else () for look in looks]
    wrong = first_problems(captions, request.caption_problems)
    looks = [_ClipCheck(None, problem=problem) if problem else look for look, problem in zip(looks, wrong)]
    good = [look for look in looks if look.clip is not None]
    clips = tuple(look.clip for look in good if look.clip is not None)
    per_line = Counter(line.line for line in lines)
    problems = tuple(
        f"line {line.line}{f', clip {number},' if per_line[line.line] > 1 else ''} {look.problem}"
        for number, (line, look) in enumerate(zip(lines, looks), 1)
        if look.clip is None
    )
    if problems and not (param.skip_bad_clips and clips):
        listed = "".join(f"\n    {problem}" for problem in problems[:MAX_PROBLEMS])
        rest = len(problems) - MAX_PROBLEMS
        more = f"\n    ... and {rest:,} more" if rest > 0 else ""
        message = f"{len(problems)} of {len(lines)} clips of {path} cannot be used, as listed below. "
        if param.source:
            message += f"An earlier version wrote them. Remove {param.data_folder}, and they are written again."
        else:
            message += "Correct the lines or files, or set dataset_param.skip_bad_clips to true."
        raise DataError(f"{message}{listed}{more}")
    items, classes, notes = _items(param, clips, request)
    sizes = np.array([(clip.longest, *clip.size) for clip in clips], np.int64)
    shapes = None if param.buckets is None else shapes_of(sizes, param)
    folder = Path(param.data_folder)
    return Rows(
        tuple(str(folder / clip.entry.path) for clip in clips),
        items,
        classes,
        skipped=len(problems),
        problems=problems,
        notes=(
            *notes,
            *_notes(lines, clips, decode, param),
            *_note_of_rates(good, param, request.frame_rate),
            *_notes_on_display(good, param),
            *_note_of_unused(param, shapes),
        ),
        digest=_digest_of(good),
        facts=clips,
        shapes=shapes,
        sizes=sizes,
        files=tuple(str(folder / name) for clip in clips for name in (clip.entry.path, *clip.images)),
    )


def _as_listed(param: ClipsParam, rows: Rows) -> Rows:
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
            entry = parse_entry(line, captioned, label_key)
            word = normalize_names([str(entry.label).strip()])[0]
            label = known.get(word, int(word) if word.isdecimal() else None) if label_key else None
            names = image_paths(line, param.extra_images.values())
            clip = (str(Path(param.data_folder, entry.path)), entry.captions, label)
            listed[clip] += 1
            images += [str(Path(param.data_folder, name)) for name in names if clip in cached]
    changed = sorted({path for path, _, _ in cached - listed})
    if changed or listed.total() > len(rows) + rows.skipped:
        problem = f"was made of {len(rows) + rows.skipped:,} clips, but {param.json_path} lists {listed.total():,}"
        if changed:
            problem += f", and {len(changed):,} have no entry there or another caption or label"
            problem += f" ({first_names(changed)})"
        raise DataError(f"{param.cache_key} = {param.features} {problem}. {CACHE_AGAIN}")
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
    labels = parse_labels(words, param.json_path, location, known_classes=request.classes)
    check_labels(labels.numbers, request.num_classes, location, labels.classes)
    return items | {"label": labels.numbers}, names_for_labels(labels.classes, labels.numbers), labels.notes


def _provide(param: ClipsParam) -> None:
    """Write the built-in clips that ``param`` names, unless they exist."""
    if param.source is not None:
        builtin.write_builtin(builtin.CLIPS, param.source, Path(param.data_folder))


# --- one clip ---------------------------------------------------------------------------------------------------------


def _look(line: AnnotationLine, param: ClipsParam, decode: bool, items: tuple[str, ...]) -> _ClipCheck:
    captioned, label_key = "caption" in items or not items, param.label_key if "label" in items else None
    try:
        entry = parse_entry(line, captioned, label_key)
        images = image_paths(line, param.extra_images.values())
    except UnusableEntry as problem:
        return _ClipCheck(None, problem=str(problem))
    path, colours = Path(param.data_folder) / entry.path, Colours.SRGB
    try:
        if is_still(path):
            height, width = load_still(path, max(param.frame)).shape[:2]
            facts = VideoFacts(1, None, (height, width), (height, width))
            with open_image(path, max(param.frame)) as image:
                colours = colours_of(image)
        else:
            facts = read_video_facts(path, decode, param.display)
        clip = _clip_of(entry, facts, param)._replace(images=images)
        return _ClipCheck(clip, check_file(path) + _image_bytes(clip, param), facts=facts, colours=colours)
    except UnusableFile as problem:
        return _ClipCheck(None, problem=f"{path} {problem}")


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
            raise UnusableFile(f"has frames of {h} x {w}, but its {key}, {path}, has {high} x {wide}")
        total += check_file(path)
    return total


def _clip_of(entry: ClipEntry, facts: VideoFacts, param: ClipsParam) -> Clip:
    """Compare a file with its annotation; raises UnusableFile."""
    if entry.size is not None and entry.size not in (facts.size, facts.stored_size):
        (h, w), (high, wide) = facts.size, entry.size
        raise UnusableFile(f"has frames of {h} x {w}, but the annotation says {high} x {wide}")
    if entry.fps is not None and facts.fps is not None and abs(entry.fps - facts.fps) >= SAME_RATE:
        raise UnusableFile(f"has {facts.fps:g} frames a second, but the annotation says {entry.fps:g}")
    if entry.num_frames is not None and entry.num_frames > facts.num_frames:
        raise UnusableFile(f"has {facts.num_frames} frames, but the annotation says {entry.num_frames}")
    fps = facts.fps or entry.fps
    if param.train_fps is not None and fps is None and facts.num_frames > 1:
        raise UnusableFile(f"does not state its frames a second, but train_fps = {param.train_fps:g} needs them")
    num_frames, due = entry.num_frames or facts.num_frames, None
    if facts.times is not None and param.train_fps is not None and param.display == "shown":
        due = facts.times[: num_frames + 1] * param.train_fps
    clip = Clip(entry, step_between(fps, param.train_fps), num_frames, facts.size, due)
    _check_long_enough(clip, param)
    check_proportions(facts.size, param.frame)
    return clip


def _check_long_enough(clip: Clip, param: ClipsParam) -> None:
    """Raise UnusableFile if a clip is too short for every shape."""
    if fits(np.array([clip.longest, *clip.size]), np.array(param.sizes)).any():
        return
    lengths = sorted({frames for frames, _, _ in param.sizes})
    if param.buckets is None and clip.due_frames is None:
        needed = 1 + int(frame_numbers(lengths[0], clip.step)[-1])
        raise UnusableFile(f"is short: it has {clip.num_frames} frames, but num_frames = {lengths[0]} needs {needed}")
    if param.buckets is None:
        raise UnusableFile(f"is short: it lasts for {clip.longest} frames, but num_frames = {lengths[0]}")
    if clip.longest == 1:
        raise UnusableFile("has one frame, but no bucket has one frame")
    least = min(frames for frames in lengths if frames > 1)
    raise UnusableFile(f"is short: it gives {clip.longest} frames, but the shortest video bucket has {least}")


# --- notes ------------------------------------------------------------------------------------------------------------


def _notes(lines: list[AnnotationLine], clips: tuple[Clip, ...], decode: bool, param: ClipsParam) -> tuple[str, ...]:
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


def _note_of_rates(good: list[_ClipCheck], param: ClipsParam, frame_rate: float | None) -> tuple[str, ...]:
    """Return a warning if every frame is used, at rates that differ from the model's or among the clips."""
    films = [(look.clip, look.facts) for look in good if look.clip and look.facts and look.clip.num_frames > 1]
    rates = sorted(rate for clip, facts in films if (rate := facts.fps or clip.entry.fps))
    if param.train_fps is not None or not rates or param.largest[0] == 1:
        return ()
    low, high, target = rates[0], rates[-1], frame_rate or rates[0]
    if max(high / target, target / low) <= SAME_SPEED:
        return ()
    span = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    start = f"warning: clips have {span} frames a second, and"
    if frame_rate is None:
        return (f"{start} are learned as if all had the same rate: set dataset_param.train_fps",)
    return (
        f"{start} this model's videos {frame_rate:g}: without dataset_param.train_fps, motion is learned at another "
        f"speed; {frame_rate:g} keeps it",
    )


def _notes_on_display(good: list[_ClipCheck], param: ClipsParam) -> tuple[str, ...]:
    """Return notes on how the files are to be displayed, and on what of it training ignores."""
    pairs = [(look.clip, look.facts) for look in good if look.clip and look.facts]
    remarks = Counter(remark for _, facts in pairs for remark in facts.remarks)
    for clip, facts in pairs:
        if facts.times is not None:
            how = "every frame" if param.train_fps is None else "by number" if clip.due_frames is None else "by time"
            remarks[f"of a varying rate ({how})"] += 1
    doubts = Counter(doubt for _, facts in pairs for doubt in facts.doubts)
    notes = [f"warning: {count:,} of {len(pairs):,} clips {doubt}" for doubt, count in doubts.items()]
    if remarks:
        counts = ", ".join(f"{count:,} {remark}" for remark, count in sorted(remarks.items()))
        how = "a player shows them" if param.display == "shown" else "MindSpeed-MM reads them"
        notes.append(f"note: of {len(pairs):,} clips, learned as {how}: {counts}")
    names = [str(Path(param.data_folder) / clip.entry.path) for clip, _ in pairs]
    return (*notes, *colour_notes(names, [look.colours for look in good], param.color_profiles))


def _note_of_unused(param: ClipsParam, shapes: np.ndarray | None) -> tuple[str, ...]:
    """Return a note on the frame counts in the buckets that no clip is assigned to, if any."""
    used = set() if shapes is None else set(shapes[:, 0].tolist())
    unused = sorted({frames for frames, _, _ in param.sizes} - used) if used else []
    words = ", ".join(map(str, unused))
    return (f"note: no clip is assigned to {words} frames, which dataset_param.buckets lists",) if unused else ()


def _digest_of(good: list[_ClipCheck]) -> str:
    """Return the number of clips, and a digest of their paths, sizes in bytes, images, captions and labels."""
    lines = []
    for clip, size, *_ in good:
        assert clip is not None, "only good clips"
        label = () if clip.entry.label is None else (str(clip.entry.label),)
        lines.append("\0".join((clip.entry.path, str(size), *clip.images, *clip.entry.captions, *label)))
    digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass"))
    return f"{len(good):,} clips, {digest.hexdigest()[:12]}"


CLIPS = Source(ClipsParam, open_clips, ClipReader, _provide, _as_listed)

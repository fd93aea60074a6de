import json

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.configs.condition import TextStates
from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.data import clip_reader, clips
from mindspeed_mm_dit.data.captions import Tokens
from mindspeed_mm_dit.data.clip_reader import ClipReader, grey
from mindspeed_mm_dit.data.conditions import CaptionCollator, CollatorInputs
from mindspeed_mm_dit.data.loader import load_batches
from mindspeed_mm_dit.data.order import SampleOrder, micro_batches
from mindspeed_mm_dit.data.samples import SampleReader
from mindspeed_mm_dit.data.sources import SourceRequest, source_of
from mindspeed_mm_dit.data.transforms import load_still
from mindspeed_mm_dit.errors import ConfigError, DataError

pytest.importorskip("av", reason="requirements/video.txt")

from mindspeed_mm_dit.data.tables import AnnotationLine, UnusableEntry, parse_entry, read_annotation
from mindspeed_mm_dit.data.video_file import write_video
from tests.data_fixtures import open_rows

FRAMES = 12
LEVELS = 20 * np.arange(FRAMES)
"""Each frame of ``video`` is grey of one level, so that a pixel tells its frame."""


def video(folder, name, frames=FRAMES, size=(16, 24), fps=8):
    pixels = np.broadcast_to((20 * np.arange(frames)).astype(np.uint8)[:, None, None, None], (frames, *size, 3))
    write_video(folder / name, pixels, fps)
    return {"path": name, "cap": name, "num_frames": frames, "fps": fps, "resolution": list(size)}


def param(folder, entries, **changes):
    (folder / "annotation.json").write_text(json.dumps(entries, indent=None).replace("}, {", "},\n{"))
    settings = {"num_frames": 5, "max_height": 16, "max_width": 24, "caption_dropout_prob": 0.0}
    return ClipsParam(str(folder), str(folder / "annotation.json"), **settings | changes)


def frames_read(param, clip=0, start=0.0):
    """Return which frames of ``video`` a clip is made of."""
    pixels = pixels_of(param, np.array([clip]), np.array([start]))[0]
    return np.round(pixels.astype(float).mean((0, 2, 3)) / 20).astype(int).tolist()


def pixels_of(param, clips, starts):
    return ClipReader(open_rows(param), param).read(clips, starts).arrays["pixels"]


def samples(param, seed=0, draw=lambda seed, sample_indices, shape: {}):
    rows = open_rows(param)
    feed = CaptionCollator(TextStates(8, 4), CollatorInputs(rows, seed, 0, param.caption_dropout_prob, [tokens]))
    order, shape = SampleOrder(len(rows), seed), (16, 2, 2, 3)
    return SampleReader(ClipReader(rows, param), [feed], order, seed, draw, lambda read: shape)


def tokens(captions):
    """Return the letters of each caption as its ids."""
    longest = max(map(len, captions))
    ids = np.array([[ord(letter) for letter in caption.ljust(longest, "\0")] for caption in captions], np.int64)
    return Tokens(ids, np.sign(ids))


def captions_of(batch):
    """Return the captions that ``tokens`` made the ids of."""
    return ["".join(map(chr, ids)).rstrip("\0") for ids in batch["caption_ids"].tolist()]


def test_a_sample_is_the_first_frames_and_its_caption(tmp_path):
    entries = [video(tmp_path, "a.mp4"), video(tmp_path, "b.mp4")]
    made = samples(param(tmp_path, entries))
    batch = made.batch(np.arange(2))
    assert batch["pixels"].shape == (2, 3, 5, 16, 24) and batch["pixels"].dtype == np.uint8
    assert np.abs(batch["pixels"].astype(int) - LEVELS[:5, None, None]).max() <= 2  # what MPEG-4 and YUV lose
    assert sorted(captions_of(batch)) == ["a.mp4", "b.mp4"]


@pytest.mark.parametrize(("fps", "frames"), [(20, [0, 2, 5, 7, 10]), (4, [0, 0, 1, 1, 2])])
def test_train_fps_thins_fast_videos_and_repeats_slow_ones(tmp_path, fps, frames):
    assert frames_read(param(tmp_path, [video(tmp_path, "a.mp4", fps=fps)], train_fps=8)) == frames


@pytest.mark.parametrize(("rates", "model", "train_fps", "warns"), [
    ((24, 30), 16, None, "24 to 30 frames a second"), ((8,), 16, None, "8 frames"), ((15, 18), 16, None, ""),
    ((24, 30), 16, 16, ""), ((30, 60), None, None, "30 to 60"), ((30, 30), None, None, ""), ((24,), 24, None, ""),
])  # fmt: skip
def test_frame_rates_that_change_the_speed_get_a_warning(tmp_path, rates, model, train_fps, warns):
    entries = [video(tmp_path, f"{number}.mp4", fps=rate) for number, rate in enumerate(rates)]
    own = param(tmp_path, entries, train_fps=train_fps, num_frames=2)
    found = [note for note in source_of(own).open(own, SourceRequest(frame_rate=model)).notes if "train_fps" in note]
    assert [warns in note for note in found] == [True] * bool(warns)


def test_clip_begins_anywhere_from_which_it_is_long_enough(tmp_path):
    entry = video(tmp_path, "a.mp4")
    whole = param(tmp_path, [entry], clip_start="random")
    assert frames_read(whole, start=0.0) == [0, 1, 2, 3, 4]
    assert frames_read(whole, start=0.999) == [7, 8, 9, 10, 11]
    part = param(tmp_path, [entry | {"num_frames": 6}], clip_start="random")
    assert frames_read(part, start=0.999) == [1, 2, 3, 4, 5]


def test_still_and_gif_are_videos_and_another_moving_image_is_refused(tmp_path):
    Image.new("RGB", (24, 16), (7, 8, 9)).save(tmp_path / "a.png")
    asked = param(tmp_path, [{"path": "a.png", "cap": "a"}], num_frames=1)
    assert pixels_of(asked, np.zeros(1, int), np.zeros(1))[0, :, 0, 0, 0].tolist() == [7, 8, 9]
    with pytest.raises(DataError, match=r"line 1 .*a.png.*num_frames = 5"):
        open_rows(param(tmp_path, [{"path": "a.png", "cap": "a"}]))
    images = [Image.new("RGB", (24, 16), (level, level, level)) for level in LEVELS.tolist()]
    for name, frames, options in (
        ("a.gif", images, {}),
        ("still.gif", images[:1], {}),
        ("a.png", images, {}),
        ("a.webp", images, {"lossless": True}),
    ):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], duration=100, **options)
    assert frames_read(param(tmp_path, [{"path": "a.gif", "cap": "a", "fps": 10, "num_frames": 12}])) == [0, 1, 2, 3, 4]
    assert frames_read(param(tmp_path, [{"path": "still.gif", "cap": "a", "fps": 24}], num_frames=1)) == [0]
    for name in ("a.png", "a.webp"):
        with pytest.raises(DataError, match=f"line 1 .*{name} is an animated"):
            open_rows(param(tmp_path, [{"path": name, "cap": "a"}], num_frames=1))


def test_unusable_clips_are_refused_with_their_lines_or_left_out(tmp_path):
    good = video(tmp_path, "good.mp4") | {"cap": "good"}
    whole = (tmp_path / "good.mp4").read_bytes()
    (tmp_path / "damaged.mp4").write_bytes(whole[: len(whole) // 3])
    (tmp_path / "empty.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no video")
    faults = [
        (video(tmp_path, "short.mp4", frames=4), "num_frames = 5"),
        ({"path": "damaged.mp4", "cap": "a"}, "damaged.mp4 holds no video"),
        (good | {"resolution": {"height": 480, "width": 832}}, "480 x 832"),
        ({"path": "good.mp4"}, "has no caption"),
        ({"path": "gone.mp4", "cap": "a"}, "gone.mp4 does not exist"),
        ({"path": "empty.mp4", "cap": "a"}, "empty.mp4 is empty"),
        (good | {"num_frames": 81}, "has 12 frames, but the annotation says 81"),
        (good | {"fps": 30}, "has 8 frames a second, but the annotation says 30"),
        ({"path": "text.mp4", "cap": "a"}, "text.mp4 cannot be decoded"),
        (good | {"cap": ["good", "bad"]}, "cannot be read by the text encoder"),
    ]
    checks = [lambda captions: ["cannot be read by the text encoder" * (caption == "bad") for caption in captions]]
    entries = [entry for fault, _ in faults for entry in (good, fault)]
    with pytest.raises(DataError) as raised:
        open_rows(param(tmp_path, entries), caption_problems=checks)
    lines = [line.strip() for line in str(raised.value).splitlines() if line.strip().startswith("line ")]
    for number, (line, (_, fault)) in enumerate(zip(lines, faults, strict=True), 1):
        assert line.startswith(f"line {2 * number} ") and fault in line
    index = open_rows(param(tmp_path, entries, skip_bad_clips=True), caption_problems=checks)
    assert (len(index), index.skipped, len(index.problems)) == (10, 10, 10) and index.digest.startswith("10 clips, ")


def test_images_beside_clips_come_with_them_at_their_size(tmp_path):
    entries = [video(tmp_path, name) | {"end": f"{name}.png"} for name in ("a.mp4", "b.mp4")]
    for number, entry in enumerate(entries):
        Image.new("RGB", (24, 16), (90 + number,) * 3).save(tmp_path / entry["end"])
    half = param(tmp_path, entries, last_frame_key="end", max_height=8, max_width=12)
    read = ClipReader(open_rows(half), half).read(np.array([1, 0]), np.zeros(2)).arrays
    assert read["last_image"].shape == (2, 3, 8, 12) and read["pixels"].shape == (2, 3, 5, 8, 12)
    assert read["last_image"].mean((1, 2, 3)).tolist() == [91, 90] and "first_image" not in read
    before = open_rows(half).digest
    Image.new("RGB", (24, 16), (1, 2, 3)).save(tmp_path / entries[0]["end"], compress_level=0)
    rows = open_rows(half)
    assert rows.digest != before and set(rows.files) == {*rows.paths, f"{tmp_path}/a.mp4.png", f"{tmp_path}/b.mp4.png"}
    other = param(tmp_path, [entries[0] | {"end": "c.png"}, entries[1]], last_frame_key="end")
    assert source_of(other).as_listed(other, rows).files == (f"{tmp_path}/c.png", f"{tmp_path}/b.mp4.png")


def test_clip_without_its_image_is_refused_with_its_line(tmp_path, monkeypatch):
    good = video(tmp_path, "a.mp4") | {"start": "good.png"}
    Image.new("RGB", (24, 16)).save(tmp_path / "good.png")
    Image.new("RGB", (24, 24)).save(tmp_path / "tall.png")
    faults = {
        None: "line 1 .*start",
        "gone.png": f"line 2 {tmp_path}/a.mp4 .*{tmp_path}/gone.png",
        "tall.png": f"line 3 {tmp_path}/a.mp4 .*16 x 24.*{tmp_path}/tall.png, .*24 x 24",
        "../up.png": r"line 4 .*\.\./up.png",
    }
    wrong = [good | {"start": path} for path in faults]
    decoded = []
    monkeypatch.setattr(clips, "load_still", lambda path, *size: decoded.append(path.name) or load_still(path, *size))
    with pytest.raises(DataError) as raised:
        open_rows(param(tmp_path, [*wrong, good], first_frame_key="start"))
    for fault in (*faults.values(), "4 of 5 clips"):
        raised.match(fault)
    assert decoded == ["good.png"]


def test_of_many_clips_the_frames_are_counted_and_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("mindspeed_mm_dit.data.clips.DECODE_CHECK_LIMIT", 1)
    entries = [video(tmp_path, "a.mp4"), video(tmp_path, "b.mp4", frames=4)]
    pytest.raises(DataError, open_rows, param(tmp_path, entries)).match(r"line 2 .*b.mp4.* 4 frames")
    index = open_rows(param(tmp_path, entries[:1] * 2))
    assert index.facts[0].num_later_starts(5) == 7 and "only the first frame was decoded" in index.notes[0]


def test_draws_follow_the_position_and_not_the_batch(tmp_path):
    entries = [video(tmp_path, f"{n}.mp4") | {"cap": [f"{n}a", f"{n}b"]} for n in range(3)]
    made = samples(param(tmp_path, entries, clip_start="random", caption_dropout_prob=0.3), seed=7)
    whole = made.batch(np.arange(30))
    for ranks, micro in ((1, 10), (2, 5), (3, 2)):
        streams = [load_batches(made, micro_batches(0, micro, rank, ranks), 2, 3) for rank in range(ranks)]
        rounds = [next(stream) for _ in range(30 // (micro * ranks)) for stream in streams]
        for name in whole:
            assert np.array_equal(np.concatenate([part[name] for part in rounds]), whole[name])
    kinds = {caption[-1:] for caption in captions_of(whole)}
    assert kinds == {"", "a", "b"}


@pytest.mark.parametrize("changes", [
    {"num_frames": 0}, {"max_width": 0}, {"train_fps": 0.0}, {"caption_dropout_prob": 1.5},
    {"first_frame_key": "image", "clip_start": "random"},
])  # fmt: skip
def test_settings_out_of_range_are_refused(tmp_path, changes):
    pytest.raises(ConfigError, param, tmp_path, [], **changes).match(f"dataset_param.{next(iter(changes))}")


def test_grey_clips_are_the_luma_of_their_colours():
    colours = np.random.default_rng(0).integers(0, 256, (3, 2, 4, 5), np.uint8)
    frames = [np.asarray(Image.fromarray(frame).convert("L")) for frame in colours.transpose(1, 2, 3, 0)]
    assert np.abs(grey(colours).astype(int) - np.array(frames)[None]).max() <= 1 and grey(colours).dtype == np.uint8


def test_classes_of_clips_are_those_of_the_annotation(tmp_path):
    entries = [video(tmp_path, f"{n}.mp4") | {"kind": kind} for n, kind in enumerate(("dog", "cat", "dog"))]
    for entry in entries[1:]:
        del entry["cap"]  # which nobody asks for
    found = source_of(labelled := param(tmp_path, entries, label_key="kind")).open(labelled, SourceRequest(("label",)))
    assert (found.labels.tolist(), found.classes) == ([1, 0, 1], ("cat", "dog"))
    assert not any("not used" in note for note in found.notes)
    renamed = param(tmp_path, [entry | {"kind": "cow"} for entry in entries], label_key="kind")
    assert source_of(renamed).open(renamed, SourceRequest(("label",))).digest != found.digest
    pytest.raises(DataError, open_rows, labelled).match(r"2 of 3 clips(?s:.*)line 2 ")
    with pytest.raises(DataError, match=r"3 of 3 clips(?s:.*)line 1 .*other = None"):
        other = param(tmp_path, entries, label_key="other")
        source_of(other).open(other, SourceRequest(("label",)))


PUBLISHED = (480, 832)


@pytest.mark.parametrize(("rate", "wanted", "start", "numbers"), [
    (50, None, 0, [0, 1, 2, 3, 4]),
    (23.976, 24, 0, [0, 1, 2, 3, 4]),
    (60, 24, 3, [3, 5, 8, 10, 13]),  # 3 + 2.5 i, rounded down
    (12, 24, 0, [0, 0, 1, 1, 2]),
])  # fmt: skip
def test_faster_video_is_thinned_and_slower_one_repeats_frames(rate, wanted, start, numbers):
    step = clip_reader.step_between(rate, wanted)
    assert clip_reader.frame_numbers(5, step, start=start).tolist() == numbers


def test_covering_frames_reach_the_target_in_one_side_and_fit_into_memory():
    for size in ((720, 1280), (1920, 1080), (480, 640), (480, 832), (240, 416), (1, 9)):
        high, wide = clip_reader.covering_size(size, PUBLISHED)
        assert high >= 480 and wide >= 832 and (high == 480 or wide == 832), size
    resized = clip_reader.covering_size_of_mindspeed_mm((480, 640), PUBLISHED)  # which loses a row of taller videos
    assert resized == (624, 832) and clip_reader.crop_of_mindspeed_mm(resized, PUBLISHED) == (479, 832)
    pytest.raises(UnusableFile, clip_reader.check_proportions, (1, 9000), PUBLISHED).match("1 x 9000")
    clip_reader.check_proportions((1080, 1920), PUBLISHED)


def gradient(height, width):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 4, columns * 3, rows + columns], -1)[None].repeat(2, 0).astype(np.uint8)


def test_frames_of_the_size_pass_unchanged_and_others_are_cut_or_stretched():
    frames = gradient(30, 22)
    for crop in ("exact", "mindspeed_mm"):
        assert np.array_equal(clip_reader.fit_frames(frames, (30, 22), crop).transpose(1, 2, 3, 0), frames)
    frames = gradient(34, 22)
    exact, stretched = (clip_reader.fit_frames(frames, (30, 22), crop) for crop in ("exact", "mindspeed_mm"))
    assert exact.dtype == np.uint8 and exact.shape == (3, 2, 30, 22)
    assert np.array_equal(exact.transpose(1, 2, 3, 0), frames[:, 2:32])
    rows = stretched[0, 0, :, 0] / 4
    assert stretched.dtype == np.float32 and clip_reader.crop_of_mindspeed_mm((34, 22), (30, 22)) == (29, 22)
    # Rows 2 ... 30 over 30 rows: half a pixel of 29/30 at each end, and equal steps between.
    assert np.diff(rows)[1:-1] == pytest.approx(29 / 30, abs=1e-5)
    assert (rows[0], rows[-1]) == (2, 30)


def entries_of(path):
    return [parse_entry(line) for line in read_annotation(path)]


def test_annotation_is_read_with_its_lines(tmp_path):
    path = tmp_path / "annotation.json"
    path.write_text(
        '[\n{"path": "./v/1.mp4", "cap": "A view.", "num_frames": 81, "fps": 24,\n"resolution": [480, 832]},\n'
        '{"path": "./v/2.mp4", "cap": "A street.", "resolution": {"height": 480, "width": 832}}\n]'
    )
    first, second = entries_of(path)
    assert first == (2, "v/1.mp4", ("A view.",), 81, 24, (480, 832), None)
    assert (second.line, second.path, second.size) == (4, "v/2.mp4", (480, 832))
    path.write_text('\n[\n{"path": "a"},\n{"path": "b"}, {"path": "c"},\n\n{"path": "d"}]')
    assert [line.line for line in read_annotation(path)] == [3, 4, 4, 6]
    path = tmp_path / "clips.jsonl"  # an object a line
    path.write_text('{"path": "a.mp4", "cap": ["one", "two"]}\n\n{"path": "b.png", "cap": "three"}\n')
    assert entries_of(path) == [(1, "a.mp4", ("one", "two"), *[None] * 4), (3, "b.png", ("three",), *[None] * 4)]


@pytest.mark.parametrize(("text", "words"), [
    ('[{"path": "a"}, ...]', "line 1"),
    ('[\n{"path": "a"}\n{"path": "b"}]', "line 3"),
    ('[\n{"path": "a",\n"resolution": {480, 832}}]', "line 3.*{480, 832}"),  # as a tutorial has it
    ('{"path": "a"}', "line 1"),
    ('[{"path": "a"}', "line 1"),
    ('[\n{"path": "a"}]\n[{"path": "b"}]', "line 3"),
    ('[{"path": "a"},\n]', "line 2"),
    ('[\n{"path": "a", "cap": "b", "cap": "c"}]', "'cap'"),
    ("[" * 100_000, "line 1"),
    ('{"path": "a", "cap": "b"}\n{"path": "c", "cap": "d"}\n', ".jsonl"),
    ('{"path": "a", "cap": "b"}\n{"path": "a", "ca', "line 2"),
    ("[]", "no clips"),
])  # fmt: skip
def test_unreadable_list_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / ("a.jsonl" if text.endswith('"ca') else "a.json")
    path.write_text(text)
    pytest.raises(DataError, read_annotation, path).match(words)


@pytest.mark.parametrize(("key", "values", "words"), [
    ("path", [None], "path"),
    ("path", ["../a.mp4", "/a.mp4"], "dataset_param.data_folder"),
    ("cap", [None, [], " ", ["a", 1]], "caption"),
    ("num_frames", [0, True], "num_frames = "),
    ("fps", ["24", float("nan")], "fps = "),
    ("resolution", [{"height": 480}, [480], [480, 0], "480x832"], "resolution"),
    ("cut", [[0, 81]], "cut"),
    ("crop", [[0, 10, 0, 10]], "crop"),
    ("kind", [None, -1, " ", 1.5, True, 10**30], "kind = "),
])  # fmt: skip
def test_unusable_entry_is_refused(key, values, words):
    content = {"path": "a.mp4", "cap": "a", "num_frames": 9, "fps": 24, "resolution": [4, 4], "kind": "dog"}
    entry = parse_entry(AnnotationLine(1, content), label_key="kind")
    assert (entry.size, entry.label) == ((4, 4), "dog")
    assert parse_entry(AnnotationLine(1, content), captioned=False, label_key="kind").captions == ()
    for value in values:
        with pytest.raises(UnusableEntry, match=words):
            parse_entry(AnnotationLine(1, content | {key: value}), label_key="kind")

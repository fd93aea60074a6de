"""What a video says about its display is what is learned: colours, the shape of pixels, which way is up, when."""

import json
import struct
import wave
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")

import av
from av.stream import Disposition

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.configs.images import ClipsParam
from mindspeed_mm_dit.data.clip_reader import ClipReader
from mindspeed_mm_dit.data.clips import open_clips
from mindspeed_mm_dit.data.sources import SourceRequest
from mindspeed_mm_dit.data.video_file import read_frames, read_video_facts, write_video
from mindspeed_mm_dit.errors import DataError
from tests.video_fixtures import drawn, film, flat, grey

BT_601 = (0.299, 0.114)
LUMA = {1: (0.2126, 0.0722), 4: (0.3, 0.11), 5: BT_601, 6: BT_601, 7: (0.212, 0.087), 9: (0.2627, 0.0593)}
"""Shares of red and blue in the luma of each matrix, by its code in ITU-T H.273."""
COLOURS = [(200, 30, 30), (30, 180, 40), (40, 60, 210), (220, 180, 150), (0, 0, 0), (255, 255, 255)]


def test_frames_are_read_by_number_and_repeated(tmp_path):
    levels = (40 * np.arange(6)).astype(np.uint8)[:, None, None, None]
    write_video(tmp_path / "a.mp4", np.broadcast_to(levels, (6, 16, 24, 3)), 8)
    frames = read_frames(tmp_path / "a.mp4", np.array([1, 1, 4, 5]))
    assert frames.shape == (4, 16, 24, 3) and frames.dtype == np.uint8
    assert np.round(frames.mean((1, 2, 3)) / 40).tolist() == [1, 1, 4, 5]
    pytest.raises(UnusableFile, read_frames, tmp_path / "a.mp4", np.array([0, 6])).match("frame 7")
    assert all(read_video_facts(tmp_path / "a.mp4", decode)[:3] == (6, 8.0, (16, 24)) for decode in (False, True))


def in_yuv(rgb, matrix, full, bits=8):
    """Y, Cb and Cr of a colour, by the equations of BT.601, BT.709 and BT.2020."""
    red, blue = LUMA[matrix]
    r, g, b = (level / 255 for level in rgb)
    y = red * r + (1 - red - blue) * g + blue * b
    u, v = (b - y) / (2 * (1 - blue)), (r - y) / (2 * (1 - red))
    if full:
        return [round((2**bits - 1) * part) + zero for part, zero in ((y, 0), (u, 1 << bits - 1), (v, 1 << bits - 1))]
    limited = ((219, y, 16), (224, u, 128), (224, v, 128))
    return [round((scale * part + zero) * 2 ** (bits - 8)) for scale, part, zero in limited]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(("matrix", "form"), [*((m, "yuv420p") for m in LUMA), (1, "yuv444p"), (9, "yuv420p10le")])
def test_colours_are_those_that_the_video_was_made_of(tmp_path, full, matrix, form):
    frames = [flat(in_yuv(rgb, matrix, full, 10 if "10" in form else 8), form=form) for rgb in COLOURS]
    film(tmp_path / "a.mp4", frames, colorspace=matrix, color_range=1 + full)
    found = read_frames(tmp_path / "a.mp4", np.arange(len(COLOURS)))[:, 8, 8].astype(int)
    assert np.abs(found - COLOURS).max() <= 3, found  # libswscale's tables for 8 bits, and 8 bits of YUV themselves


@pytest.mark.parametrize(("size", "matrix", "of_host"), [
    ((16, 16), 5, 5), ((576, 16), 5, 5), ((578, 16), 1, 5), ((16, 1278), 5, 5), ((16, 1280), 1, 5),
])  # fmt: skip
def test_a_video_that_names_no_matrix_is_taken_by_its_size(tmp_path, size, matrix, of_host):
    film(tmp_path / "a.mp4", [flat(in_yuv(COLOURS[1], 1, False), size)] * 2)
    for display, used in (("shown", matrix), ("mindspeed_mm", of_host)):
        film(tmp_path / f"{used}.mp4", [flat(in_yuv(COLOURS[1], 1, False), size)] * 2, colorspace=used)
        found, right = (read_frames(tmp_path / name, np.arange(1), display) for name in ("a.mp4", f"{used}.mp4"))
        assert np.array_equal(found, right)


@pytest.mark.parametrize(("form", "size"), [("yuv420p", (576, 720)), ("yuv422p", (34, 50)), ("yuv444p", (16, 16))])
def test_ordinary_video_has_the_pixels_of_the_plain_decoder(tmp_path, form, size):
    frame, noise = av.VideoFrame(size[1], size[0], form), np.random.default_rng(0)
    for plane in frame.planes:
        plane.update(noise.integers(16, 236, plane.buffer_size, np.uint8).tobytes())
    film(tmp_path / "a.mp4", [frame])
    with av.open(str(tmp_path / "a.mp4")) as container:
        plain = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert np.array_equal(read_frames(tmp_path / "a.mp4", np.arange(1))[0], plain)
    assert read_video_facts(tmp_path / "a.mp4", decode=True)[-3:] == (None, (), ())  # and nothing is said of it


def test_unknown_matrix_unknown_codec_and_sound_alone_are_refused(tmp_path):
    film(tmp_path / "a.mp4", [flat((90, 100, 110))], colorspace=8)
    pytest.raises(UnusableFile, read_video_facts, tmp_path / "a.mp4", decode=False).match("matrix 8")
    path = film(tmp_path / "b.mp4", grey(40, 80))
    path.write_bytes(path.read_bytes().replace(b"avc1", b"zzz1"))
    pytest.raises(UnusableFile, read_video_facts, path, decode=True).match("codec")
    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(1600))
    pytest.raises(UnusableFile, read_video_facts, tmp_path / "a.wav", decode=True).match("no video")


def disc(size, sar):
    """A disc as a camera with pixels of ``sar`` stores it."""
    rows, columns = np.mgrid[: size[0], : size[1]]
    x, y = (columns + 0.5 - size[1] / 2) * float(sar), rows + 0.5 - size[0] / 2
    inside = x**2 + y**2 < (0.4 * min(size[0], size[1] * float(sar))) ** 2
    return np.where(inside[..., None], 230, 20).astype(np.uint8).repeat(3, 2)


@pytest.mark.parametrize(("sar", "size"), [
    (Fraction(16, 11), (64, 93)), (Fraction(10, 11), (70, 64)), (Fraction(4, 3), (64, 85)), (Fraction(1, 2), (128, 64)),
    (Fraction(1, 1), (64, 64)), (None, (64, 64)),
])  # fmt: skip
def test_a_disc_is_round_whatever_the_shape_of_pixels(tmp_path, sar, size):
    film(tmp_path / "a.mp4", [drawn(disc((64, 64), sar or 1))] * 2, sample_aspect_ratio=sar or Fraction(0))
    frames, facts = read_frames(tmp_path / "a.mp4", np.arange(2)), read_video_facts(tmp_path / "a.mp4", decode=True)
    assert frames.shape[1:3] == facts.size == size and facts.stored_size == (64, 64)
    inside = frames[1, :, :, 0] > 125
    high, wide = inside.any(1).sum(), inside.any(0).sum()
    assert abs(int(high) - int(wide)) <= 2
    assert read_frames(tmp_path / "a.mp4", np.arange(1), "mindspeed_mm").shape[1:3] == (64, 64)


PICTURE = np.array([[20, 90], [160, 230]], np.uint8).repeat(16, 0).repeat(32, 1)[..., None].repeat(3, 2)
TURNS = {
    (1, 0, 0, 1): lambda p: p,
    (-1, 0, 0, 1): lambda p: p[:, ::-1],
    (1, 0, 0, -1): lambda p: p[::-1],
    (-1, 0, 0, -1): lambda p: p[::-1, ::-1],
    (0, 1, -1, 0): lambda p: np.rot90(p, -1),  # as a telephone held upright writes
    (0, -1, 1, 0): lambda p: np.rot90(p),
    (0, 1, 1, 0): lambda p: p.swapaxes(0, 1),
    (0, -1, -1, 0): lambda p: p[::-1, ::-1].swapaxes(0, 1),
}
"""Display matrices (a, b, c, d) and what each does: x' = a x + c y, y' = b x + d y."""


def turn(path, a, b, c, d):
    """Write a display matrix into the track header of an .mp4."""
    content = bytearray(path.read_bytes())
    at = content.find(b"tkhd") + 4 + 40
    content[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(content)


@pytest.mark.parametrize("sar", [None, Fraction(2, 1)])
def test_video_is_turned_and_mirrored_as_it_says(tmp_path, sar):
    for matrix, turned in TURNS.items():
        turn(film(tmp_path / "a.mp4", [drawn(PICTURE)] * 2, sample_aspect_ratio=sar or Fraction(0)), *matrix)
        found = read_frames(tmp_path / "a.mp4", np.arange(2))[1].astype(int)
        right = turned(PICTURE.repeat(2 if sar else 1, 1)).astype(int)
        assert found.shape[:2] == right.shape[:2] == read_video_facts(tmp_path / "a.mp4", decode=False).size
        quarters = np.s_[4 :: max(right.shape[0] // 2, 1), 4 :: max(right.shape[1] // 2, 1)]
        assert np.abs(found[quarters] - right[quarters]).max() <= 3, matrix


@pytest.mark.parametrize("cover_first", [True, False])
def test_a_cover_is_no_film(tmp_path, cover_first):
    path = film(tmp_path / "a.mp4", grey(40, 80, 120), cover=np.full((32, 48, 3), 250, np.uint8))
    if cover_first:  # (the box with the cover, udta, before that of the film, trak)
        content = path.read_bytes()
        start = content.index(b"trak") - 4
        end = start + int.from_bytes(content[start : start + 4], "big")
        path.write_bytes(content[:start] + content[end:] + content[start:end])
    assert read_video_facts(path, decode=True)[:3] == (3, 8.0, (16, 16))
    assert np.round(read_frames(path, np.arange(3)).mean((1, 2, 3)) / 40).tolist() == [1, 2, 3]


def test_still_track_before_a_film_is_not_the_film(tmp_path):
    # As a muxer writes one that nothing marks as a cover; a file without a film keeps its still.
    for name, count in (("a.mkv", 3), ("b.mkv", 1)):
        cover = np.full((32, 48, 3), 250, np.uint8)
        path = film(tmp_path / name, grey(40, 80, 120)[:count], cover=cover, disposition=Disposition.default)
        assert read_video_facts(path, decode=count > 1).size == ((16, 16) if count > 1 else (32, 48))
    assert np.round(read_frames(tmp_path / "a.mkv", np.arange(3)).mean((1, 2, 3)) / 40).tolist() == [1, 2, 3]


def test_transparent_parts_of_a_video_are_white(tmp_path):
    pixels = np.full((16, 16, 4), (200, 40, 40, 255), np.uint8)
    pixels[8:, :8], pixels[8:, 8:] = (10, 20, 30, 0), (0, 0, 0, 128)
    with av.open(str(tmp_path / "a.mov"), "w") as container:
        stream = container.add_stream("png", rate=8)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "rgba"
        container.mux([*stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgba")), *stream.encode()])
    shown = read_frames(tmp_path / "a.mov", np.arange(1))[0]
    assert shown[[0, 15, 15], [0, 0, 15]].tolist() == [[200, 40, 40], [255] * 3, [127] * 3]
    assert any("white" in remark for remark in read_video_facts(tmp_path / "a.mov", decode=False).remarks)


def clips(folder, entries=({"path": "a.mp4", "cap": "a"},), **changes):
    """The section and the rows of an annotation."""
    (folder / "annotation.json").write_text(json.dumps(entries))
    settings = {"num_frames": 2, "max_height": 16, "max_width": 16, **changes}
    param = ClipsParam(str(folder), str(folder / "annotation.json"), **settings)
    return param, open_clips(param, SourceRequest(("caption",)))


UNEVEN = [0, 42, 83, 125, 167, 333, 500, 667, 833, 1000]
"""Milliseconds: 24 frames a second, then 6, rounded as containers do."""


@pytest.mark.parametrize(("ending", "decode"), [("mp4", True), ("mkv", True), ("mkv", False)])
def test_frames_of_a_varying_rate_are_chosen_by_time(tmp_path, monkeypatch, ending, decode):
    monkeypatch.setattr("mindspeed_mm_dit.data.clips.DECODE_CHECK_LIMIT", 10 if decode else 0)
    film(tmp_path / f"a.{ending}", grey(*range(0, 250, 25)), UNEVEN)
    entries = [{"path": f"a.{ending}", "cap": "a"}]
    for changes, wanted, said in (
        ({"train_fps": 6}, [0, 4, 5, 6, 7, 8, 9], "by time"),
        ({"train_fps": 12, "num_frames": 4}, [0, 2, 4, 4], "by time"),
        ({"train_fps": 12, "clip_start": "random"}, [8, 8, 9], "by time"),
        ({}, list(range(10)), "every frame"),
        ({"train_fps": 6, "display": "mindspeed_mm"}, [0, 1], "by number"),
    ):
        param, rows = clips(tmp_path, entries, **{"num_frames": len(wanted), **changes})
        start = 0.999 if "clip_start" in changes else 0.0
        pixels = ClipReader(rows, param).read(np.zeros(1, int), np.array([start])).arrays["pixels"]
        assert np.round(pixels[0, 0].mean((1, 2)) / 25).astype(int).tolist() == wanted
        assert f"1 of a varying rate ({said})" in rows.notes[-1]
    pytest.raises(DataError, clips, tmp_path, entries, num_frames=8, train_fps=6).match("7 frames.*num_frames = 8")


def test_rate_that_only_trembles_does_not_vary(tmp_path):
    for times in (None, [0, 42, 83, 125, 167, 208], [0, 40, 85, 120, 165, 210]):
        film(tmp_path / "a.mkv", grey(0, 40, 80, 120, 160, 200), times)
        assert read_video_facts(tmp_path / "a.mkv", decode=True).times is None


def test_notes_say_what_was_done_and_what_is_doubtful(tmp_path):
    film(tmp_path / "a.mp4", grey(0, 40), colorspace=1, color_range=2, sample_aspect_ratio=Fraction(2))
    turn(film(tmp_path / "b.mp4", grey(0, 40), colorspace=9, color_primaries=9, color_trc=16), 0, 1, -1, 0)
    film(tmp_path / "c.mp4", grey(0, 40), color_primaries=12, options={"qp": "0", "x264-params": "tff=1"})
    film(tmp_path / "d.mp4", grey(0, 40))
    entries = [{"path": f"{name}.mp4", "cap": name} for name in "abcd"]
    notes = "\n".join(clips(tmp_path, [entries[0] | {"resolution": [16, 16]}, *entries[1:]])[1].notes)
    counted = ("1 in BT.2020", "1 in BT.709", "1 in full range", "1 rotated or mirrored", "1 with pixels", "1 of 4")
    assert all(words in notes for words in counted) and notes.count("1 of 4") == 3  # interlaced, HDR, primaries
    plain, rows = clips(tmp_path, entries[3:])
    assert rows.notes == () and "display" not in plain.pixel_cache_key()  # so that older caches go on
    of_host, rows = clips(tmp_path, entries, display="mindspeed_mm")
    assert "MindSpeed-MM" in rows.notes[-1] and "display mindspeed_mm" in of_host.pixel_cache_key()

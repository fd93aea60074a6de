import numpy as np
import pytest

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.clip_reader import (
    check_proportions,
    covering_size,
    covering_size_of_mindspeed_mm,
    crop_of_mindspeed_mm,
    fit_frames,
    frame_numbers,
    step_between,
)

PUBLISHED = (480, 832)


@pytest.mark.parametrize(("rate", "wanted", "start", "numbers"), [
    (50, None, 0, [0, 1, 2, 3, 4]),
    (23.976, 24, 0, [0, 1, 2, 3, 4]),
    (60, 24, 3, [3, 5, 8, 10, 13]),  # 3 + 2.5 i, rounded down
    (12, 24, 0, [0, 0, 1, 1, 2]),
])  # fmt: skip
def test_faster_video_is_thinned_and_slower_one_repeats_frames(rate, wanted, start, numbers):
    assert frame_numbers(5, step_between(rate, wanted), start=start).tolist() == numbers


def test_covering_frames_reach_the_target_in_one_side():
    for size in ((720, 1280), (1920, 1080), (480, 640), (480, 832), (240, 416), (1, 9)):
        high, wide = covering_size(size, PUBLISHED)
        assert high >= 480 and wide >= 832 and (high == 480 or wide == 832), size


def test_mindspeed_mm_loses_a_row_of_every_video_of_taller_shape():
    resized = covering_size_of_mindspeed_mm((480, 640), PUBLISHED)
    assert resized == (624, 832) and crop_of_mindspeed_mm(resized, PUBLISHED) == (479, 832)


def gradient(height, width):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 4, columns * 3, rows + columns], -1)[None].repeat(2, 0).astype(np.uint8)


def test_video_of_the_size_passes_unchanged():
    frames = gradient(30, 22)
    for crop in ("exact", "mindspeed_mm"):
        assert np.array_equal(fit_frames(frames, (30, 22), crop).transpose(1, 2, 3, 0), frames)


def test_exact_cut_is_the_centre_and_the_other_one_stretches():
    frames = gradient(34, 22)
    exact, stretched = (fit_frames(frames, (30, 22), crop) for crop in ("exact", "mindspeed_mm"))
    assert exact.dtype == np.uint8 and exact.shape == (3, 2, 30, 22)
    assert np.array_equal(exact.transpose(1, 2, 3, 0), frames[:, 2:32])
    rows = stretched[0, 0, :, 0] / 4
    assert stretched.dtype == np.float32 and crop_of_mindspeed_mm((34, 22), (30, 22)) == (29, 22)
    # Rows 2 ... 30 over 30 rows: half a pixel of 29/30 at each end, and equal steps between.
    assert np.diff(rows)[1:-1] == pytest.approx(29 / 30, abs=1e-5)
    assert (rows[0], rows[-1]) == (2, 30)


def test_a_frame_that_would_not_fit_into_memory_is_refused():
    with pytest.raises(UnusableFile, match="too narrow: its frames of 1 x 9000"):
        check_proportions((1, 9000), PUBLISHED)
    check_proportions((1080, 1920), PUBLISHED)

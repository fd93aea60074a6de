import numpy as np
import pytest

pytest.importorskip("av", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.files import UnusableFile
from mindspeed_mm_dit.data.video_file import read_frames, read_video_facts, write_video

FRAMES = 6


@pytest.fixture
def path(tmp_path):
    levels = (40 * np.arange(FRAMES)).astype(np.uint8)[:, None, None, None]
    write_video(tmp_path / "a.mp4", np.broadcast_to(levels, (FRAMES, 16, 24, 3)), 8)
    return tmp_path / "a.mp4"


def test_frames_are_read_by_number_and_repeated(path):
    frames = read_frames(path, np.array([1, 1, 4, 5]))
    assert frames.shape == (4, 16, 24, 3) and frames.dtype == np.uint8
    assert np.round(frames.mean((1, 2, 3)) / 40).tolist() == [1, 1, 4, 5]
    pytest.raises(UnusableFile, read_frames, path, np.array([0, 6])).match("has 6 frames, and frame 7 is needed")
    assert all(read_video_facts(path, decode)[:3] == (6, 8.0, (16, 24)) for decode in (False, True))


def test_a_file_without_an_image_is_no_video(tmp_path):
    import wave

    with wave.open(str(tmp_path / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", "not compressed"))
        sound.writeframes(bytes(1600))
    pytest.raises(UnusableFile, read_video_facts, tmp_path / "a.wav", decode=True).match("holds no video")

from __future__ import annotations

import pytest

pytest.importorskip("ftfy", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.data.captions import CaptionTokenizer, caption_problems, clean_caption
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.wings.scores.demo.moving_digits import CAPTIONS
from mindspeed_mm_dit.wings.scores.demo.small_text_encoder import write_tokenizer


def test_caption_is_cleaned_as_those_of_wan():
    for caption, clean in {
        "A dog.": "A dog.",
        "  two\n words\t here ": "two words here",
        "a &amp;lt;b&amp;gt; c": "a <b> c",  # escaped twice
        "cafÃ©": "café",
        "it\u2019s": "it's",
        "&nbsp;": "",
    }.items():
        assert clean_caption(caption) == clean


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "tokenizer"
    write_tokenizer(folder, CAPTIONS)
    return folder


def tokenizer(folder, **changes):
    return CaptionTokenizer(UMT5Config("nowhere", str(folder), **{"max_length": 8} | changes))


def test_captions_are_ended_padded_and_masked(tokenizer_folder):
    read = tokenizer(tokenizer_folder)
    ids, mask = read(["a seven  moves left", "", "a moves"])
    assert mask.tolist() == [[1] * 5 + [0] * 3, [1] + [0] * 7, [1] * 3 + [0] * 5]
    assert ids[1].tolist() == [1] + [0] * 7 and ids[0, 4] == 1 and (ids[mask == 0] == 0).all()
    cut, mask = tokenizer(tokenizer_folder, max_length=3)(["a seven moves left"])
    assert mask.tolist() == [[1, 1, 1]] and cut[0, -1] == 1
    assert read.vocabulary_size == 3 + 2 + 10 + 4 and len(set(ids[0, :5].tolist())) == 5


def test_captions_that_are_too_long_or_empty_are_problems(tokenizer_folder):
    captions = ["a seven moves left", "a " * 8, "&nbsp;", "a " * 7, "七向左移动", "7"]
    good, long, empty, *others = caption_problems(tokenizer(tokenizer_folder), captions)
    assert good == "" and others == [""] * 3
    assert "9 tokens" in long and "max_length is 8" in long and "no words" in empty
    assert caption_problems(tokenizer(tokenizer_folder, truncate=True), captions[:3]) == ["", "", empty]
    for caption in ("...", "\u200b", "&lt;&gt;"):
        assert "no words" in caption_problems(tokenizer(tokenizer_folder), [caption])[0]


def test_tokenizer_lies_next_to_the_encoder_or_in_its_folder(tmp_path):
    config = UMT5Config(str(tmp_path / "text_encoder"))
    assert config.tokenizer_folder == tmp_path / "tokenizer"
    with pytest.raises(DataError, match="there is no such folder"):
        tokenizer(tmp_path / "tokenizer")
    with pytest.raises(DataError, match="is no tokenizer"):
        tokenizer(tmp_path)
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/tokenizer_config.json").write_text("{}")
    assert config.tokenizer_folder == tmp_path / "text_encoder"

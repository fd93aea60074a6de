from __future__ import annotations

import json
import shutil

import pytest

pytest.importorskip("ftfy", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

from mindspeed_mm_dit.configs.text_encoder import UMT5Config
from mindspeed_mm_dit.data.captions import CaptionTokenizer, caption_problems, clean_caption
from mindspeed_mm_dit.errors import DataError
from mindspeed_mm_dit.wings.scores.demo.moving_digits import CAPTIONS
from mindspeed_mm_dit.wings.scores.demo.small_text_encoder import write_tokenizer


@pytest.mark.parametrize(
    ("caption", "clean"),
    [
        ("A dog.", "A dog."),
        ("  two\n words\t here ", "two words here"),
        ("a &amp;lt;b&amp;gt; c", "a <b> c"),  # escaped twice
        ("cafÃ©", "café"),
        ("it\u2019s", "it's"),
        ("&nbsp;", ""),
    ],
)
def test_a_caption_is_cleaned_as_wans_are(caption, clean):
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
    assert read.vocabulary_size == 3 + 2 + 10 + 4 and len(set(ids[0, :5].tolist())) == 5


def test_a_caption_that_is_longer_is_cut_before_its_end(tokenizer_folder):
    ids, mask = tokenizer(tokenizer_folder, max_length=3)(["a seven moves left"])
    assert mask.tolist() == [[1, 1, 1]] and ids[0, -1] == 1


def test_captions_that_are_too_long_or_empty_are_problems(tokenizer_folder):
    captions = ["a seven moves left", "a " * 8, "&nbsp;", "a " * 7]
    good, long, empty, longest = caption_problems(tokenizer(tokenizer_folder), captions)
    assert good == longest == ""
    assert caption_problems(tokenizer(tokenizer_folder), ["七向左移动", "7"]) == ["", ""]
    for caption in ("...", "\u200b", "&lt;&gt;"):
        assert caption_problems(tokenizer(tokenizer_folder), [caption]) == [
            f"has the caption {caption!r}, which has no words"
        ]
    assert long.startswith("has a caption of 9 tokens, and text_encoder.max_length is 8")
    assert empty == "has the caption '&nbsp;', which has no words"
    assert caption_problems(tokenizer(tokenizer_folder, truncate=True), captions) == ["", "", empty, ""]


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no such folder; nothing is downloaded"):
        tokenizer(tmp_path / "gone")
    with pytest.raises(DataError, match="is no tokenizer that transformers can load"):
        tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("part", "damage"), [("model", {"unk_token": "x"}), ("post_processor", {"special_tokens": {}})]
)
def test_tokenizer_that_fails_on_its_first_text_is_named(tokenizer_folder, tmp_path, part, damage):
    shutil.copytree(tokenizer_folder, tmp_path / "bad")
    file = tmp_path / "bad/tokenizer.json"
    content = json.loads(file.read_text())
    content[part] |= damage
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=str(tmp_path / "bad")):
        tokenizer(tmp_path / "bad")


def test_the_tokenizer_stands_beside_the_encoder_or_in_its_folder(tmp_path):
    config = UMT5Config(str(tmp_path / "text_encoder"))
    assert config.tokenizer_folder == tmp_path / "tokenizer"
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/tokenizer_config.json").write_text("{}")
    assert config.tokenizer_folder == tmp_path / "text_encoder"

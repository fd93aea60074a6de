# ruff: noqa: RUF001 (texts of many scripts)
import importlib
import json
import shutil
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("ftfy", reason="requirements/video.txt")
pytest.importorskip("transformers", reason="requirements/video.txt")

import transformers

from mindspeed_mm_dit.configs import text_encoder as encoders
from mindspeed_mm_dit.configs.joint import Flux2Config
from mindspeed_mm_dit.configs.text_encoder import CLIPTextConfig, Mistral3Config, Qwen25VLConfig, T5Config, UMT5Config
from mindspeed_mm_dit.data.cache_index import check_same
from mindspeed_mm_dit.data.captions import CaptionTokenizer, caption_problems, clean_caption, fix_text
from mindspeed_mm_dit.errors import ConfigError, DataError
from mindspeed_mm_dit.tools.evaluate.demo import CAPTIONS, write_tokenizer
from tests.text_encoder_fixtures import write_byte_tokenizer, write_clip_tokenizer


@pytest.mark.parametrize(("caption", "clean"), [
    ("A dog.", "A dog."), ("  two\n words\t here ", "two words here"), ("cafÃ©", "café"), ("it\u2019s", "it's"),
    ("a &amp;lt;b&amp;gt; c", "a <b> c"),  # escaped twice
    ("&nbsp;", ""),
])  # fmt: skip
def test_caption_is_cleaned_as_those_of_wan(caption, clean):
    assert clean_caption(caption) == clean


TEXTS = [
    "A sign says “Open”, it’s late: R&amp;B, &lt;ﬁve ﬂags&gt;", "café cafe\u0301 cafÃ© ", "first line\nsecond  line",
    "墙上的牌子写着“今日休息”，下面有一只狗！", "３Ｄのカタカナ（ｶﾅ）", "안녕하세요， 세계", "Надпись «Открыто»\u00a0…",
    "ΟΔΟΣ ΚΑΦΕΣ", "مرحبا،\tبالعالم", "नमस्ते  दुनिया", "שלום “עולם”", "\u200bสวัสดี　ชาวโลก", "[IMG] a mark",
    "plain words", "",
]  # fmt: skip
"""Texts of ten scripts, with all that Wan's cleaning and ftfy would change."""


PIPELINES = {
    "wan": (UMT5Config, "wan.pipeline_wan", "WanPipeline", "_get_t5_prompt_embeds"),
    "flux": (T5Config, "flux.pipeline_flux", "FluxPipeline", "_get_t5_prompt_embeds"),
    "flux clip": (CLIPTextConfig, "flux.pipeline_flux", "FluxPipeline", "_get_clip_prompt_embeds"),
    "sd3": (T5Config, "stable_diffusion_3", "StableDiffusion3Pipeline", "_get_t5_prompt_embeds"),
    "sd3 clip": (CLIPTextConfig, "stable_diffusion_3", "StableDiffusion3Pipeline", "_get_clip_prompt_embeds"),
    "qwen_image": (Qwen25VLConfig, "qwenimage.pipeline_qwenimage", "QwenImagePipeline", "_get_qwen_prompt_embeds"),
    "z_image": (encoders.Qwen3Config, {}),
    "flux2 klein": (encoders.Qwen3Config, Flux2Config.published_texts),
    "flux2": (Mistral3Config, {}),
}
"""Config of the encoder, and a method of diffusers; or what the encoder was published with, to compare with a chat."""


def ids_of_pipeline(module, name, method, tokenizer, texts, config):
    """Return the ids (B, L) that a pipeline of diffusers hands to its text encoder."""
    pytest.importorskip("diffusers")
    encoder = Mock(side_effect=StopIteration, device="cpu", **{"modules.return_value": []})
    each = {f"{part}{number}": value for part, value in (("tokenizer", tokenizer), ("text_encoder", encoder))
            for number in ("", "_2", "_3")}  # fmt: skip
    template = {"prompt_template_encode": config.prompt_template, "prompt_template_encode_start_idx": 0}
    pipeline = SimpleNamespace(**each, **template, _execution_device="cpu", tokenizer_max_length=300)
    with pytest.raises(StopIteration):
        getattr(getattr(importlib.import_module(f"diffusers.pipelines.{module}"), name), method)(pipeline, texts)
    args, named = encoder.call_args
    return (args[0] if args else named["input_ids"]).tolist()


def ids_of_chat(tokenizer, texts, config):
    """Return the ids that ZImagePipeline, Flux2KleinPipeline or Flux2Pipeline hands to its text encoder."""
    system = config.prompt_template.partition("[/SYSTEM_PROMPT]")[0].removeprefix("[SYSTEM_PROMPT]")
    chats = [
        [{"role": "system", "content": [{"text": system}]}, {"content": [{"text": text.replace("[IMG]", "")}]}]
        if isinstance(config, Mistral3Config) else [{"role": "user", "content": text}]
        for text in texts
    ]  # fmt: skip
    thinking = "<think>" not in config.prompt_template
    settings = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": thinking}
    written = [tokenizer.apply_chat_template(chat, **settings) for chat in chats]
    return tokenizer(written, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", PIPELINES)
def test_each_encoder_reads_the_ids_of_its_pipeline(tmp_path, name):
    kind, *source = PIPELINES[name]
    if kind is CLIPTextConfig:
        write_clip_tokenizer(tmp_path)
        tokenizer = transformers.CLIPTokenizer.from_pretrained(tmp_path)
    else:
        write_byte_tokenizer(tmp_path, "mistral3" if kind is Mistral3Config else "qwen3")
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    published = source[0] if len(source) == 1 else {}
    config = kind("nowhere", str(tmp_path), max_length=300).with_published_settings(published)
    texts = [text or getattr(config, "empty_caption", "") for text in TEXTS]
    if kind is CLIPTextConfig and not hasattr(tokenizer, "fix_text"):  # transformers 5: hold to what 4 reads
        texts = [fix_text(text).lower() for text in texts]
    ids_of = ids_of_chat if len(source) == 1 else partial(ids_of_pipeline, *source)
    expected = ids_of(tokenizer, texts, config)
    ids, mask = CaptionTokenizer(config)(TEXTS)
    for text, row, real, reference in zip(TEXTS, ids, mask, expected):
        tokens = row[real == 1].tolist()
        assert tokens == reference[: len(tokens)] and set(reference[len(tokens) :]) <= {tokenizer.pad_token_id}, text


def test_caches_of_cleaned_captions_are_refused(tmp_path):
    """But those of UMT5, whose captions are cleaned as before."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    before = UMT5Config(str(tmp_path)).identity()
    assert before.endswith(", bf16") and "caption" not in before
    with pytest.raises(ConfigError, match="uncleaned captions"):
        check_same("cache", {"text_encoder": before}, {"text_encoder": T5Config(str(tmp_path)).identity()})


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "tokenizer"
    write_tokenizer(folder, CAPTIONS)
    return folder


def tokenizer(folder, **changes):
    return CaptionTokenizer(UMT5Config("nowhere", str(folder), **{"max_length": 8} | changes))


def test_captions_are_ended_padded_and_masked_and_no_longer_than_allowed(tokenizer_folder):
    read = tokenizer(tokenizer_folder)
    ids, mask = read(["a seven  moves left", "", "a moves"])
    assert mask.tolist() == [[1] * 5 + [0] * 3, [1] + [0] * 7, [1] * 3 + [0] * 5]
    assert ids[1].tolist() == [1] + [0] * 7 and ids[0, 4] == 1 and (ids[mask == 0] == 0).all()
    cut, mask = tokenizer(tokenizer_folder, max_length=3)(["a seven moves left"])
    assert mask.tolist() == [[1, 1, 1]] and cut[0, -1] == 1
    assert read.vocabulary_size == 3 + 2 + 10 + 4 and len(set(ids[0, :5].tolist())) == 5
    captions = ["a seven moves left", "a " * 8, "&nbsp;", "a " * 7, "七向左移动", "7"]
    good, long, empty, *others = caption_problems(tokenizer(tokenizer_folder), captions)
    assert good == "" and others == [""] * 3
    assert "9 tokens" in long and "max_length is 8" in long and "no words" in empty
    assert caption_problems(tokenizer(tokenizer_folder, truncate=True), captions[:3]) == ["", "", empty]
    for caption in ("...", "\u200b", "&lt;&gt;"):
        assert "no words" in caption_problems(tokenizer(tokenizer_folder), [caption])[0]


@pytest.mark.parametrize(("part", "lost"), [("model", {"unk_token": "x"}), ("post_processor", {"special_tokens": {}})])
def test_tokenizer_that_fails_on_its_first_text_is_refused(tokenizer_folder, tmp_path, part, lost):
    file = shutil.copytree(tokenizer_folder, tmp_path / "bad") / "tokenizer.json"
    content = json.loads(file.read_text())
    content[part] |= lost
    file.write_text(json.dumps(content))
    pytest.raises(DataError, tokenizer, tmp_path / "bad").match(str(tmp_path / "bad"))


def test_tokenizer_lies_next_to_the_encoder_or_in_its_folder(tmp_path):
    config = UMT5Config(str(tmp_path / "text_encoder"))
    assert config.tokenizer_folder == tmp_path / "tokenizer"
    pytest.raises(DataError, tokenizer, tmp_path / "tokenizer").match(r"tokenizer = .*/tokenizer is not a folder")
    pytest.raises(DataError, tokenizer, tmp_path).match("is not a tokenizer")
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/tokenizer_config.json").write_text("{}")
    assert config.tokenizer_folder == tmp_path / "text_encoder"

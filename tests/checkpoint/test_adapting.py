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
from mindspeed_mm_dit.framework import ops, runtime
from mindspeed_mm_dit.framework.safetensors_file import read_safetensors_file
from mindspeed_mm_dit.integrations.formats.config_json import vae_shapes
from mindspeed_mm_dit.models.dit import DiT
from mindspeed_mm_dit.models.dit_adapter import resize_matrix, resized_input, resized_output
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
NAMES = ("cat", "dog", "2")
FACTS = {"model": MODEL_JSON, "classes": list(NAMES)}
TABLE, EMBEDDING = "y_embedder.embedding_table.weight", "x_embedder.proj.weight"


def weights_of(config=THERE, seed=0):
    side = config.input_size // config.patch_size
    positions = sincos_positions_2d(config.hidden_size, side)[None]
    return random_arrays(parameters_of(config).shapes(), seed) | {"pos_embed": positions}


def facts_of(predictor=(), **sections):
    """The facts of a run whose model.json differs from MODEL_JSON."""
    return FACTS | {"model": MODEL_JSON | {"predictor": MODEL_JSON["predictor"] | dict(predictor)} | sections}


WEIGHTS = weights_of()


def test_adapters_are_no_weights_to_begin_with(tmp_path):
    tuned = {"base": "a", "--lora-target-modules": ["qkv"], "--lora-r": 8, "--lora-alpha": 16}
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001/run.json").write_text(json.dumps({"iteration": 1, "adapters": tuned}))
    pytest.raises(CheckpointError, read_source, tmp_path, THERE).match(r"--init-from = .*LoRA")


@pytest.fixture
def begun(tmp_path):
    """Begin a network that differs from THERE in some settings; return its values and what was done, by name."""

    def begun(classes=("0", "1", "2"), facts=FACTS, weights=WEIGHTS, seed=5, **settings):
        path = tmp_path / "there.safetensors"
        path.unlink(missing_ok=True)
        FORMATS["safetensors"].write(path, State({"model": weights}, facts))
        here = dataclasses.replace(THERE, **settings)
        found = adapt_weights(read_source(path, here), here, classes, seed)
        assert [name for name, _, _ in found] == list(parameters_of(here).shapes())
        assert {name: value.shape for name, value, _ in found} == parameters_of(here).shapes()
        assert all(value.dtype == np.float32 for _, value, _ in found)
        return {name: value for name, value, _ in found}, {name: how for name, _, how in found if how}

    return begun


def assert_taken(values, but=()):
    for name, value in values.items():
        assert name in but or value.tobytes() == WEIGHTS[name].tobytes(), name


def test_bare_weights_of_the_same_network_are_taken_as_they_are(begun):
    values, how = begun(NAMES, {})
    assert not how
    assert_taken(values)


def test_weights_for_captions_are_drawn_anew_and_the_rest_is_taken(begun):
    values, how = begun(num_classes=0, text_dim=6, pooled_dim=4)
    new = {name for name in values if any(part in name for part in ("text_embedder", "pooled_embedder", "cross_attn"))}
    assert set(how) == new and len(new) == 4 + 4 + 2 * 10 and TABLE not in values
    assert set(how.values()) == {"drawn anew: the given weights have none"}
    assert_taken(values, new)
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, num_classes=0, text_dim=6, pooled_dim=4)), 5)
    assert all(values[name].tobytes() == drawn[name].tobytes() for name in new)
    assert not values["blocks.0.cross_attn.to_out.0.weight"].any(), "so the first answer is that of the DiT of classes"
    there = dataclasses.replace(THERE, num_classes=0, text_dim=6)
    facts = facts_of({"num_classes": 0, "text_dim": 6}, text_encoder={"from_pretrained": "nowhere"})
    weights = weights_of(there)
    values, how = begun(facts=facts, weights=weights, num_classes=0, text_dim=9)
    assert how == {"text_embedder.linear_1.weight": "randomly initialised for texts of width 9"}
    assert all(values[name].tobytes() == weights[name].tobytes() for name in values if name not in how)


@pytest.mark.parametrize(("classes", "names", "rows", "done"), [
    ("cat dog 2", "cat dog 2", [0, 1, 2, 3], ""),
    ("cat dog 2", "bird dog cow cat fish", [None, 1, None, 0, None, 3], "2 of 5 {k}, 3 of 5 {r}, "),
    ("cat dog 2", "dog cat cow", [1, 0, None, 3], "2 of 3 {k}, 1 of 3 {r}, "),
    ("cat dog 2 cow", "cow dog bird", [None, 1, None, 3], "1 of 3 {k}, 2 of 3 {r}, "),
    ("cat dog 2", "0 1 2", [0, 1, 2, 3], ""),  # one side has no names: as many classes are the same by number
    ("", "a b c", [0, 1, 2, 3], ""),
    ("0 2 1", "0 1 2", [0, 2, 1, 3], "3 of 3 {k}, "),
    ("", "cat dog", [None, None, 3], "2 of 2 {r}, "),
])  # fmt: skip
def test_classes_are_kept_by_name_wherever_they_stand(begun, classes, names, rows, done):
    facts, names = FACTS | {"classes": classes.split()} if classes else {}, names.split()
    values, how = begun(names, facts, num_classes=len(names))
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, num_classes=len(names))), 5)[TABLE]
    wanted = [drawn[number] if row is None else WEIGHTS[TABLE][row] for number, row in enumerate(rows)]
    np.testing.assert_array_equal(values[TABLE], np.stack(wanted))
    done = done.format(k="classes kept", r="classes randomly initialised")
    assert how == ({TABLE: f"{done}the unconditional class kept"} if done else {})
    assert_taken(values, {TABLE})


def test_model_without_label_dropout_has_no_null_class(begun):
    values, how = begun(NAMES, class_dropout_prob=0.0)
    np.testing.assert_array_equal(values[TABLE], WEIGHTS[TABLE][:3])
    never = dataclasses.replace(THERE, class_dropout_prob=0.0)
    values, how = begun(NAMES, facts_of({"class_dropout_prob": 0.0}), weights_of(never))
    assert how == {TABLE: "3 of 3 classes kept, the unconditional class randomly initialised"}
    assert values[TABLE].shape == (4, 16)


LAST = ("final_layer.linear.weight", "final_layer.linear.bias")


def test_positions_of_another_size_are_computed_and_patches_resampled(begun):
    values, how = begun(input_size=16)
    np.testing.assert_array_equal(values["pos_embed"][0], sincos_positions_2d(16, 8))
    assert how == {"pos_embed": "computed for 8x8 patches"}
    assert_taken(values, {"pos_embed"})
    larger, how = begun(patch_size=4)
    assert how.pop("pos_embed") == "computed for 2x2 patches"
    assert how == dict.fromkeys((EMBEDDING, *LAST), "resampled from patches of 2 to 4")
    back, _ = begun(NAMES, facts_of({"patch_size": 4}), larger)  # and is the same again
    for name, value in back.items():
        np.testing.assert_allclose(value, WEIGHTS[name], atol=1e-5, err_msg=name)


def test_twice_the_size_in_twice_the_patches_answers_alike(begun, framework):
    """Of an image made of grown patches the whole network says the grown answer."""

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
    values, _ = begun(input_size=16, patch_size=4)
    x = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)
    there = answer(THERE, WEIGHTS, x)
    ours = answer(here, values, grown(x).astype(np.float32))
    np.testing.assert_allclose(ours, grown(there), atol=1e-4 * np.abs(there).max())  # float32 of six layers


def test_variance_is_dropped_or_begins_at_zero(begun):
    values, how = begun(learn_sigma=False)
    kept = WEIGHTS[LAST[0]].reshape(2, 2, 2, 3, 16)[:, :, 0]
    np.testing.assert_array_equal(values[LAST[0]], kept.reshape(12, 16))
    assert how == dict.fromkeys(LAST, "variance dropped")
    fixed = {"model_id": "gaussian_diffusion", "variance_type": "fixed_small"}
    again, how = begun(NAMES, facts_of({"learn_sigma": False}, diffusion=fixed), values)
    parts = again[LAST[0]].reshape(2, 2, 2, 3, 16)
    np.testing.assert_array_equal(parts[:, :, 0], kept)
    assert not parts[:, :, 1].any() and how == dict.fromkeys(LAST, "variance added, with zeros")


def test_grey_is_embedded_as_equal_colours_and_other_latents_anew(begun):
    grey = dataclasses.replace(THERE, in_channels=1)
    values, how = begun(in_channels=1)
    patch = np.random.default_rng(2).standard_normal((2, 2)).astype(np.float32)
    of_grey, wanted = (np.einsum("dcij,ij->d", own, patch) for own in (values[EMBEDDING], WEIGHTS[EMBEDDING]))
    np.testing.assert_allclose(of_grey, wanted, atol=1e-5)
    colours = WEIGHTS[LAST[1]].reshape(2, 2, 2, 3)
    np.testing.assert_allclose(values[LAST[1]].reshape(2, 2, 2, 1), colours.mean(3, keepdims=True), atol=1e-6)
    assert how[EMBEDDING] == "from colour to grey"
    back, how = begun(NAMES, {"classes": list(NAMES)}, weights_of(grey))
    np.testing.assert_allclose(back[EMBEDDING].sum(1), weights_of(grey)[EMBEDDING][:, 0], atol=1e-6)
    assert how[LAST[0]] == "from grey to colour"
    values, how = begun(in_channels=16)
    new = "randomly initialised: weights for latents of 3 channels do not convert to 16 channels"
    assert how[EMBEDDING] == how[LAST[1]] == new
    assert not values[LAST[0]].any()
    drawn = initial_weights(parameters_of(dataclasses.replace(THERE, in_channels=16)), 5)
    np.testing.assert_array_equal(values[EMBEDDING], drawn[EMBEDDING])


@pytest.mark.parametrize(("settings", "message"), [
    ({"hidden_size": 32}, "hidden_size is 16 there and 32 here.* pos_embed, x_embedder"),
    ({"num_layers": 1}, r"num_layers is 2 there and 1 here.* blocks\.1"),
    ({"num_layers": 3}, r"num_layers is 2 there and 3 here.* blocks\.2"),
    ({"num_heads": 4}, "num_heads is 2 there and 4 here"),
    ({"mlp_ratio": 2.0}, "mlp_ratio is 4.0 there and 2.0 here"),
    ({"rope": True}, "rope is False there and True here"),  # (which no tensor shows)
])  # fmt: skip
def test_other_width_depth_or_heads_are_refused(begun, settings, message):
    pytest.raises(CheckpointError, begun, **settings).match(f"(?s){message}.*num_classes, class_dropout_prob")


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
    other = dataclasses.replace(THERE, num_heads=4)
    pytest.raises(CheckpointError, adapt_weights, read_source(file, THERE), other, (), 0).match("num_heads is 2 .* 4")
    other = weights_of(seed=1)  # any other file in that folder is read itself
    FORMATS["safetensors"].write(folder / "ours.safetensors", State({"model": other}, FACTS))
    assert read_source(folder / "ours.safetensors", THERE).weights[TABLE].tobytes() == other[TABLE].tobytes()


def test_a_pipeline_of_diffusers_says_its_classes(tmp_path):
    write(tmp_path, "diffusers", State({"model": WEIGHTS}, FACTS)).rename(tmp_path / "transformer")
    labels = {"0": "tench, Tinca tinca", "1": "goldfish", "2": "cat, house cat"}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline", "id2label": labels}))
    here = dataclasses.replace(THERE, num_classes=2)
    found = adapt_weights(read_source(tmp_path, here), here, ("dog", "house cat"), 0)
    (table,) = (value for name, value, _ in found if name == TABLE)
    np.testing.assert_array_equal(table[1:], WEIGHTS[TABLE][2:])


SMALL_WAN = WanConfig(num_layers=1, num_attention_heads=2, attention_head_dim=12, text_dim=16, ffn_dim=32)
OTHERS = {
    "wan": parameters_of(SMALL_WAN).shapes(),
    "vae": vae_shapes(TINY_VAE),
    "inception": {"Mixed_5b.branch1x1.conv.weight": (4, 3, 1, 1), "fc.bias": (8,)},
}


@pytest.mark.parametrize(("kind", "words"), [("wan", "'wan'.*'dit'"), ("vae", "encoder"), ("inception", "predictor")])
def test_weights_of_another_network_are_refused(tmp_path, kind, words):
    FORMATS["pt"].write(tmp_path / "other.pt", State({"model": random_arrays(OTHERS[kind], 0)}))
    pytest.raises(CheckpointError, read_source, tmp_path / "other.pt", THERE).match(f"--init-from = .*{words}")


def test_wan_takes_weights_of_its_own_size_alone_and_for_clips_of_any(tmp_path):
    path, weights = tmp_path / "wan.safetensors", random_arrays(OTHERS["wan"], 0)

    def assert_begun(weights, source, config):
        found = adapt_weights(source, config, (), 0)
        assert all(not how and value.tobytes() == weights[name].tobytes() for name, value, how in found)

    FORMATS["safetensors"].write(path, State({"model": weights}))
    source = read_source(path, SMALL_WAN)
    assert_begun(weights, source, SMALL_WAN)
    wider = dataclasses.replace(SMALL_WAN, ffn_dim=48)
    refused = pytest.raises(CheckpointError, adapt_weights, read_source(path, wider), wider, (), 0)
    refused.match("(?s)ffn_dim is 32 there and 48 here.*latent_size, rope_max_seq_len")
    fewer = dataclasses.replace(SMALL_WAN, num_attention_heads=1, attention_head_dim=24)
    told = dataclasses.replace(source, predictor=fewer, num_heads=2)  # as its config.json has it
    pytest.raises(CheckpointError, adapt_weights, told, fewer, (), 0).match("num_heads is 2 there and 1 here")
    grey = dataclasses.replace(SMALL_WAN, in_channels=1, out_channels=1)
    predictor = {name: value for name, value in vars(grey).items() if value is not None}
    model = {"ae": {"model_id": "pixel", "channels": 1}, "predictor": predictor,
             "text_encoder": {"model_id": "umt5", "from_pretrained": "nowhere"},
             "diffusion": {"model_id": "wan_flow_match_scheduler"}}  # fmt: skip
    weights = random_arrays(parameters_of(grey).shapes(), 0)
    FORMATS["safetensors"].write(path, State({"model": weights}, {"model": model}))
    longer = dataclasses.replace(grey, latent_size=(3, 8, 8), rope_max_seq_len=64)
    assert_begun(weights, read_source(path, longer), longer)


def test_a_size_that_shapes_alone_tell_is_compared_by_shapes(tmp_path):
    odd = dataclasses.replace(THERE, mlp_ratio=2.7)  # a hidden layer of 43, which is 2.6875 of the width
    FORMATS["pt"].write(tmp_path / "odd.pt", State({"model": weights_of(odd)}))
    here = dataclasses.replace(odd, num_classes=9)
    (how,) = {how for _, _, how in adapt_weights(read_source(tmp_path / "odd.pt", here), here, (), 0) if how}
    assert how == "9 of 9 classes randomly initialised, the unconditional class kept"


def test_missing_and_incomplete_sources_are_refused(tmp_path):
    part = {name: array for name, array in WEIGHTS.items() if name != "blocks.1.mlp.fc1.bias"}
    FORMATS["pt"].write(tmp_path / "part.pt", State({"model": part}))
    for path, words in (
        (tmp_path / "no.pt", r"no\.pt"),
        (tmp_path, "none of the formats"),
        (tmp_path / "part.pt", r"'dit'.*blocks\.1\.mlp\.fc1\.bias"),
    ):
        pytest.raises(CheckpointError, read_source, path, THERE).match(f"--init-from = .*{words}")
    pytest.raises(ConfigError, read_source, "x" * 5000, THERE).match("--init-from = 'x")


def test_digest_covers_names_shapes_and_float32_values_in_order():
    arrays = {"b": np.arange(6.0).reshape(3, 2).T, "a": np.zeros(1, np.float32)}
    content = b"a (1,) " + bytes(4) + b"b (2, 3) " + np.float32([0, 2, 4, 1, 3, 5]).tobytes()
    assert base_digest(arrays) == hashlib.sha256(content).hexdigest()


SIZES = [(1, 2), (1, 3), (2, 3), (2, 4), (2, 8), (3, 4), (4, 7)]
DRAW = np.random.default_rng(0)


def test_growing_is_bilinear_interpolation_of_pytorch():
    torch = pytest.importorskip("torch")
    grown = [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]  # centres at -0.25, 0.25, 0.75, 1.25; edges repeated
    np.testing.assert_allclose(resize_matrix(2, 4), grown, atol=1e-15)
    for before, after in SIZES:
        patch = torch.tensor(DRAW.standard_normal((1, 1, before, before)))
        theirs = torch.nn.functional.interpolate(patch, (after, after), mode="bilinear", align_corners=False)
        matrix = resize_matrix(before, after)
        np.testing.assert_allclose(matrix @ patch[0, 0].numpy() @ matrix.T, theirs[0, 0].numpy(), atol=1e-12)


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_a_grown_patch_is_embedded_as_the_patch_it_was_made_of(before, after):
    weight, patch = DRAW.standard_normal((5, 3, before, before)), DRAW.standard_normal((3, before, before))
    matrix = resize_matrix(before, after)
    token = np.einsum("dcij,cij->d", weight, patch)
    grown = np.einsum("dcij,cij->d", resized_input(weight, after), matrix @ patch @ matrix.T)
    np.testing.assert_allclose(grown, token, atol=1e-10)


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_answer_is_the_resized_answer_and_shrinks_back(before, after):
    weight, token = DRAW.standard_normal((before, before, 2, 5)), DRAW.standard_normal(5)
    for start, end in ((before, after), (after, before)):
        matrix, there = resize_matrix(start, end), weight if start == before else resized_output(weight, after)
        answer = np.einsum("ip,jq,pqc->ijc", matrix, matrix, there @ token)
        np.testing.assert_allclose(resized_output(there, end) @ token, answer, atol=1e-10)
    weight = DRAW.standard_normal((4, 3, before, before))
    np.testing.assert_allclose(resized_input(resized_input(weight, after), before), weight, atol=1e-10)
    answer = DRAW.standard_normal((before, before, 3, 4))
    np.testing.assert_allclose(resized_output(resized_output(answer, after), before), answer, atol=1e-10)

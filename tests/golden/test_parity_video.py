"""mm-dit parity on the reference values of text to video, and on files that are not quite that."""

import re

import numpy as np
import pytest

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import UserError
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from tests.conftest import FRAMEWORK, GOLDEN
from tests.golden.conftest import without

FILE, CHECKPOINT, WAN = GOLDEN / "t2v_tiny.npz", GOLDEN / "t2v_tiny.pt", GOLDEN / "wan_tiny.pt"
ENCODERS = {"--vae": GOLDEN / "wan_vae_tiny", "--text-encoder": GOLDEN / "umt5_tiny"}
CHOSEN = ["--checkpoint", str(CHECKPOINT), "--ai-framework", FRAMEWORK]


@pytest.fixture(scope="module")
def video():
    with np.load(FILE) as file:
        return dict(file)


def written(folder, video, *kept, **changed):
    """A file of the config, the inputs, and what else is ``kept``; names in ``changed`` have __ for a slash."""
    names = ("config", "dit/x", "dit/t", "dit/text", *kept)
    arrays = {name: video[name] for name in names} | {key.replace("__", "/"): a for key, a in changed.items()}
    np.savez(folder / "part.npz", **{name: array for name, array in arrays.items() if array is not None})
    return folder / "part.npz"


def test_every_quantity_of_text_to_video_is_reproduced(compare):
    left_out = {}
    findings = compare(FILE, CHECKPOINT, 1e-5, 1e-12, {"--wan": WAN}, left_out.__setitem__)
    assert len(findings) == 264 and [f for f in findings if not f.good] == []
    assert {f.tolerance for f in findings if not f.name.endswith("/resized")} == {1e-5}
    assert {f.name.split("/")[0] for f in findings} == {"dit", "wan", "sched", "sample", "step", "prep"}
    assert set(left_out) == {"diffusers_euler", "vae", "umt5", "step/latents", "step/prompt_embeds"}


@pytest.mark.mindspore
@pytest.mark.costly("gradients of networks of video that MindSpore compiles are the published ones")
def test_gradients_through_compiled_networks_are_the_published_ones(compare, all_compiled, tmp_path):
    part = without(FILE, tmp_path, "(?!dit|wan)", ".+/(output|after)", ".+_step")
    findings = compare(part, CHECKPOINT, 1e-5, 1e-12, {"--wan": WAN})
    assert {f.name.partition("/grad_norm/")[0] for f in findings if "grad_norm/" in f.name} == {"dit", "wan"}
    assert [f for f in findings if not f.good] == []


@pytest.mark.pytorch
def test_values_of_autoencoder_and_text_encoder_are_reproduced(compare):
    pytest.importorskip("transformers", reason="requirements/video.txt")
    left_out = {}
    findings = compare(FILE, CHECKPOINT, 1e-5, 1e-12, {"--wan": WAN, **ENCODERS}, left_out.__setitem__)
    assert len(findings) == 272 and set(left_out) == {"diffusers_euler"}
    assert [f for f in findings if not f.good] == []
    assert {"vae/decoded", "umt5/mm_embeds", "step/latents", "step/grad_norm_total"} <= {f.name for f in findings}


@pytest.mark.pytorch
def test_autoencoder_of_other_channels_is_taken_by_its_config(compare, tmp_path):
    """Held to diffusers itself: 3 channels of latents, half the size of the frames, other constants."""
    torch, diffusers = pytest.importorskip("torch"), pytest.importorskip("diffusers")
    torch.manual_seed(0)
    mean, std = [0.5, -1.0, 2.0], [0.25, 1.0, 4.0]
    vae = diffusers.AutoencoderKLWan(base_dim=2, z_dim=3, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True],
                                     latents_mean=mean, latents_std=std).eval()  # fmt: skip
    vae.save_pretrained(tmp_path / "vae")
    images = torch.linspace(-1, 1, 3 * 5 * 6 * 4).reshape(1, 3, 5, 6, 4)
    with torch.no_grad():
        found = vae.encode(images).latent_dist.mean
        decoded = vae.decode(found).sample
    normalised = (found.numpy() - np.reshape(mean, (1, 3, 1, 1, 1))) / np.reshape(std, (1, 3, 1, 1, 1))
    values = {"video": images.numpy(), "mean": found.numpy(), "mm_latents": normalised, "decoded": decoded.numpy()}
    np.savez(tmp_path / "vae.npz", **{f"vae/{name}": array for name, array in values.items()})
    findings = compare(tmp_path / "vae.npz", "unused.pt", 1e-5, 1e-12, {"--vae": tmp_path / "vae"})
    assert len(findings) == 3 and all(f.good for f in findings)


def test_wrong_values_differ(compare, tmp_path, video):
    kept = {name: array for name, array in video.items() if name.startswith("prep/a/")}
    np.savez(tmp_path / "frames.npz", **{**kept, "prep/a/resized": np.minimum(kept["prep/a/resized"], 250) + 2})
    needed = ("dit/target", "sched/x0", "sched/noise", "sched/model_output", "sched/index")
    names = ("dit/output", "dit/grad_norm/patch_embedding.bias", "sched/shift5/loss")
    wrong = written(tmp_path, video, *needed, **{name: video[name] * 1.0001 for name in names})
    for file, wanted in ((tmp_path / "frames.npz", ("prep/a/resized",)), (wrong, names)):
        findings = {f.name: f.good for f in compare(file, CHECKPOINT, 1e-5, 1e-12)}
        assert [findings[name] for name in wanted] == [False] * len(wanted)


@pytest.mark.pytorch
def test_unknown_key_is_refused(compare, tmp_path, video):
    for key in ("dit/after_block2", "dit/grad_norm/blocks.0.norm1.wait", "sched/shift5/nothing", "dat/output",
                "sched/shift5.5.5/sigmas", "sched/shift5/infer0/sigmas", "sample/result_cfg"):  # fmt: skip
        path = written(tmp_path, video, "dit/target", **{key: np.zeros(1)})
        with pytest.raises(UserError, match=re.escape(key)):
            compare(path, CHECKPOINT, 1e-5, 1e-12)


@pytest.mark.pytorch
def test_inputs_that_do_not_fit_the_network_are_refused(tmp_path, video, capsys):
    for name, array, words in (
        ("dit__x", np.zeros((3, 16, 3, 4, 5), np.float32), "width 5"),
        ("dit__x", np.zeros((3, 16, 65, 2, 2), np.float32), "predictor.rope_max_seq_len = 64"),
        ("dit__x", np.zeros(3, np.float32), "dit/x"),
        ("dit__t", np.zeros(2, np.float32), "dit/t"),
        ("dit__text", np.zeros((3, 7, 31), np.float32), "(3, 7, 32)"),
        ("dit__text", None, "dit/text"),
        ("config", None, ""),  # the weights bring their own
        ("config", np.zeros(3, np.int64), ""),
    ):
        path = written(tmp_path, video, "dit/output", **{name: array})
        assert main(["parity", "--reference", str(path), *CHOSEN]) == (2 if words else 0)
        assert words in capsys.readouterr().err


@pytest.mark.pytorch
@pytest.mark.parametrize(("key", "array", "words"), [
    ("vae/video", np.zeros((1, 9, 32, 32)), "(any, 3, any, any, any)"),
    ("umt5/ids", np.full((3, 16), 128), "127"),
    ("umt5/ids", np.zeros((3, 1, 16), int), "(any, any)"),
    ("umt5/mask", np.ones((3, 15), int), "(3, 16)"),
    ("step/prompt_ids", np.zeros((1, 1, 16), int), "(2, 1, any)"),
    ("step/noise", np.zeros((2, 16, 2, 4, 5)), "(2, 16, 2, 4, 6)"),
    ("step/t_index", np.array(1000), "999"),
    ("step/shift", np.array(0), "step/shift = 0.0"),
    ("step/video", np.zeros((2, 3, 5, 32, 40)), "width 5"),
    ("sched/noise", np.zeros((2, 4, 3, 4, 3)), "(2, 4, 3, 4, 4)"),
])  # fmt: skip
def test_inputs_of_the_other_groups_are_refused(compare, tmp_path, video, key, array, words):
    pytest.importorskip("transformers", reason="requirements/video.txt")
    group = key.split("/")[0]
    needed = {name: kept for name, kept in video.items() if name.startswith(f"{group}/") and "grad_norm" not in name}
    np.savez(tmp_path / "part.npz", **{**needed, "config": video["config"], key: array})
    with pytest.raises(UserError, match=re.escape(words)) as refused:
        compare(tmp_path / "part.npz", CHECKPOINT, 1e-5, 1e-12, ENCODERS)
    assert group in str(refused.value)


@pytest.mark.pytorch
def test_weights_without_a_config_take_the_one_of_the_file(compare, tmp_path, video):
    for source, target in ((CHECKPOINT, "dit.pt"), (WAN, "wan.pt")):
        write_torch_file(tmp_path / target, dict(read_torch_file(source)["model"]))
    given = (tmp_path / "dit.pt", 1e-5, 1e-12, {"--wan": tmp_path / "wan.pt"})
    findings = compare(written(tmp_path, video, "dit/output", "wan/output"), *given)
    assert [finding.good for finding in findings] == [True, True]
    for config, words in ((np.zeros(3, np.int64), r"is \[0, 0, 0\]"), (video["config"] + 1, "head_dim = 33")):
        with pytest.raises(UserError, match=words):
            compare(written(tmp_path, video, "dit/output", config=config), *given)


def test_tables_of_other_lengths_and_shifts_are_made(compare, tmp_path):
    """T is the length of the tables in the file: here 8 rows, shift 2, by hand."""
    even = 1 - np.arange(8) / 8
    sigmas = 2 * even / (1 + even)
    bell = np.exp(-2 * (sigmas - 0.5) ** 2)
    weights = (bell - bell.min()) * 8 / (bell - bell.min()).sum()
    tables = {"sched/shift2/sigmas": sigmas, "sched/shift2/weights": weights, "sched/shift2/timesteps": 8 * sigmas}
    np.savez(tmp_path / "tables.npz", **tables)
    findings = compare(tmp_path / "tables.npz", "unused.pt", 1e-12, 1e-12)
    assert len(findings) == 3 and all(f.good for f in findings)

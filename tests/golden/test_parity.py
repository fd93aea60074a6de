"""mm-dit parity on the reference values of published models of images, and on files that are not quite those."""

import re

import numpy as np
import pytest

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import CheckpointError
from mindspeed_mm_dit.framework.torch_file import read_torch_file, write_torch_file
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.objectives.gaussian.schedule import Schedule
from tests.conftest import FRAMEWORK, GOLDEN
from tests.golden.conftest import without

CHECKPOINT = GOLDEN / "dit_tiny_p2.pt"
CHOSEN = ["--checkpoint", str(CHECKPOINT), "--ai-framework", FRAMEWORK]
STEP = "param_norm_after_one_adamw_step"
INPUTS = ("config", "x0", "noise", "t", "y")
FLOW_INPUTS = ("config", "x0", "x1", "t", "y", "sample/start", "sample/y")
ON_MINDSPORE = FRAMEWORK == "mindspore"
WALKS = ("(ode|sde)/(GVP|VP)/(score|velocity)", "(ode|sde)/Linear/(noise|score)", "sde/GVP/noise",
         "sde/Linear/.*/cfg1.5/")  # fmt: skip
"""Walks of one code along other paths: of `make test-all`, on MindSpore of --campaign."""
RESULTS = ("cfg_output", "drop_u", "loss", "output", "param_norm", "x_pred", "x_t", "z_t")


def wrong(findings):
    return [finding for finding in findings if not finding.good]


def whole(name, quantities, wider, *marks, on_pytorch=()):
    return pytest.param(name, quantities, wider.split(), marks=marks if ON_MINDSPORE else on_pytorch, id=name)


@pytest.mark.parametrize(("name", "quantities", "wider"), [
    whole("dit_tiny_p2", 47, ""),
    whole("sit_tiny_p2", 357, f"ode path loss {STEP}", pytest.mark.campaign, on_pytorch=[pytest.mark.extended]),
    whole("jit_tiny", 129, STEP, pytest.mark.costly("MindSpore has every option")),
    whole("repa_tiny", 181, STEP, pytest.mark.extended),
    whole("lightningdit_tiny", 103, STEP, pytest.mark.extended),
    whole("meanflow_tiny", 294, STEP, pytest.mark.pytorch),  # (minutes of derivatives)
])  # fmt: skip
def test_every_quantity_of_a_published_model_is_reproduced(compare, name, quantities, wider):
    findings = compare(GOLDEN / f"{name}.npz", GOLDEN / f"{name}.pt", tolerance=1e-5, table_tolerance=1e-12)
    assert len(findings) == quantities and wrong(findings) == []
    assert name == "dit_tiny_p2" or {f.name.split("/")[0] for f in findings if f.tolerance > 1e-5} <= set(wider)


@pytest.mark.costly("MindSpore has the published losses, chains and gradients of flow matching")
def test_every_quantity_of_flow_matching_along_some_paths(compare, tmp_path):
    part = without(GOLDEN / "sit_tiny_p2.npz", tmp_path, *WALKS)
    findings = compare(part, GOLDEN / "sit_tiny_p2.pt", tolerance=1e-5, table_tolerance=1e-12)
    assert len(findings) == 309 and wrong(findings) == []
    assert {f.name.split("/")[0] for f in findings if f.tolerance > 1e-5} <= {"ode", "path", "loss", STEP}


@pytest.mark.mindspore
@pytest.mark.parametrize(("name", "parameters"), [("dit", 31), ("jit", 56)])
def test_gradients_through_a_compiled_network_are_the_published_ones(compare, all_compiled, tmp_path, name, parameters):
    """Of the network as first published, and of the one with every option: positions turned, tokens in context."""
    (file,) = GOLDEN.glob(f"{name}_tiny*.npz")
    part = without(file, tmp_path, "(?!grad_norm/|args/|config/).+/", *RESULTS)
    findings = compare(part, file.with_suffix(".pt"), tolerance=1e-5, table_tolerance=1e-12)
    assert sum(f.name.startswith("grad_norm/") for f in findings) == parameters and wrong(findings) == []


@pytest.mark.pytorch  # the same on every framework
def test_a_recipe_that_its_checkpoint_does_not_tell_is_named(compare, tmp_path):
    for change, message in (
        (lambda content: content.pop("options"), "lacks options"),
        (lambda content: content["options"].pop("rope"), "option/rope/output"),
        (lambda content: content["config"]["optimizer"].update(lr="fast"), "optimizer/lr = 'fast'"),
        (lambda content: content["config"]["model"].update(use_rmsnorm=False), "blocks.0.norm1.weight"),
    ):
        content = read_torch_file(GOLDEN / "lightningdit_tiny.pt")
        change(content)
        write_torch_file(tmp_path / "changed.pt", content)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            compare(GOLDEN / "lightningdit_tiny.npz", tmp_path / "changed.pt", 1e-5, 1e-12)


@pytest.mark.pytorch
@pytest.mark.parametrize("kept", ["linear/lognormal/t", "sample/heun/cfg1/result", "grad_norm/projectors.0.0.bias"])
def test_a_file_of_one_group_is_known_for_repa(compare, tmp_path, kept):
    with np.load(GOLDEN / "repa_tiny.npz") as file:
        inputs = ("config", "z_dims", "proj_coeff", "x", "e", "y", "time_u", "time_z", "zs0", "zs1", "sample/start",
                  "sample/y", "sample/cfg")  # fmt: skip
        part = {name: file[name] for name in {*inputs, kept} - ({"zs0", "zs1"} if "heun" in kept else set())}
    np.savez(tmp_path / "part.npz", **part)
    findings = compare(tmp_path / "part.npz", GOLDEN / "repa_tiny.pt", 1e-5, 1e-12)
    assert [(f.name, f.good) for f in findings] == [(kept, True)]


@pytest.mark.pytorch
def test_impossible_file_of_repa_is_refused(compare, tmp_path):
    with np.load(GOLDEN / "repa_tiny.npz") as file:
        inputs = [name for name in file if "/" not in name or name.startswith("linear/uniform")]
        part = {name: file[name] for name in inputs if not name.startswith(("loss", "proj_loss", "denoising"))}
    for name, array, message in (
        ("z_dims", np.array([20]), "projectors.1.0.bias"),
        ("z_dims", np.zeros((2, 0), int), "(2, 0)"),
        ("config", np.array([48, 3, 4, 2, 8, 4, 10, 4, 36]), "encoder_depth = 4"),
        ("zs1", np.zeros((4, 16, 20), np.float32), "(4, 16, 12)"),
        ("linear/uniform/projected2", np.zeros(1), "linear/uniform/projected2"),
        ("grad_norm_of_proj_loss/none", np.ones(1), "grad_norm_of_proj_loss/none"),
    ):
        np.savez(tmp_path / "odd.npz", **{**part, name: array})
        with pytest.raises(CheckpointError, match=re.escape(message)):
            compare(tmp_path / "odd.npz", GOLDEN / "repa_tiny.pt", 1e-5, 1e-12)


@pytest.mark.pytorch
def test_a_wrong_reference_value_gives_exit_code_1_and_is_named(tmp_path, golden, capsys):
    given = {key: golden[key] for key in (*INPUTS, "x_t")}
    wrong = {key: 1.001 * golden[key] for key in ("loss_vb", "float64/loss_vb")}
    np.savez(tmp_path / "wrong.npz", **given, **wrong)
    assert main(["parity", "--reference", str(tmp_path / "wrong.npz"), *CHOSEN]) == 1
    assert "DIFFERS" in next(line for line in capsys.readouterr().out.splitlines() if "loss_vb" in line)


@pytest.mark.pytorch
def test_ours_may_be_twice_as_far_from_float64_as_theirs(compare, tmp_path, golden):
    part = {key: golden[key] for key in INPUTS}
    for ours, published, good in ((7e-5, 4e-5, True), (9e-5, 4e-5, False), (9e-6, 0, True), (2e-5, 0, False)):
        exact = golden["float64/x_t"] * (1 + ours)
        np.savez(tmp_path / "part.npz", **part, x_t=exact * (1 - published), **{"float64/x_t": exact})
        (found,) = compare(tmp_path / "part.npz", CHECKPOINT, 1e-5, 1e-12)
        assert found.good is good and found.error == pytest.approx(ours, rel=0.01)
        assert found.noise == pytest.approx(published, rel=0.01, abs=1e-15)
    part["float64/x_t"] = golden["float64/x_t"]
    zeros = np.zeros((4, 4, 8, 8), np.float32)
    for published, reason in ((zeros[0, 0, 0], "shape"), (zeros * np.nan, "finite"), (zeros, r"1.0e\+00")):
        np.savez(tmp_path / "part.npz", **part, x_t=published)
        with pytest.raises(CheckpointError, match=f"x_t and float64/x_t.*{reason}"):
            compare(tmp_path / "part.npz", CHECKPOINT, 1e-5, 1e-12)


@pytest.mark.pytorch
def test_newest_checkpoint_of_a_folder_is_compared(compare, tmp_path, golden):
    convert(CHECKPOINT, tmp_path / "run", "mindspore")
    part = {key: golden[key] for key in (*INPUTS, "output")}
    part["table/sqrt_recipm1_alphas_cumprod"] = Schedule.create("linear", 1000).sqrt_recipm1_alphas_cumprod
    np.savez(tmp_path / "part.npz", **part)
    assert all(f.good for f in compare(tmp_path / "part.npz", tmp_path / "run", 1e-5, 1e-12))


UNKNOWN = {
    "dit_tiny_p2": "table/none grad_norm/none nonsense",
    "sit_tiny_p2": "path/Cubic/x_t loss/Linear/velocity/none ode/Linear/velocity/rk4/cfg1/result time/shift sde/VP "
    "grad_norm/none grad_norm/pos_embed param_norm_after_one_adamw_step/none time/shift0 time/shift1.2.3 "
    "cfg_output_scale1.5.5_rgb3 ode/VP/noise/euler_tight/cfg1/result ode/VP/noise/dopri5_reverse/cfg1/result "
    "sde/VP/noise/Euler/sigma_foo3/Mean/cfg1/result loss/VP/velocity/likelihood",
}


@pytest.mark.pytorch
@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_quantity_is_refused(compare, tmp_path, name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        part = {key: file[key] for key in (INPUTS if name[0] == "d" else FLOW_INPUTS[:5])}
    for key in UNKNOWN[name].split():
        np.savez(tmp_path / "odd.npz", **part, **{key: np.zeros(1)})
        with pytest.raises(CheckpointError, match=re.escape(key)):
            compare(tmp_path / "odd.npz", GOLDEN / f"{name}.pt", 1e-5, 1e-12)
    np.savez(tmp_path / "empty.npz", x0=np.zeros(1))
    with pytest.raises(CheckpointError, match="config is not in --reference"):
        compare(tmp_path / "empty.npz", CHECKPOINT, 1e-5, 1e-12)


def flow_file(path, *names, **more):
    with np.load(GOLDEN / "sit_tiny_p2.npz") as file:
        part = {name: file[name] for name in (*FLOW_INPUTS, *names)}
    np.savez(path, **(part | more))
    return part


@pytest.mark.parametrize(
    "names",
    [["loss/Linear/velocity/None"], ["loss64/VP/noise/likelihood"], ["t_embedding"], ["cfg_output_scale1.5_rgb3"],
     ["table/t", "table/GVP/alpha"], ["time/u", "time/shift3"], ["eps/VP/noise"], ["loss_after_one_adamw_step"]],
)  # fmt: skip
def test_a_file_of_one_group_is_known_for_flow_matching(compare, tmp_path, names):
    given = flow_file(tmp_path / "a.npz", *names)
    if names[0].startswith(("table", "time", "eps")):
        np.savez(tmp_path / "a.npz", **{name: given[name] for name in ("config", *names)})
    assert [f.good for f in compare(tmp_path / "a.npz", GOLDEN / "sit_tiny_p2.pt", 1e-5, 1e-12)] == [True]


@pytest.mark.pytorch
def test_guidance_on_the_first_channels_leaves_the_others_to_each_half(compare, tmp_path):
    """On no channel the halves are the network's own answers; from there to the last each is guided as on three."""
    given = flow_file(tmp_path / "a.npz", "cfg_output_scale1.5_rgb3", "path/Linear/output")
    guided = given["cfg_output_scale1.5_rgb3"]
    two = guided.copy()
    two[:6, 2] = given["path/Linear/output"][:, 2]
    two[6:, 2] = (guided[:6, 2] - 1.5 * two[:6, 2]) / -0.5
    flow_file(tmp_path / "b.npz", **{"cfg_output_scale1.5_rgb2": two})
    (found,) = compare(tmp_path / "b.npz", GOLDEN / "sit_tiny_p2.pt", 1e-5, 1e-12)
    assert found.good, found


@pytest.mark.pytorch
def test_dopri5_walks_between_other_times_too(compare, tmp_path):
    """Held to the exact flow of the tight tolerance, of which both are within theirs."""
    from mindspeed_mm_dit.tools.verify.reference.file import read_arrays
    from mindspeed_mm_dit.tools.verify.reference.sit import SiT

    flow_file(tmp_path / "a.npz", "sample/brownian")
    program = SiT(read_arrays(tmp_path / "a.npz"), {"--checkpoint": GOLDEN / "sit_tiny_p2.pt"})
    exact, ours, even = (
        program.states("ode", "Linear", "velocity", f"{method}_eps0.1", "1")[-1]
        for method in ("dopri5_tight", "dopri5", "heun2")
    )
    scale = np.linalg.norm(exact)
    assert np.linalg.norm(ours - exact) < 5e-4 * scale < np.linalg.norm(even - exact)

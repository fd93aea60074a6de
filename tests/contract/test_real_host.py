"""Whole runs in the unmodified MindSpeed-MM, compared with the standalone host."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.weights import read_weights
from mindspeed_mm_dit.wings.view.logs import parse_validation
from tests.conftest import ROOT
from tests.contract.hosted import (
    FLAGS,
    TwoHosts,
    dcp_loader_of_mindspeed,
    environment,
    good,
    needs_device,
    needs_trees,
    on_a_device_apart,
    run_python,
    several_shapes,
    tools_json,
    train_in_sora,
)
from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.training.launch import Outcome

pytestmark = [needs_trees, pytest.mark.ranks]

HOSTS = ("standalone", "mindspeed-mm")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> TwoHosts:
    return TwoHosts(tmp_path_factory.mktemp("hosts"), digits_folder)


@pytest.fixture(scope="module")
def straight(hosts: TwoHosts) -> Outcome:
    """Four steps in the host, uninterrupted, on one rank."""
    return good(hosts.train("mindspeed-mm", 4, "--save straight"))


@pytest.fixture(scope="module")
def whole(hosts: TwoHosts, straight: Outcome) -> Callable[[int], tuple[str, Outcome]]:
    """Ranks -> the folder of an uninterrupted run on as many, and what it printed: sums differ in the last digit."""

    @cache
    def run(ranks: int) -> tuple[str, Outcome]:
        if ranks == 1:
            return "straight", straight
        return "straight_2", good(hosts.train("mindspeed-mm", 4, "--save straight_2", ranks))

    return run


def printed(outcome: Outcome) -> dict[int, tuple[str, str, str]]:
    """Learning rate, loss (7 digits) and gradient norm by iteration, as printed."""
    assert outcome.lines, outcome.output[-4000:]
    return outcome.lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_hosts_print_the_same_losses(hosts: TwoHosts, whole: Callable, ranks: int) -> None:
    _, there = whole(ranks)
    assert "host: MindSpeed-MM" in there.output
    # Everything random comes with the batch, so even the last printed digit agrees.
    assert printed(there) == printed(good(hosts.train("standalone", 4, ranks=ranks)))


@needs_device
def test_a_device_apart_prints_the_losses_of_redirected_calls(hosts: TwoHosts, straight: Outcome) -> None:
    there = good(hosts.train("mindspeed-mm", 4, "--save apart", **on_a_device_apart(environment())))
    assert there.losses == pytest.approx(straight.losses, rel=2e-6) and straight.losses


@pytest.fixture(scope="module")
def two_steps(hosts: TwoHosts) -> Callable[[str, int], tuple[str, Outcome]]:
    """(host, ranks) -> the folder of a run of two steps that was given an empty folder to load, and what it printed."""

    @cache
    def run(host: str, ranks: int) -> tuple[str, Outcome]:
        name = f"{host}_{ranks}"
        return name, good(hosts.train(host, 2, f"--save {name} --load {name}", ranks))

    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"),
    [("mindspeed-mm", "mindspeed-mm"), ("mindspeed-mm", "standalone"), ("standalone", "mindspeed-mm")],
)
def test_a_run_goes_on_in_the_other_host_as_if_uninterrupted(
    hosts: TwoHosts, whole: Callable, two_steps: Callable, first: str, second: str, ranks: int
) -> None:
    folder, uninterrupted = whole(ranks)
    name, started = two_steps(first, ranks)
    place = f"{name}_{second}"
    shutil.copytree(hosts.folder / name, hosts.folder / place)
    resumed = good(hosts.train(second, 4, f"--save {place} --load {place}", ranks))
    assert {**printed(started), **printed(resumed)} == printed(uninterrupted)
    for use_ema in (True, False):
        expected = read_weights(hosts.folder / folder / "iter_0000004", use_ema)
        found = read_weights(hosts.folder / f"{place}/iter_0000004", use_ema)
        assert found.keys() == expected.keys()
        for key, value in expected.items():  # AdamW's rounding differs between the two fused kernels
            np.testing.assert_allclose(found[key], value, atol=1e-6, err_msg=key)


@needs_engine
def test_the_native_engine_goes_on_with_a_converted_run_as_if_uninterrupted(
    hosts: TwoHosts, digits_folder: Path, straight: Outcome, two_steps: Callable
) -> None:
    name, _ = two_steps("mindspeed-mm", 1)
    convert = f"-m mindspeed_mm_dit.cli.main convert {name} converted --to pytorch"
    assert "model, ema, optimizer" in good(run_python(convert.split(), hosts.folder, PYTHONPATH=str(ROOT))).output
    native = NativeAndStandalone(hosts.folder, digits_folder)  # (the same configs)
    resumed = good(native.engine(native.yaml("native", 4, "--load converted --save native", fsdp2=False)))
    losses = {step: loss for step, loss in straight.losses.items() if step > 2}
    assert resumed.losses == pytest.approx(losses, abs=2e-6, rel=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_of_an_empty_folder_starts_adam_at_its_first_step(
    whole: Callable, two_steps: Callable, ranks: int
) -> None:
    uninterrupted = printed(whole(ranks)[1])
    _, fresh = two_steps("mindspeed-mm", ranks)
    assert printed(fresh) == {step: line for step, line in uninterrupted.items() if step <= 2}
    # Since 2025-12-06 MindSpeed's torch_dcp loader takes a step of its own; one line says that it is undone.
    steps_while_loading = "get_optimizer_state_dict" in dcp_loader_of_mindspeed()
    assert fresh.output.count("note: MindSpeed stepped AdamW while it loaded") == int(steps_while_loading)


def test_finetuning_starts_adam_at_its_first_step(hosts: TwoHosts, straight: Outcome) -> None:
    flags = ("--load straight --finetune", "--load straight --finetune --no-load-optim")
    lines = [printed(good(hosts.train("mindspeed-mm", 2, words))) for words in flags]
    assert lines[0] == lines[1] and len(lines[0]) == 2


def test_the_hosts_moving_average_is_not_its_weights(hosts: TwoHosts, straight: Outcome) -> None:
    weights, average = (read_weights(hosts.folder / "straight/iter_0000004", use_ema) for use_ema in (False, True))
    assert np.abs(weights["x_embedder.proj.weight"] - average["x_embedder.proj.weight"]).max() > 1e-4


def test_two_ranks_resume_what_one_rank_saved_in_the_other_host(hosts: TwoHosts, straight: Outcome) -> None:
    good(hosts.train("standalone", 2, "--save one --load one"))
    resumed = good(hosts.train("mindspeed-mm", 4, "--save one --load one", ranks=2))
    assert printed(resumed) == {step: line for step, line in printed(straight).items() if step > 2}


def test_bfloat16_by_fsdp2_yaml_is_the_same_in_both_hosts(tmp_path: Path, digits_folder: Path) -> None:
    hosts = TwoHosts(tmp_path / "bf16", digits_folder, param_dtype="bf16", reduce_dtype="fp32")
    lines = [printed(good(hosts.train(host, 3, "--bf16"))) for host in HOSTS]
    assert lines[0] == lines[1]


def test_a_model_built_without_memory_starts_from_the_same_numbers(hosts: TwoHosts, straight: Outcome) -> None:
    meta = good(hosts.train("mindspeed-mm", 3, "--init-model-with-meta-device"))
    assert printed(meta) == {step: line for step, line in printed(straight).items() if step <= 3}


def test_recomputation_changes_no_number_and_no_name(tmp_path: Path, digits_folder: Path, straight: Outcome) -> None:
    hosts = TwoHosts(tmp_path / "r", digits_folder, recompute_modules=["predictor.blocks.{*}"], use_reentrant=False)
    outcome = good(hosts.train("mindspeed-mm", 2, "--save saved"))
    assert printed(outcome) == {step: line for step, line in printed(straight).items() if step <= 2}
    assert not [name for name in read_weights(tmp_path / "r/saved/iter_0000002") if "checkpoint" in name]


def test_data_parallel_without_fsdp2_resumes_exactly(hosts: TwoHosts, straight: Outcome) -> None:
    flags = f"--mm-model model.json --mm-data data.json --mm-tool {tools_json()} {FLAGS} --save ddp --load ddp"
    script = str(Path(__file__).parents[2] / "pretrain_dit.py")
    good(run_python([script, *flags.split(), "--train-iters", "2"], hosts.folder))
    resumed = good(run_python([script, *flags.split(), "--train-iters", "4"], hosts.folder))
    assert printed(resumed) == {step: line for step, line in printed(straight).items() if step > 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_validates_on_the_same_batches_and_prints_the_same_quarters(
    hosts: TwoHosts, tmp_path: Path, ranks: int
) -> None:
    data = json.loads((hosts.folder / "data.json").read_text())
    data["dataset_param"]["valid_fraction"] = 0.1
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = f"--eval-interval 2 --eval-iters 2 --mm-data {tmp_path / 'data.json'}"
    runs = hosts.train("standalone", 4, flags), hosts.train("mindspeed-mm", 4, flags, ranks)
    ours, theirs = (parse_validation(good(outcome).output.splitlines()) for outcome in runs)
    assert len(ours) == 5 and ours.keys() == theirs.keys()
    for name, losses in ours.items():  # the host adds up in float32
        assert losses == pytest.approx(theirs[name], rel=2e-6) and list(losses) == [2, 4], name


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_of_several_shapes_are_trained_on_as_in_the_standalone_host(
    hosts: TwoHosts, tmp_path: Path, ranks: int
) -> None:
    flags = f"--mm-data {several_shapes(tmp_path)}"
    there, here = (good(hosts.train(host, 4, flags, ranks)) for host in ("mindspeed-mm", "standalone"))
    assert printed(there) == printed(here)


def test_another_architecture_is_refused_by_name(hosts: TwoHosts, straight: Outcome, tmp_path: Path) -> None:
    other = json.loads((hosts.folder / "model.json").read_text())
    other["predictor"]["num_layers"] = 3
    (tmp_path / "model.json").write_text(json.dumps(other))
    outcome = hosts.train("mindspeed-mm", 5, f"--load straight --mm-model {tmp_path / 'model.json'}")
    assert outcome.code == 2
    assert "CheckpointError" in outcome.output and "blocks.2.attn.qkv.weight" in outcome.output


def test_our_predictor_trains_in_the_unmodified_pretrain_sora(hosts: TwoHosts, straight: Outcome) -> None:
    assert printed(_train_in_sora(hosts)) == printed(straight)


def _train_in_sora(hosts: TwoHosts) -> Outcome:
    """Four steps in the host's own entry script, on features that carry our draws."""
    tool = "-m mindspeed_mm_dit.hosts.megatron.features --mm-model model.json --mm-data data.json --samples 32"
    good(run_python([*tool.split(), "--save-dir", "sora"], hosts.folder))
    return good(train_in_sora(hosts.folder, 4))


@pytest.fixture(scope="module")
def flow_hosts(tmp_path_factory: pytest.TempPathFactory, digits_folder: Path) -> TwoHosts:
    """Both hosts with a model.json of flow matching."""
    flow = {"model_id": "flow_matching", "timestep_sampling": "logit_normal", "shift": 2.0}
    return TwoHosts(tmp_path_factory.mktemp("flow"), digits_folder, diffusion=flow)


def test_flow_matching_is_the_same_in_both_hosts_and_in_pretrain_sora(flow_hosts: TwoHosts) -> None:
    straight = good(flow_hosts.train("standalone", 4))
    assert printed(good(flow_hosts.train("mindspeed-mm", 4))) == printed(straight)
    sora = _train_in_sora(flow_hosts)
    assert printed(sora) == printed(straight)


def test_features_with_some_of_the_draws_are_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import torch, torch_npu, mindspeed.megatron_adaptor\n"
        "from mindspeed_mm_dit.errors import DataError\n"
        "from mindspeed_mm_dit.wings.mindspeed_mm.megatron.sora import SoRADiffusion\n"
        "diffusion = SoRADiffusion(model_id='flow_matching')\n"
        "try:\n    diffusion.q_sample(torch.zeros(2, 1, 4, 4), {'drawn_timesteps': torch.ones(2)})\n"
        "except DataError as error:\n    print(error)\n"
    )
    assert "drawn_timesteps: lacks drawn_noise, drawn_coefficients" in good(run_python(["-c", code], tmp_path)).output


def test_registration_is_idempotent_and_refuses_a_foreign_entry(tmp_path: Path) -> None:
    code = (
        "import torch, torch_npu, mindspeed.megatron_adaptor\n"
        "from mindspeed_mm_dit.errors import ConfigError\n"
        "from mindspeed_mm_dit.wings.mindspeed_mm.megatron.register import OURS, register\n"
        "register(); register()\n"
        "assert all(entries.items() <= table.items() for _, table, entries in OURS)\n"
        "foreign = type('Foreign', (), {})\n"
        "OURS[0][1]['dit'] = foreign; OURS[1][1].pop('gaussian_diffusion')\n"
        "try:\n    register()\nexcept ConfigError as error:\n    print(error)\n"
        "assert OURS[0][1]['dit'] is foreign and 'gaussian_diffusion' not in OURS[1][1]\n"
    )
    outcome = good(run_python(["-c", code], tmp_path))
    assert "PREDICTOR_MODEL_MAPPINGS['dit']" in outcome.output and "Foreign" in outcome.output


def test_mm_dit_samples_what_the_host_trained(hosts: TwoHosts, straight: Outcome) -> None:
    flags = "sample --checkpoint straight --classes 0,1 --num-per-class 1 --sampler ddim --steps 2 --output a.npz"
    good(run_python(["-m", "mindspeed_mm_dit.cli.main", *flags.split()], hosts.folder, PYTHONPATH=str(ROOT)))
    with np.load(hosts.folder / "a.npz") as drawn:
        assert drawn["arr_0"].shape[0] == 2 and drawn["arr_0"].std() > 0


def test_a_report_is_drawn_of_what_the_host_trained(hosts: TwoHosts) -> None:
    flags = "--save report/ck --tensorboard-dir report/tb --report always --report-steps 2"
    outcome = good(hosts.train("mindspeed-mm", 1, flags))
    drawn = [(hosts.folder / "report" / name).is_file() for name in ("samples.png", "loss.png")]
    assert drawn == [True, True], outcome.output


def test_mm_convert_takes_weights_to_the_host_and_back(hosts: TwoHosts, straight: Outcome) -> None:
    code = "import sys, runpy, torch_npu; sys.argv[0] = 'mm-convert'; runpy.run_module('{}', run_name='__main__')"
    tool = ["-c", code.format("mindspeed_mm_dit.hosts.megatron.convert"), "DiTConverter"]
    saved = "straight/iter_0000004"
    for words in (
        f"mm_to_pt --source {saved} --target average.pt",
        "pt_to_mm --source average.pt --save_dir from_pt",
        f"mm_to_hf --source {saved} --save_dir diffusers",
        "hf_to_mm --source diffusers --save_dir from_hf",
    ):
        good(run_python([*tool, *words.split()], hosts.folder))
    expected = read_weights(hosts.folder / saved)
    for name in ("average.pt", "from_pt/release", "from_hf/release"):
        found = read_weights(hosts.folder / name)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], expected[key]) for key in expected)
    started = good(hosts.train("mindspeed-mm", 1, "--load from_pt"))
    assert "loading release checkpoint" in started.output
    shutil.rmtree(hosts.folder / "from_pt")


def test_a_broken_installation_is_an_error_with_its_cause(hosts: TwoHosts, tmp_path: Path) -> None:
    broken = tmp_path / "mindspeed"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "megatron_adaptor.py").write_text("raise RuntimeError('no CANN here')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    outcome = hosts.train("mindspeed-mm", 1, PYTHONPATH=path)
    assert outcome.code == 2
    assert "mindspeed.megatron_adaptor fails: RuntimeError: no CANN here" in outcome.output

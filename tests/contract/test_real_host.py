"""Whole runs in the unmodified MindSpeed-MM, compared with the standalone host."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.integrations.formats import lora_files
from mindspeed_mm_dit.integrations.formats.convert import convert
from mindspeed_mm_dit.integrations.formats.single_files import write_arrays
from mindspeed_mm_dit.tools.visualize.plot import parse_validation
from tests.conftest import GOLDEN, ROOT
from tests.contract import hosted
from tests.contract.hosted import FLAGS, TwoHosts, environment, good, run_python, tools_json
from tests.contract.native_hosted import NativeAndStandalone, needs_engine

pytestmark = [hosted.needs_trees, pytest.mark.ranks]

HOSTS = ("standalone", "mindspeed-mm")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, digits_folder):
    return TwoHosts(tmp_path_factory.mktemp("hosts"), digits_folder)


@pytest.fixture(scope="module")
def straight(hosts):
    return good(hosts.train("mindspeed-mm", 4, "--save straight"))


@pytest.fixture(scope="module")
def whole(hosts, straight):
    """Ranks -> the folder of an uninterrupted run on as many, and what it printed: sums differ in the last digit."""

    @cache
    def run(ranks):
        if ranks == 1:
            return "straight", straight
        return "straight_2", good(hosts.train("mindspeed-mm", 4, "--save straight_2", ranks))

    return run


def printed(outcome):
    """Learning rate, loss (7 digits) and gradient norm by iteration, as printed."""
    assert outcome.lines, outcome.output[-4000:]
    return outcome.lines


@pytest.mark.parametrize("ranks", [1, 2])
def test_both_hosts_print_the_same_losses(hosts, whole, ranks):
    _, there = whole(ranks)
    assert "host: MindSpeed-MM" in there.output
    # Everything random comes with the batch, so even the last printed digit agrees.
    assert printed(there) == printed(good(hosts.train("standalone", 4, ranks=ranks)))


@hosted.needs_device
def test_device_of_the_tests_prints_the_same_losses(hosts, straight):
    there = good(hosts.train("mindspeed-mm", 4, "--save apart", **hosted.on_a_device_apart(environment())))
    assert there.losses == pytest.approx(straight.losses, rel=2e-6) and straight.losses


@pytest.fixture(scope="module")
def two_steps(hosts):
    """(host, ranks) -> the folder of a run of two steps that was given an empty folder to load, and what it printed."""

    @cache
    def run(host, ranks):
        name = f"{host}_{ranks}"
        return name, good(hosts.train(host, 2, f"--save {name} --load {name}", ranks))

    return run


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"),
    [("mindspeed-mm", "mindspeed-mm"), ("mindspeed-mm", "standalone"), ("standalone", "mindspeed-mm")],
)
def test_resume_in_the_other_host_matches_uninterrupted_run(hosts, whole, two_steps, first, second, ranks):
    folder, uninterrupted = whole(ranks)
    name, started = two_steps(first, ranks)
    location = f"{name}_{second}"
    shutil.copytree(hosts.folder / name, hosts.folder / location)
    resumed = good(hosts.train(second, 4, f"--save {location} --load {location}", ranks))
    assert {**printed(started), **printed(resumed)} == printed(uninterrupted)
    for use_ema in (True, False):
        expected = read_weights(hosts.folder / folder / "iter_0000004", use_ema)
        found = read_weights(hosts.folder / f"{location}/iter_0000004", use_ema)
        assert found.keys() == expected.keys()
        for key, value in expected.items():  # AdamW's rounding differs between the two fused kernels
            np.testing.assert_allclose(found[key], value, atol=1e-6, err_msg=key)


@needs_engine
def test_native_engine_resumes_a_converted_run(hosts, digits_folder, straight, two_steps):
    name, _ = two_steps("mindspeed-mm", 1)
    command = f"-m mindspeed_mm_dit.cli.main convert {name} converted --to pytorch"
    assert "model, ema, optimizer" in good(run_python(command.split(), hosts.folder, PYTHONPATH=str(ROOT))).output
    native = NativeAndStandalone(hosts.folder, digits_folder)  # (the same configs)
    resumed = good(native.engine(native.yaml("native", 4, "--load converted --save native", fsdp2=False)))
    losses = {step: loss for step, loss in straight.losses.items() if step > 2}
    assert resumed.losses == pytest.approx(losses, abs=2e-6, rel=0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_load_of_an_empty_folder_starts_adam_at_step_1(whole, two_steps, ranks):
    uninterrupted = printed(whole(ranks)[1])
    _, fresh = two_steps("mindspeed-mm", ranks)
    assert printed(fresh) == {step: line for step, line in uninterrupted.items() if step <= 2}
    # Since 2025-12-06 MindSpeed's torch_dcp loader takes a step of its own; one line says that it is undone.
    steps_while_loading = "get_optimizer_state_dict" in hosted.dcp_loader_of_mindspeed()
    assert fresh.output.count("note: MindSpeed stepped AdamW while it loaded") == int(steps_while_loading)


def test_finetuning_starts_adam_at_step_1(hosts, straight):
    flags = ("--load straight --finetune", "--load straight --finetune --no-load-optim")
    lines = [printed(good(hosts.train("mindspeed-mm", 2, words))) for words in flags]
    assert lines[0] == lines[1] and len(lines[0]) == 2


def test_two_ranks_resume_one_rank_of_the_other_host(hosts, straight):
    good(hosts.train("standalone", 2, "--save one --load one"))
    resumed = good(hosts.train("mindspeed-mm", 4, "--save one --load one", ranks=2))
    assert printed(resumed) == {step: line for step, line in printed(straight).items() if step > 2}


def test_precision_recompute_and_meta_device_are_the_same(hosts, tmp_path, digits_folder, straight):
    low = TwoHosts(tmp_path / "bf16", digits_folder, param_dtype="bf16", reduce_dtype="fp32")
    lines = [printed(good(low.train(host, 3, "--bf16"))) for host in HOSTS]
    assert lines[0] == lines[1]
    meta = good(hosts.train("mindspeed-mm", 2, "--init-model-with-meta-device"))
    again = TwoHosts(tmp_path / "r", digits_folder, recompute_modules=["predictor.blocks.{*}"], use_reentrant=False)
    recomputed = good(again.train("mindspeed-mm", 2, "--save saved"))
    first = {step: line for step, line in printed(straight).items() if step <= 2}
    assert printed(meta) == printed(recomputed) == first
    assert not [name for name in read_weights(tmp_path / "r/saved/iter_0000002") if "checkpoint" in name]


def test_data_parallel_without_fsdp2_resumes_exactly(hosts, straight):
    flags = f"--mm-model model.json --mm-data data.json --mm-tool {tools_json()} {FLAGS} --save ddp --load ddp"
    script = str(ROOT / "pretrain_dit.py")
    good(run_python([script, *flags.split(), "--train-iters", "2"], hosts.folder))
    resumed = good(run_python([script, *flags.split(), "--train-iters", "4"], hosts.folder))
    assert printed(resumed) == {step: line for step, line in printed(straight).items() if step > 2}


@pytest.mark.parametrize("ranks", [1, 2])
def test_host_validates_with_the_same_losses(hosts, tmp_path, ranks):
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
def test_images_of_several_shapes_train_as_in_standalone(hosts, tmp_path, ranks):
    flags = f"--mm-data {hosted.several_shapes(tmp_path)}"
    there, here = (good(hosts.train(host, 4, flags, ranks)) for host in ("mindspeed-mm", "standalone"))
    assert printed(there) == printed(here)


def test_predictor_trains_in_the_unmodified_pretrain_sora(hosts, straight):
    assert printed(_train_in_sora(hosts)) == printed(straight)


def _train_in_sora(hosts):
    """Four steps in the host's own entry script, on features that carry our draws."""
    tool = "-m mindspeed_mm_dit.integrations.mindspeed_mm.megatron.features"
    tool += " --mm-model model.json --mm-data data.json --samples 32"
    good(run_python([*tool.split(), "--save-dir", "sora"], hosts.folder))
    return good(hosted.train_in_sora(hosts.folder, 4))


@pytest.fixture(scope="module")
def flow_hosts(tmp_path_factory, digits_folder):
    flow = {"model_id": "flow_matching", "timestep_sampling": "logit_normal", "shift": 2.0}
    return TwoHosts(tmp_path_factory.mktemp("flow"), digits_folder, diffusion=flow)


def test_flow_matching_is_the_same_in_both_hosts(flow_hosts):
    straight = good(flow_hosts.train("standalone", 4))
    assert printed(good(flow_hosts.train("mindspeed-mm", 4))) == printed(straight)
    sora = _train_in_sora(flow_hosts)
    assert printed(sora) == printed(straight)


def test_features_with_some_of_the_draws_are_refused(tmp_path):
    code = (
        "import torch, torch_npu, mindspeed.megatron_adaptor\n"
        "from mindspeed_mm_dit.errors import DataError\n"
        "from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register import SoRADiffusion\n"
        "diffusion = SoRADiffusion(model_id='flow_matching')\n"
        "try:\n    diffusion.q_sample(torch.zeros(2, 1, 4, 4), {'drawn_timesteps': torch.ones(2)})\n"
        "except DataError as error:\n    print(error)\n"
    )
    said = good(run_python(["-c", code], tmp_path)).output
    assert "drawn_timesteps and lacks drawn_noise, drawn_coefficients" in said


def test_registration_is_idempotent_and_refuses_other_entries(tmp_path):
    code = (
        "import torch, torch_npu, mindspeed.megatron_adaptor\n"
        "from mindspeed_mm_dit.errors import ConfigError\n"
        "from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.register import OURS, register\n"
        "register(); register()\n"
        "assert all(entries.items() <= table.items() for _, table, entries in OURS)\n"
        "foreign = type('Foreign', (), {})\n"
        "OURS[0][1]['dit'] = foreign; OURS[1][1].pop('gaussian_diffusion')\n"
        "try:\n    register()\nexcept ConfigError as error:\n    print(error)\n"
        "assert OURS[0][1]['dit'] is foreign and 'gaussian_diffusion' not in OURS[1][1]\n"
    )
    outcome = good(run_python(["-c", code], tmp_path))
    assert "PREDICTOR_MODEL_MAPPINGS['dit']" in outcome.output and "Foreign" in outcome.output


def test_mm_convert_takes_weights_to_the_host_and_back(hosts, straight):
    code = "import sys, runpy, torch_npu; sys.argv[0] = 'mm-convert'; runpy.run_module('{}', run_name='__main__')"
    tool = ["-c", code.format("mindspeed_mm_dit.integrations.mindspeed_mm.megatron.convert"), "DiTConverter"]
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


def test_broken_installation_is_refused_with_its_cause(hosts, tmp_path):
    broken = tmp_path / "mindspeed"
    broken.mkdir()
    (broken / "__init__.py").write_text("")
    (broken / "megatron_adaptor.py").write_text("raise RuntimeError('no CANN here')")
    path = f"{tmp_path}:{environment()['PYTHONPATH']}"
    outcome = hosts.train("mindspeed-mm", 1, PYTHONPATH=path)
    assert outcome.code == 2
    assert "mindspeed.megatron_adaptor fails with RuntimeError: no CANN here" in outcome.output


WAN, ADAPTERS = GOLDEN / "wan_tiny.pt", GOLDEN / "wan_lora_tiny/wan_lora"
WEIGHTS = "release/mp_rank_00/model_optim_rng.pt"
THEIR_NAMES = {"to_q": "proj_q", "to_k": "proj_k", "to_v": "proj_v", "to_out.0": "proj_out"}


def wan_converter(folder, command, source, target, *more):
    """Run ``mm-convert WanConverter``, and return what it writes."""
    words = ["--cfg.source_path", source, "--cfg.target_path", target, "--cfg.target_parallel_config.pp_layers", "[]"]
    good(run_python(["-m", "checkpoint.convert_cli", "WanConverter", command, *words, *more], folder))
    return torch.load(folder / target / WEIGHTS, weights_only=True)["model"]


def test_their_merge_lora_to_base_makes_what_ours_makes(tmp_path):
    """Their names of the layers are read here, and so is the alpha that their command is told."""
    base, ours = (tmp_path / folder / "diffusion_pytorch_model.safetensors" for folder in ("base", "merged"))
    for file in (base, ours):
        file.parent.mkdir()
    weights = torch.load(WAN, weights_only=True)["model"]
    write_arrays(base, {name: value.numpy() for name, value in weights.items()}, {})
    theirs: dict[str, np.ndarray] = {}
    for layer, adapter in lora_files.read(ADAPTERS).layers.items():
        name = layer.replace("attn1", "self_attn").replace("attn2", "cross_attn")
        for here, there in THEIR_NAMES.items():
            name = name.replace(here, there)
        theirs |= {f"{name}.lora_A.default.weight": adapter.down, f"{name}.lora_B.default.weight": adapter.up}
    write_arrays(tmp_path / "adapters.safetensors", theirs, {})
    location = tmp_path / "adapters" / WEIGHTS
    location.parent.mkdir(parents=True)
    torch.save({"model": {name: torch.from_numpy(np.array(value)) for name, value in theirs.items()}}, location)
    (tmp_path / "adapters/latest_checkpointed_iteration.txt").write_text("release")
    convert(base, ours, loras=[f"{tmp_path / 'adapters.safetensors'}:2"])
    wan_converter(tmp_path, "hf_to_mm", "base", "base_mm")
    scale = ("--cfg.lora_path", "adapters", "--lora_rank", "4", "--lora_alpha", "8", "--use_npu", "false")
    merged = wan_converter(tmp_path, "merge_lora_to_base", "base_mm", "merged_mm", *scale)
    expected = wan_converter(tmp_path, "hf_to_mm", "merged", "ours_mm")
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(merged[name], value, rtol=0, atol=1e-6, err_msg=name)

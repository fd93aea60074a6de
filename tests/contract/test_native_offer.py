"""What else the native engine's yaml offers, and fine-tuning there, with the losses of the standalone host."""

import json

import numpy as np
import pytest
import torch

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, CheckpointStore, read_facts
from mindspeed_mm_dit.integrations.formats import lora_files
from tests.contract.hosted import several_shapes
from tests.contract.native_hosted import NativeAndStandalone, needs_engine, run_python
from tests.contract.test_native_engine import CLOSE, good, validation_losses

pytestmark = [needs_engine, pytest.mark.ranks]

STEPS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_folder):
    return NativeAndStandalone(tmp_path_factory.mktemp("offer"), digits_folder)


@pytest.fixture(scope="module")
def plain(runs):
    return good(runs.train("standalone", STEPS, fsdp2=False))


@pytest.fixture(scope="module")
def muon(runs):
    return good(runs.train("standalone", STEPS, "--optimizer muon --save muon --save-interval 2", fsdp2=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_muon_steps_and_resumes_as_in_the_standalone_host(runs, muon, ranks):
    flags, name = "--optimizer muon", f"muon{ranks}"
    path = runs.yaml(name, STEPS, f"{flags} --save {name} --save-interval 2", ranks=ranks, fsdp2=ranks > 1)
    assert "optimizer: muon" in path.read_text()
    assert good(runs.engine(path, ranks)).losses == pytest.approx(muon.losses, **CLOSE)
    later = {step: muon.losses[step] for step in (3, 4)}
    back = runs.yaml("back", STEPS, f"{flags} --load {runs.copy('muon', 2)}", ranks=ranks, fsdp2=ranks > 1)
    assert good(runs.engine(back, ranks)).losses == pytest.approx(later, **CLOSE)
    here = good(runs.train("standalone", STEPS, f"{flags} --load {runs.copy(name, 2)}", fsdp2=False))
    assert here.losses == pytest.approx(later, **CLOSE)


def test_weights_are_saved_in_bf16_and_the_average_is_not(runs):
    good(runs.engine(runs.yaml("bf16", 2, "--save bf16", fsdp2=False, training__save_ckpt_dtype="bf16")))
    found = torch_dcp.read_tree(CheckpointStore(runs.folder / "bf16").path(2))
    types = {name.partition(".")[0]: value.dtype for name, value in found.items() if name.endswith("weight")}
    assert types == {"model": torch.bfloat16, "ema": torch.float32}
    again = good(runs.engine(runs.yaml("bf16_on", 3, "--load bf16 --save bf16", fsdp2=False)))
    assert list(again.losses) == [3]


def test_learning_rate_scaled_to_0_trains_as_if_frozen(runs):
    flags = "--clip-grad 0"
    here = good(runs.train("standalone", STEPS, f"{flags} --freeze blocks.{{0}}", fsdp2=False))
    plan = [{"match": r"blocks\.0\.", "scale": 0.0}]
    there = good(runs.engine(runs.yaml("scaled", STEPS, flags, ranks=2, training__lr_scaling_plan=plan), 2))
    assert there.losses == pytest.approx(here.losses, **CLOSE)


def test_validation_data_of_its_own_gives_the_same_losses(runs, digits_folder):
    data = json.loads((runs.folder / "data.json").read_text())
    data["dataset_param"] |= {"random_flip": not data["dataset_param"].get("random_flip", False)}
    (runs.folder / "valid.json").write_text(json.dumps(data))
    flags = "--eval-interval 2 --eval-iters 1 --mm-valid-data valid.json"
    here = good(runs.train("standalone", STEPS, flags, fsdp2=False))
    for ranks in (1, 2):
        there = good(runs.engine(runs.yaml(f"valid{ranks}", STEPS, flags, ranks=ranks, fsdp2=ranks > 1), ranks))
        assert there.losses == pytest.approx(here.losses, **CLOSE)
        assert validation_losses(there) == pytest.approx(validation_losses(here), **CLOSE)


def test_ranks_that_share_images_learn_what_one_learns(runs, plain):
    path = runs.yaml("shared", STEPS, "--context-parallel-size 2", ranks=2)
    assert "ulysses_parallel_size: 2" in path.read_text()
    assert good(runs.engine(path, 2)).losses == pytest.approx(plain.losses, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_images_of_several_shapes_train_and_resume(runs, ranks, tmp_path):
    flags = f"--mm-data {several_shapes(tmp_path)} --eval-interval 2 --eval-iters 1"
    here = good(runs.train("standalone", STEPS, flags, fsdp2=False))
    name = f"buckets{ranks}"
    path = runs.yaml(name, STEPS, f"{flags} --save {name} --save-interval 2", ranks=ranks, fsdp2=ranks > 1)
    there = good(runs.engine(path, ranks))
    assert there.losses == pytest.approx(here.losses, **CLOSE)
    assert validation_losses(there) == pytest.approx(validation_losses(here), **CLOSE)
    load = f"{flags} --load {runs.copy(name, 2)}"
    back = good(runs.engine(runs.yaml("back", STEPS, load, ranks=ranks, fsdp2=ranks > 1), ranks))
    assert back.losses == pytest.approx({step: here.losses[step] for step in (3, 4)}, **CLOSE)


def test_epochs_are_counted_in_samples_to_train_on(runs):
    flags = "--global-batch-size 512 --micro-batch-size 256"
    path = runs.yaml("epochs", 1, flags, fsdp2=False, training__train_epochs=1)
    assert list(good(runs.engine(path)).losses) == [1, 2, 3]  # 1797 digits, 512 a step, a smaller batch dropped


def test_weights_of_diffusers_are_read_and_written(runs, plain):
    first = {"training__save_format": "hf", "training__no_save_rng": True}
    good(runs.engine(runs.yaml("written", 2, "--save written --no-save-optim", fsdp2=False, **first)))
    assert (runs.folder / "written/hf/config.json").is_file()
    here = good(runs.train("standalone", 2, "--init-from written/hf", fsdp2=False))
    again = {"training__load_format": "hf", "training__no_load_rng": True}
    flags = "--load written/hf --no-load-optim"
    for name, keys in (("read", again), ("read_meta", again | {"training__init_model_with_meta_device": True})):
        there = good(runs.engine(runs.yaml(name, 2, flags, ranks=2, **keys), 2))
        assert there.losses == pytest.approx(here.losses, **CLOSE)


def test_converted_weights_begin_a_run(runs):
    good(runs.train("standalone", 2, "--save base", fsdp2=False))
    converter = ["-m", "mindspeed_mm_dit.integrations.mindspeed_mm.megatron.convert", "DiTConverter"]
    env = {"NON_MEGATRON": "true"}
    good(run_python([*converter, "hf_to_dcp", "--hf_dir", "base", "--dcp_dir", "made"], runs.folder, **env))
    here = good(runs.train("standalone", 2, "--init-from base", fsdp2=False))
    there = good(runs.engine(runs.yaml("begun", 2, "--load made", fsdp2=False)))
    assert there.losses == pytest.approx(here.losses, **CLOSE)
    words = ["dcp_to_hf", "--load_dir", "base/iter_0000002", "--save_dir", "hf"]
    good(run_python([*converter, *words], runs.folder, **env))
    assert (runs.folder / "hf/config.json").is_file()


LORA = "--init-from base --lora-target-modules attn.qkv blocks.{*}.mlp.fc1 --lora-r 4 --lora-alpha 8 --lr 1e-2"
FREEZE = "--freeze y_embedder blocks.{0}.attn"


@pytest.fixture(scope="module")
def tuning(tmp_path_factory, digits_folder):
    found = NativeAndStandalone(tmp_path_factory.mktemp("tuning"), digits_folder)
    good(found.train("standalone", 2, "--save base", fsdp2=False))
    return found


@pytest.fixture(scope="module")
def adapted(tuning):
    return good(tuning.train("standalone", STEPS, f"{LORA} --save here --save-interval 2", fsdp2=False))


@pytest.fixture(scope="module")
def frozen(tuning):
    return good(tuning.train("standalone", STEPS, FREEZE, fsdp2=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_modules_are_frozen_as_in_the_standalone_host(tuning, frozen, ranks):
    path = tuning.yaml(f"frozen{ranks}", STEPS, f"{FREEZE} --save frozen{ranks}", ranks=ranks, fsdp2=ranks > 1)
    assert "freeze:" in path.read_text()
    assert good(tuning.engine(path, ranks)).losses == pytest.approx(frozen.losses, **CLOSE)
    moments = torch_dcp.read_tree(CheckpointStore(tuning.folder / f"frozen{ranks}").path(STEPS), "optimizer.state")
    assert not [name for name in moments if name.startswith(("y_embedder", "blocks.0.attn"))] and moments


@pytest.mark.parametrize(("ranks", "keys"), [(1, {}), (2, {}), (2, {"training__init_model_with_meta_device": True})],
                         ids=["ddp", "sharded", "without memory"])  # fmt: skip
def test_adapters_learn_and_resume_as_in_the_standalone_host(tuning, adapted, ranks, keys):
    name = f"there{ranks}{len(keys)}"
    path = tuning.yaml(name, STEPS, f"{LORA} --save {name} --save-interval 2", ranks=ranks, fsdp2=ranks > 1, **keys)
    there = good(tuning.engine(path, ranks))
    assert there.losses == pytest.approx(adapted.losses, **CLOSE)
    ours, theirs = (CheckpointStore(tuning.folder / folder).path(STEPS) for folder in ("here", name))
    assert read_facts(theirs)[ADAPTERS] == read_facts(ours)[ADAPTERS]
    wanted, found = torch_dcp.read_tree(ours), torch_dcp.read_tree(theirs)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-4, err_msg=key)
    load = f"{LORA} --load {tuning.copy('here', 2)}"
    back = good(tuning.engine(tuning.yaml(f"{name}_back", STEPS, load, ranks=ranks, fsdp2=ranks > 1, **keys), ranks))
    later = {step: loss for step, loss in adapted.losses.items() if step > 2}
    assert back.losses == pytest.approx(later, **CLOSE)
    again = good(tuning.train("standalone", STEPS, f"{LORA} --load {tuning.copy(name, 2)}", fsdp2=False))
    assert again.losses == pytest.approx(later, **CLOSE)


def test_adapter_file_of_the_engine_is_read_with_its_alpha(tuning, adapted):
    good(tuning.engine(tuning.yaml("file", STEPS, f"{LORA} --save file", fsdp2=False)))
    found = lora_files.read(tuning.folder / f"file/lora_adapter_iteration_{STEPS}.safetensors")
    wanted = torch_dcp.read_tree(CheckpointStore(tuning.folder / "file").path(STEPS), "model")
    layer = found.layers["blocks.0.attn.qkv"]
    np.testing.assert_array_equal(layer.up, wanted["blocks.0.attn.qkv.lora_B.weight"])
    assert layer.alpha == 8 and layer.down.shape[0] == 4


def test_adapters_that_cannot_be_are_refused(tuning):
    mistakes = (
        ({"training__lora__dropout": 0.1}, "--lora-dropout = 0.1"),
        ({"training__lora__init_lora_weights": "gaussian"}, "training.lora.init_lora_weights = 'gaussian'"),
        ({"training__lora__target_modules": ["q_proj"]}, "--lora-target-modules = q_proj"),
        ({"training__lora__target_modules": ["blocks.{0-1}.attn.qkv"]}, "numbers in braces"),
        ({"model__init_from": None}, "--lora-target-modules"),
        ({"model__freeze": ["y_embedder"]}, "--freeze = y_embedder"),
    )
    yamls = [tuning.yaml(f"mistake{n}", 2, LORA, fsdp2=False, **keys) for n, (keys, _) in enumerate(mistakes)]
    said = tuning.complaints(yamls)
    assert [message for _, message in mistakes if message not in said] == [], said

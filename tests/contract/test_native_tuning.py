"""Fine-tuning in the unmodified native engine: freezing and adapters, with the losses of the standalone host."""

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint import torch_dcp
from mindspeed_mm_dit.checkpoint.store import ADAPTERS, CheckpointStore, read_facts
from mindspeed_mm_dit.integrations.formats import lora_files as lora_files
from tests.contract.native_hosted import NativeAndStandalone, needs_engine
from tests.contract.test_native_engine import CLOSE, good

pytestmark = [needs_engine, pytest.mark.ranks]

STEPS = 4
LORA = "--init-from base --lora-target-modules attn.qkv blocks.{*}.mlp.fc1 --lora-r 4 --lora-alpha 8 --lr 1e-2"
FREEZE = "--freeze y_embedder blocks.{0}.attn"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_folder):
    found = NativeAndStandalone(tmp_path_factory.mktemp("tuning"), digits_folder)
    good(found.train("standalone", 2, "--save base", fsdp2=False))
    return found


@pytest.fixture(scope="module")
def adapted(runs):
    return good(runs.train("standalone", STEPS, f"{LORA} --save here --save-interval 2", fsdp2=False))


@pytest.fixture(scope="module")
def frozen(runs):
    return good(runs.train("standalone", STEPS, FREEZE, fsdp2=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_modules_are_frozen_as_in_the_standalone_host(runs, frozen, ranks):
    path = runs.yaml(f"frozen{ranks}", STEPS, f"{FREEZE} --save frozen{ranks}", ranks=ranks, fsdp2=ranks > 1)
    assert "freeze:" in path.read_text()
    assert good(runs.engine(path, ranks)).losses == pytest.approx(frozen.losses, **CLOSE)
    moments = torch_dcp.read_tree(CheckpointStore(runs.folder / f"frozen{ranks}").path(STEPS), "optimizer.state")
    assert not [name for name in moments if name.startswith(("y_embedder", "blocks.0.attn"))] and moments


@pytest.mark.parametrize(("ranks", "keys"), [(1, {}), (2, {}), (2, {"training__init_model_with_meta_device": True})],
                         ids=["ddp", "sharded", "without memory"])  # fmt: skip
def test_adapters_learn_and_resume_as_in_the_standalone_host(runs, adapted, ranks, keys):
    name = f"there{ranks}{len(keys)}"
    path = runs.yaml(name, STEPS, f"{LORA} --save {name} --save-interval 2", ranks=ranks, fsdp2=ranks > 1, **keys)
    there = good(runs.engine(path, ranks))
    assert there.losses == pytest.approx(adapted.losses, **CLOSE)
    ours, theirs = (CheckpointStore(runs.folder / folder).path(STEPS) for folder in ("here", name))
    assert read_facts(theirs)[ADAPTERS] == read_facts(ours)[ADAPTERS]
    wanted, found = torch_dcp.read_tree(ours), torch_dcp.read_tree(theirs)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-4, err_msg=key)
    load = f"{LORA} --load {runs.copy('here', 2)}"
    back = good(runs.engine(runs.yaml(f"{name}_back", STEPS, load, ranks=ranks, fsdp2=ranks > 1, **keys), ranks))
    later = {step: loss for step, loss in adapted.losses.items() if step > 2}
    assert back.losses == pytest.approx(later, **CLOSE)
    assert good(
        runs.train("standalone", STEPS, f"{LORA} --load {runs.copy(name, 2)}", fsdp2=False)
    ).losses == pytest.approx(later, **CLOSE)


def test_adapter_file_of_the_engine_is_read_with_its_alpha(runs, adapted):
    good(runs.engine(runs.yaml("file", STEPS, f"{LORA} --save file", fsdp2=False)))
    found = lora_files.read(runs.folder / f"file/lora_adapter_iteration_{STEPS}.safetensors")
    wanted = torch_dcp.read_tree(CheckpointStore(runs.folder / "file").path(STEPS), "model")
    layer = found.layers["blocks.0.attn.qkv"]
    np.testing.assert_array_equal(layer.up, wanted["blocks.0.attn.qkv.lora_B.weight"])
    assert layer.alpha == 8 and layer.down.shape[0] == 4


def test_adapters_that_cannot_be_are_refused(runs):
    mistakes = (
        ({"training__lora__dropout": 0.1}, "--lora-dropout = 0.1"),
        ({"training__lora__init_lora_weights": "gaussian"}, "training.lora.init_lora_weights = 'gaussian'"),
        ({"training__lora__target_modules": ["q_proj"]}, "--lora-target-modules = q_proj"),
        ({"training__lora__target_modules": ["blocks.{0-1}.attn.qkv"]}, "numbers in braces"),
        ({"model__init_from": None}, "--lora-target-modules"),
        ({"model__freeze": ["y_embedder"]}, "--freeze = y_embedder"),
    )
    said = runs.complaints(
        [runs.yaml(f"mistake{n}", 2, LORA, fsdp2=False, **keys) for n, (keys, _) in enumerate(mistakes)]
    )
    assert [message for _, message in mistakes if message not in said] == [], said

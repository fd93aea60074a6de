"""Whole runs in the unmodified native engine, compared with the standalone host."""

import json
import re

import numpy as np
import pytest

from mindspeed_mm_dit.checkpoint.formats import read_weights
from mindspeed_mm_dit.checkpoint.lock import FolderLock
from mindspeed_mm_dit.checkpoint.store import TRACKER
from mindspeed_mm_dit.integrations.mindspeed_mm.native.host import COMMAND
from tests.contract.hosted import good, needs_device, on_a_device_apart
from tests.contract.native_hosted import NativeAndStandalone, environment, needs_engine, run_python
from tests.data import test_cache_of_images
from tests.data.test_cache_of_images import cache, data_json, model_json

pytestmark = [needs_engine, pytest.mark.ranks]

STEPS = 20
CLOSE = {"abs": 2e-6, "rel": 0}  # float32 sums in another order; everything random comes with the batch


@pytest.fixture(scope="module")
def runs(tmp_path_factory, digits_folder):
    return NativeAndStandalone(tmp_path_factory.mktemp("native"), digits_folder)


@pytest.fixture(scope="module")
def standalone(runs):
    return good(runs.train("standalone", STEPS, "--save standalone --save-interval 10", fsdp2=False))


def check_same(there, here, steps=None):
    steps = steps or range(1, STEPS + 1)
    assert list(there.losses) == list(steps), there.output[-4000:]
    assert there.losses == pytest.approx({step: here.losses[step] for step in steps}, **CLOSE)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trainer_of_the_engine_prints_the_losses_of_standalone(runs, standalone, ranks):
    path = runs.yaml(f"ranks{ranks}", STEPS, ranks=ranks, fsdp2=ranks > 1)
    there = good(runs.engine(path, ranks))
    assert ("DDP mode is enabled" in there.output) == (ranks == 1)
    check_same(there, standalone)


@needs_device
def test_device_of_the_tests_prints_the_losses_of_standalone(runs, standalone):
    path = runs.yaml("apart2", STEPS, ranks=2)
    check_same(good(runs.engine(path, 2, **on_a_device_apart(environment()))), standalone)


# --- checkpoints ---------------------------------------------------------------------------------------------------

HALF, LATER = 10, range(11, 14)
"""The step that is saved, and those that a resumed run takes."""


@pytest.fixture(scope="module")
def halfway(runs):
    """What the engine saved on two ranks."""
    good(runs.engine(runs.yaml("halfway", HALF, "--save halfway", ranks=2), 2))
    return runs.folder / "halfway"


@pytest.fixture(scope="module")
def averages(runs, standalone):
    """The moving average of a standalone run that goes on from its own checkpoint."""
    good(runs.train("standalone", LATER[-1], f"--load {runs.copy('standalone', HALF)} --save going_on", fsdp2=False))
    return read_weights(runs.folder / f"going_on/iter_{LATER[-1]:07d}")


def check_averages(found, averages):
    for name, value in read_weights(found / f"iter_{LATER[-1]:07d}").items():
        # AdamW divides gradients by their size: where that is small, rounding turns up in the weights.
        np.testing.assert_allclose(value, averages[name], rtol=0, atol=1e-4, err_msg=name)


def test_resume_on_other_ranks_matches_uninterrupted_run(runs, standalone, halfway, averages):
    path = runs.yaml("alone", LATER[-1], "--load halfway --save alone", fsdp2=False)
    there = good(runs.engine(path))
    assert "resumed from halfway/iter_0000010: iteration 10, 80 samples consumed" in there.output
    check_same(there, standalone, LATER)
    check_averages(runs.folder / "alone", averages)


def test_standalone_host_resumes_the_engine(runs, standalone, halfway, averages):
    check_same(good(runs.train("standalone", LATER[-1], "--load halfway --save back", fsdp2=False)), standalone, LATER)
    check_averages(runs.folder / "back", averages)


def test_engine_resumes_the_standalone_host(runs, standalone, averages):
    load = runs.copy("standalone", HALF)
    path = runs.yaml("taken_over", LATER[-1], f"--load {load} --save taken_over", ranks=2)
    check_same(good(runs.engine(path, 2)), standalone, LATER)
    check_averages(runs.folder / "taken_over", averages)


def test_sample_and_convert_read_checkpoints_of_the_engine(runs, halfway):
    drawn = "--checkpoint halfway --classes 0,1 --num-per-class 1 --sampler ddim --steps 2 --weights"
    mm_dit = ["-m", "mindspeed_mm_dit.cli.main"]
    for which in ("ema", "model"):
        good(run_python([*mm_dit, "sample", *drawn.split(), which, "--output", f"{which}.npz"], runs.folder))
    with np.load(runs.folder / "ema.npz") as average, np.load(runs.folder / "model.npz") as weights:
        assert average["arr_0"].shape == weights["arr_0"].shape and average["arr_0"].shape[0] == 2
        assert not np.array_equal(average["arr_0"], weights["arr_0"])
    done = good(run_python([*mm_dit, "convert", "halfway", "converted", "--to", "pytorch"], runs.folder))
    assert "model, ema, optimizer" in done.output
    theirs, ours = halfway / f"iter_{HALF:07d}", runs.folder / f"converted/iter_{HALF:07d}"
    for read in (lambda path: read_weights(path, True), lambda path: read_weights(path, False), moments):
        found, expected = read(ours), read(theirs)
        assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)


def moments(path):
    from mindspeed_mm_dit.checkpoint import torch_dcp

    found = {name: torch_dcp.as_array(x) for name, x in torch_dcp.read_tree(path, "optimizer").items()}
    assert any(name.endswith("blocks.0.attn.qkv.weight.exp_avg_sq") and x.any() for name, x in found.items())
    return found


KILLED = """
import os, signal
from torch.distributed.checkpoint import FileSystemWriter
finish, saves = FileSystemWriter.finish, []
def killed(self, *args, **kwargs):
    saves.append(self)
    if len(saves) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self, *args, **kwargs)
FileSystemWriter.finish = killed
"""
"""kill -9 in the second save, once the tensors are written and before the index is."""

TERMINATED = """
import os, signal
from mindspeed_mm_dit.training.progress import Progress
advance = Progress.advance
def advanced(self):
    advance(self)
    if self.iteration == 3 and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGTERM)
Progress.advance = advanced
"""
"""One rank is asked to stop in its third step."""

FULL = """
import errno
from torch.distributed.checkpoint import FileSystemWriter
write, saves = FileSystemWriter.write_data, []
def full(self, *args, **kwargs):
    saves.append(self)
    if len(saves) == 1:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(self, *args, **kwargs)
FileSystemWriter.write_data = full
"""
"""No room for the first save."""


@pytest.mark.parametrize("is_async", [False, True])
def test_kill_during_a_save_loses_that_save_alone(runs, standalone, is_async):
    name = f"killed{is_async}"
    flags = f"--save {name} --save-interval 2 {'' if is_async else '--no-async-save'}"
    outcome = runs.engine(runs.yaml(name, 4, flags, fsdp2=False), script=KILLED)
    assert outcome.code != 0 and list(outcome.losses) == [1, 2, 3, 4], outcome.output[-4000:]
    left = sorted(path.name for path in (runs.folder / name).glob("*iter_*"))
    assert left == [".iter_0000004.partial", "iter_0000002"]
    path = runs.yaml("after", 4, f"{flags} --load {name}", fsdp2=False)
    resumed = good(runs.engine(path))
    assert f"resumed from {name}/iter_0000002" in resumed.output
    check_same(resumed, standalone, range(3, 5))
    done = runs.folder / name / "iter_0000004/.metadata"
    written = done.stat().st_mtime_ns
    assert not good(runs.engine(path)).losses and done.stat().st_mtime_ns == written
    (runs.folder / name / "iter_0000004/__0_0.distcp").write_bytes(b"damaged")
    again = good(runs.engine(path))
    assert "iter_0000004 is damaged (__0_0.distcp is cut short); falling back to the one before" in again.output
    check_same(again, standalone, range(3, 5))


def test_folder_of_another_run_is_refused(runs):
    owner = FolderLock(runs.folder / "owned")
    owner.take()
    outcome = runs.engine(runs.yaml("owned", 2, "--save owned", fsdp2=False))
    owner.release()
    assert outcome.code != 0 and "--save = owned belongs to" in outcome.output and not outcome.losses


def test_run_that_is_asked_to_stop_saves_first(runs, standalone):
    flags = "--save stopped --load stopped"
    outcome = runs.engine(runs.yaml("stopped", 8, flags, ranks=2), 2, script=TERMINATED)
    assert "asked to stop by SIGTERM at iteration 3: saving it" in outcome.output and outcome.code != 0
    resumed = good(runs.engine(runs.yaml("stopped", 5, flags, ranks=2), 2))
    check_same(resumed, standalone, range(4, 6))


def test_full_disk_loses_that_save_alone(runs):
    flags = "--save full --save-interval 2"
    outcome = runs.engine(runs.yaml("full", 4, flags, fsdp2=False), script=FULL)
    assert "warning: CheckpointError: The last checkpoint of --save could not be written: " in outcome.output
    assert outcome.code == 0 and list(outcome.losses) == [1, 2, 3, 4], outcome.output[-4000:]
    assert [path.name for path in (runs.folder / "full").glob("*iter_*")] == ["iter_0000004"]


MISTAKES = (
    ({"parallel__fsdp_plan__apply_modules": ["blocs.{*}"]}, "blocs.{*}"),
    ({"parallel__fsdp_plan__param_dtype": "bf16"}, "of this type"),
    ({"parallel__fully_shard_parallel_size": 3}, "fully_shard_parallel_size = 3"),
    ({"data__dataset_param__mm_data": None}, "data.dataset_param.mm_data"),
    ({"data": None}, "data = null"),
    ({"data__dataloader_param": {"collate_param": {"collator_id": "mindspeed_mm_dit"}}}, "_mode"),
    ({"data__dataloader_param__collate_param__collator_id": "other"}, "collator_id = 'other'"),
    ({"training__plugin": ["other"]}, "training.plugin = ['other']"),
    ({"training__optimizer": "adamw_swap"}, "training.optimizer = 'adamw_swap'"),
    ({"training__load_format": "hf"}, "training.load_format = hf"),
    ({"parallel__fsdp_plan__reduce_dtype": "float32"}, "reduce_dtype = 'float32'"),
    ({"parallel__recompute": True}, "parallel.recompute = true"),
    ({"model__freeze": ["blok.{*}"]}, "--freeze = blok.{*}"),
    ({"features__enable_chunk_loss": True}, "features.enable_chunk_loss = true"),
    ({"training__max_steps": 3}, "training.max_steps = 3"),
    ({"features__enable_chunk_mbs": True}, "features.enable_chunk_mbs = true"),
    ({"training__save": None}, "training.save = null"),
    ({"training__lr": "fast"}, "training.lr = 'fast'"),
    ({"training__load": "model.json"}, "--load = model.json"),
)
"""What stands in the yaml instead, "__" for the dots, and what is said of it. In one process the engine keeps values of
the keys that it does not declare, so these come last."""


def test_values_of_the_yaml_are_refused_by_name(runs):
    said = runs.complaints([runs.yaml(f"mistake{n}", 2, fsdp2=False, **keys) for n, (keys, _) in enumerate(MISTAKES)])
    assert [message for _, message in MISTAKES if message not in said] == [], said
    assert "no complaint" not in said and said.count("Error: ") == len(MISTAKES)


def test_engine_resumes_the_old_route(runs, standalone):
    write_as_the_old_route(runs)
    path = runs.yaml("from_old", LATER[-1], "--load old_route --save from_old", fsdp2=False)
    check_same(good(runs.engine(path)), standalone, LATER)
    path = runs.yaml("anew", 2, fsdp2=False, training__load="nowhere")
    adapted_starter = good(runs.engine(path))
    assert "no checkpoint in nowhere: starting anew" in adapted_starter.output
    check_same(adapted_starter, standalone, range(1, 3))


def write_as_the_old_route(runs):
    """Give the averages and moments of a checkpoint the names that they have in the old route."""
    from mindspeed_mm_dit.checkpoint import torch_dcp

    name = f"iter_{HALF:07d}"
    saved = runs.folder / "standalone" / name
    trees = {tree: torch_dcp.read_tree(saved, tree) for tree in ("model", "ema", "optimizer")}
    by_parameter: dict[str, dict[str, object]] = {}
    for key, tensor in trees["optimizer"].items():
        parameter, _, kind = key.removeprefix("state.").rpartition(".")
        by_parameter.setdefault(f"predictor.{parameter}", {})[kind] = tensor
    (runs.folder / "old_route").mkdir()
    model = trees["model"] | {f"ema.{key}": tensor for key, tensor in trees["ema"].items()}
    torch_dcp.write({"model": model, "optimizer": {"state": by_parameter}}, runs.folder / "old_route" / name)
    (runs.folder / "old_route" / TRACKER).write_text(str(HALF))


def test_checking_command_trains_and_refuses(runs):
    there = good(runs.checked_engine(runs.yaml("checked", 1, fsdp2=False, data__dataset_param__num_workers=1)))
    assert list(there.losses) == [1] and "Exception ignored" not in there.output
    refused = runs.checked_engine(runs.yaml("refused", 1, fsdp2=False, training__lr_warmup_ration=0.1))
    assert refused.code != 0 and "training.lr_warmup_ration = 0.1" in refused.output
    said = refused.output.partition("lr_warmup_ration")[0]
    assert "Building custom model" not in refused.output and "Traceback" not in said
    refused = run_python(["-m", COMMAND, "checked.yaml", "training.lr=1e-4"], runs.folder)
    assert "command line" in refused.output


def test_one_flag_trains_and_validates_as_the_standalone_host(tmp_path, digits_folder):
    runs = NativeAndStandalone(tmp_path, digits_folder)
    data = json.loads((tmp_path / "data.json").read_text())
    data["dataset_param"]["valid_fraction"] = 0.1
    (tmp_path / "data.json").write_text(json.dumps(data))
    flags = "--bf16 --eval-interval 2 --eval-iters 1"
    drawn = "--save run/ck --load run/ck --tensorboard-dir run/tb --report always --report-steps 2"
    there = good(runs.train("mindspeed-mm-native", 4, f"{flags} {drawn}", fsdp2=False))
    here = good(runs.train("standalone", 4, flags, fsdp2=False))
    assert there.losses == pytest.approx(here.losses, **CLOSE)
    assert validation_losses(there) == pytest.approx(validation_losses(here), **CLOSE)
    assert (tmp_path / "run/loss.png").is_file() and (tmp_path / "run/samples.png").is_file()


def validation_losses(outcome):
    found = [float(x) for x in re.findall(r"(?:validation loss:|loss value:) (\S+) \|", outcome.output)]
    assert len(found) == 2, outcome.output[-4000:]
    return found


def test_precision_recompute_and_meta_device_change_no_number(tmp_path, digits_folder):
    sharding = {"param_dtype": "bf16", "reduce_dtype": "fp32", "cast_forward_inputs": False}
    runs = NativeAndStandalone(tmp_path, digits_folder, **sharding, recompute_modules=["predictor.blocks.{*}"])
    path = runs.yaml("bf16", 4, "--bf16")
    assert "init_model_with_meta_device: true" in path.read_text() and "recompute: true" in path.read_text()
    assert good(runs.engine(path)).losses == pytest.approx(good(runs.train("standalone", 4, "--bf16")).losses, **CLOSE)


home = test_cache_of_images.home  # a fixture: a tiny VAE and eleven images


def test_autoencoder_and_cached_latents_give_the_same_losses(tmp_path, home):
    runs = NativeAndStandalone(tmp_path, home / "images")
    flow = {"model_id": "flow_matching", "timestep_sampling": "logit_normal", "shift": 2.0}
    (tmp_path / "model.json").write_text(json.dumps(model_json(home, "vae") | {"diffusion": flow}))
    (tmp_path / "data.json").write_text(json.dumps(data_json(home)))
    here = good(runs.train("standalone", 3, fsdp2=False))
    online = good(runs.engine(runs.yaml("online", 3, fsdp2=False)))
    assert cache(tmp_path, tmp_path / "latents") == 0
    (tmp_path / "data.json").write_text(json.dumps(data_json(home, latents=str(tmp_path / "latents"))))
    cached = good(runs.engine(runs.yaml("cached", 3, fsdp2=False)))
    check_same(online, here, range(1, 4))
    check_same(cached, here, range(1, 4))


def test_id_of_another_plugin_is_refused(runs):
    script = "from mindspeed_mm.fsdp.utils.register import model_register as r; r.register('mindspeed_mm_dit')(dict)"
    outcome = runs.engine(runs.yaml("taken", 2, fsdp2=False), script=script)
    assert outcome.code != 0 and "model.model_id = mindspeed_mm_dit is taken by builtins.dict" in outcome.output

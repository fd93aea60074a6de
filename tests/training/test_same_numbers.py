"""Whatever is learned: ranks, shards, micro-batches, caches, a resume and the framework change no number of a run."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mindspeed_mm_dit.checkpoint.formats import PYTORCH
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.data.video_file import read_frames, write_video
from mindspeed_mm_dit.integrations.formats.convert import convert
from tests import buckets_fixtures
from tests.buckets_fixtures import write_clip_configs, write_configs, write_pictures
from tests.captions_fixtures import captioned_configs
from tests.clips_fixtures import begun_configs, clip_configs, write_begun_clips, write_clips
from tests.data.test_sharded import write_tar
from tests.mindspore import launch as mindspore
from tests.models.test_joint_texts import configs_of
from tests.training.launch import Configs, Outcome
from tests.training.test_flow_run import FLOW, flow_configs
from tests.training.test_lora_run import LORA
from tests.training.test_repa_run import repa_configs

pytestmark = pytest.mark.ranks

SAME = 2e-6
"""Float32 sums in another order; plain DiT drifts by 3e-7 in 20 steps."""
SAME_ON_MINDSPORE = 2e-5
"""Gradients of two frameworks differ by the rounding of float32, and so do losses after a step."""
WRAPPED = "sub_modules_to_wrap:\n  - predictor.blocks.{*}\n"


@dataclasses.dataclass(frozen=True)
class Way:
    """How the samples of a step are divided."""

    ranks: int = 1
    fsdp2: str = ""
    shared: int = 1

    def flags(self, folder: Path, micro_batch: int) -> str:
        """Return the flags of a run that goes this way."""
        flags = f"--micro-batch-size {micro_batch} --context-parallel-size {self.shared} "
        if self.fsdp2:
            (folder / "fsdp2.yaml").write_text(WRAPPED + self.fsdp2)
            flags += f"--use-torch-fsdp2 --fsdp2-config-path {folder}/fsdp2.yaml "
        return flags


WAYS = {
    "micro-batches": Way(),
    "replicated": Way(2),
    "sharded": Way(2, "sharding_size: auto\n"),
    "shared": Way(2, shared=2),
    "hybrid": Way(4, "sharding_size: 2\n", shared=2),
    "four": Way(4),
    "recomputed": Way(2, "sharding_size: auto\nrecompute_modules: ['predictor.blocks.{0-1}']\nuse_reentrant: false\n"),
    "ignoring": Way(4, "sharding_size: auto\nignored_modules: [predictor.t_embedder]\n"),
    "offloaded": Way(2, "sharding_size: null\nnum_to_forward_prefetch: 1\nnum_to_backward_prefetch: 1\n"
                                    "offload_to_cpu: true\n"),
}  # fmt: skip
RANKS = ("micro-batches", "replicated", "sharded")
EVERYWHERE = (*RANKS, "shared", "hybrid", "four")
"""Ways that every network can go."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a run learns: its files, the samples of a step, and the ways that it goes without --campaign.

    `make test` goes the first ``quick`` of the ways: a covering array in which every kind of run meets one division,
    and every division meets kinds of its own. `make test-all` goes all of them.
    """

    make: Callable[[Path, Path], Configs]
    batch: int
    micro_batch: int
    ways: tuple[str, ...] = RANKS
    flags: str = ""
    elsewhere: Callable[[Configs, Path], Configs] | None = None
    """Writes configs of the same samples, read from elsewhere."""
    on_mindspore: bool = False
    needs: tuple[str, ...] = ()
    quick: int = 1

    def marks(self, way: str) -> list[pytest.MarkDecorator]:
        """Return which suite goes this way: `make test`, `make test-all` or a campaign."""
        if way in self.ways[: self.quick]:
            return []
        return [pytest.mark.extended if way in self.ways else pytest.mark.campaign]


def in_cache(configs: Configs, place: Path, key: str = "latents") -> Configs:
    """Write the cache of a run, and configs that name it and nothing else of the data."""
    files = ("--model", str(configs.folder / "model.json"), "--data", str(configs.folder / "data.json"))
    assert main(["cache-latents", *files, "--output", str(place / "cache"), "--shard-images", "100"]) == 0
    nowhere = {"json_path": "nowhere/annotation.json"} if key == "features" else {}
    param = {"data_folder": "nowhere", key: str(place / "cache"), **nowhere}
    return configs.copy(place).change("data.json", dataset_param=param)


def in_tars(configs: Configs, place: Path) -> Configs:
    """Write the images of a run to tar files, in the order of their index, and configs that name these."""
    data = json.loads((configs.folder / "data.json").read_text())
    param = data["dataset_param"]
    folder = Path(param["data_folder"])
    rows = [line.split(",") for line in (folder / param.pop("index")).read_text().splitlines()[1:]]
    samples = [(f"{n:04}", {".cls": label.encode(), ".png": (folder / name).read_bytes()})
               for n, (name, label) in enumerate(rows)]  # fmt: skip
    for shard in range(0, len(rows), 150):
        write_tar(place / f"digits/train-{shard:05}.tar", samples[shard : shard + 150])
    param = param | {"data_folder": str(place / "digits"), "dataset_type": "webdataset"}
    (place / "data.json").write_text(json.dumps(data | {"dataset_param": param}))
    shutil.copyfile(configs.folder / "model.json", place / "model.json")
    return Configs(place)


def small(folder: Path, digits: Path) -> Configs:
    return Configs.create(folder, digits, hidden_size=32, num_layers=2, num_heads=2)


def beside_a_base(folder: Path, digits: Path) -> Configs:
    """Write configs, and the weights that adapters are trained beside."""
    configs = small(folder, digits)
    assert configs.run(f"--train-iters 2 --global-batch-size 16 --lr 1e-2 --save {folder}/base").code == 0
    return configs


def pictures(folder: Path, digits: Path) -> Configs:
    """Write pictures of three shapes, and configs that learn them in buckets."""
    return Configs(write_configs(folder, write_pictures(folder / "pictures"), valid_fraction=0.2))


def stills_and_videos(folder: Path, digits: Path) -> Configs:
    """Write stills, and clips of two lengths, and configs that learn them in buckets."""
    clips = buckets_fixtures.write_clips(folder / "clips")
    return Configs(write_clip_configs(folder, clips, valid_fraction=0.15, bucket_group=2))


def by_joint_attention(family: str, folder: Path, digits: Path) -> Configs:
    """Write images with captions of an odd length, and configs of a ``family`` of image transformers."""
    configs_of(folder, family, text={"max_length": 39 if family == "flux2" else 11})
    return Configs(folder).hold_out(0.3)


def mixed(folder: Path, digits: Path) -> Configs:
    """Write pictures and clips of several shapes, and configs that learn three clips for each picture."""
    pictures_folder = write_pictures(folder / "pictures")
    for label, name in enumerate(("bright", "dark")):
        (pictures_folder / name).rename(pictures_folder / str(label))
    configs = Configs(write_clip_configs(folder, buckets_fixtures.write_clips(folder / "clips")))
    clips = json.loads((folder / "data.json").read_text())["dataset_param"] | {"bucket_group": 4}
    images = {"data_folder": str(pictures_folder), "buckets": [[8, 8], [8, 12]], "bucket_group": 4}
    param = {"sources": [clips, images], "weights": [3, 1], "valid_fraction": 0.1}
    (folder / "data.json").write_text(json.dumps({"dataset_param": param}))
    return configs


def with_stills(clips: Path) -> Path:
    """Add images to the annotation of ``clips``: the first frames of some, and let others be wide."""
    entries = json.loads((clips / "annotation.json").read_text())
    for number, entry in enumerate(entries[:8]):
        frame = read_frames(clips / entry["path"], np.array([0]))[0]
        Image.fromarray(frame).save(clips / f"{number}.png")
        entries.append({"path": f"{number}.png", "cap": entry["cap"]})
    for entry in entries[8:14]:
        pixels = read_frames(clips / entry["path"], np.arange(entry["num_frames"]))
        write_video(clips / entry["path"], pixels[:, :32], entry["fps"])
        del entry["resolution"]
    (clips / "annotation.json").write_text(json.dumps(entries))
    return clips


LEARNED = {
    "noise": Learned(
        lambda folder, digits: Configs.create(folder, digits, num_layers=3).hold_out(0.2), 64, 8,
        ("replicated", "ignoring", "offloaded", "micro-batches", "sharded", "hybrid"), elsewhere=in_tars, quick=3,
    ),
    "flow": Learned(
        lambda folder, digits: flow_configs(folder, digits, **FLOW).hold_out(0.2), 32, 4,
        ("micro-batches", "hybrid", "replicated", "sharded"), on_mindspore=True, quick=2,
    ),
    "mean flow": Learned(
        lambda folder, digits: flow_configs(folder, digits, model_id="mean_flow").change(
            "model.json", predictor={"h_embedder": True}), 16, 4, ("sharded",),
    ),
    "buckets": Learned(pictures, 16, 2, ("sharded", "micro-batches", "replicated", "hybrid")),
    "buckets by token": Learned(pictures, 16, 2, ("replicated",), "--loss-by token "),
    "stills and videos": Learned(stills_and_videos, 8, 1, ("four", "replicated", "shared"), needs=("av",)),
    "images among videos": Learned(mixed, 4, 1, ("replicated",), needs=("av",)),
    "clips": Learned(
        lambda folder, _: clip_configs(folder, write_clips(folder), valid_fraction=0.2), 8, 2,
        ("shared", "replicated", "sharded", "hybrid"),
        elsewhere=functools.partial(in_cache, key="features"), on_mindspore=True, needs=("av", "transformers"),
    ),
    "captions": Learned(
        lambda folder, _: captioned_configs(folder), 4, 1, ("sharded", "replicated"), elsewhere=in_cache,
        on_mindspore=True, needs=("transformers",),
    ),
    "teachers": Learned(repa_configs, 8, 2, elsewhere=in_cache, on_mindspore=True, needs=("transformers",)),
    "Wan": Learned(
        lambda folder, _: clip_configs(folder, write_clips(folder), "wan"), 8, 2, ("sharded", "shared"),
        needs=("av", "transformers"),
    ),
    "clips begun with an image": Learned(
        lambda folder, _: begun_configs(folder, write_begun_clips(folder), "features of CLIP, last frame"), 4, 1,
        ("sharded", "shared"), elsewhere=functools.partial(in_cache, key="features"), on_mindspore=True,
        needs=("av", "transformers"),
    ),
    "stills among clips begun with an image": Learned(
        lambda folder, _: begun_configs(
            folder, with_stills(write_clips(folder)), "features of CLIP", num_frames=None, max_height=None,
            max_width=None, buckets=[[9, 32, 32], [9, 32, 48], [1, 32, 32]], bucket_group=4), 8, 2, ("shared",),
        elsewhere=functools.partial(in_cache, key="features"), needs=("av", "transformers"),
    ),
    "clips begun at time zero": Learned(
        lambda folder, _: begun_configs(folder, write_begun_clips(folder), "times by token"), 4, 1, ("shared",),
        elsewhere=functools.partial(in_cache, key="features"), on_mindspore=True, needs=("av", "transformers"),
    ),
    **{
        family: Learned(functools.partial(by_joint_attention, family), 4, 1, ("shared",), elsewhere=in_cache,
                        needs=("transformers",))
        for family in ("flux", "sd3", "qwen_image", "z_image", "flux2")
    },
    "averages of several widths": Learned(small, 16, 4, ("sharded",), "--power-ema-stds 0.05 0.1 "),
    "steps of Muon": Learned(small, 16, 4, ("four", "sharded"), "--optimizer muon --weight-decay 0.02 "),
    "adapters": Learned(beside_a_base, 16, 4, ("recomputed", *RANKS), LORA + "--init-from BASE ", quick=2),
    "adapters on nf4": Learned(beside_a_base, 16, 4, ("recomputed", "shared", "offloaded", *RANKS),
                               LORA + "--init-from BASE --base-dtype nf4 "),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Whole:
    learned: Learned
    configs: Configs
    steps: str
    undivided: str
    """The same with its own micro-batch."""
    outcome: Outcome

    def check(self, found: Outcome, tolerance: float = SAME) -> None:
        """Assert that losses, and the mean and the quarters of each validation, are those of the one process."""
        assert found.code == 0, found.output
        assert found.losses == pytest.approx(self.outcome.losses, rel=tolerance), found.output
        norms = [[float(norm) for _, _, norm in run.lines.values()] for run in (found, self.outcome)]
        assert norms[0] == pytest.approx(norms[1], abs=1.5e-3)  # three digits behind the point are printed
        assert found.validations.keys() == self.outcome.validations.keys()
        for iteration, values in self.outcome.validations.items():
            numbers = [list(map(float, own)) for own in (found.validations[iteration], values)]
            assert numbers[0] == pytest.approx(numbers[1], rel=max(tolerance, 1e-5)), iteration


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory, few_digits):
    learned, folder = LEARNED[request.param], tmp_path_factory.mktemp("learned")
    for module in learned.needs:
        pytest.importorskip(module, reason="requirements/video.txt")
    configs = learned.make(folder, few_digits)
    param = json.loads((folder / "data.json").read_text())["dataset_param"]
    steps = f"--train-iters 6 --global-batch-size {learned.batch} --num-workers 1 "
    steps += "--lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 1 "
    steps += learned.flags.replace("BASE", f"{folder}/base")
    steps += "--eval-interval 3 --eval-iters 2 " * ("valid_fraction" in param)
    undivided = f"{steps}--micro-batch-size {param.get('bucket_group', learned.batch)} "
    outcome = configs.run(undivided + f"--save {folder}/whole --save-interval 3")
    assert outcome.code == 0 and len(outcome.losses) == 6, outcome.output
    return Whole(learned, configs, steps, undivided, outcome)


RESUMED_IN_QUICK = {
    "noise", "flow", "buckets", "clips", "captions", "averages of several widths", "steps of Muon", "adapters"
}  # fmt: skip
"""Every kind of state and of data source that a resumed run reads again."""


def of(names: Iterable[str], quick: set[str]) -> pytest.MarkDecorator:
    """Run a test with the whole run of each of these; `make test` with those of ``quick`` alone."""
    rows = [pytest.param(name, marks=[] if name in quick else [pytest.mark.extended]) for name in names]
    return pytest.mark.parametrize("whole", rows, indirect=True)


@pytest.mark.costly("ranks, shards and micro-batches change no number of a run")
@pytest.mark.parametrize(
    ("whole", "way"),
    [
        pytest.param(name, way, marks=learned.marks(way))
        for name, learned in LEARNED.items()
        for way in dict.fromkeys((*EVERYWHERE, *learned.ways))
    ],
    indirect=["whole"],
)
def test_ranks_shards_and_micro_batches_change_no_number(whole, way):
    flags = WAYS[way].flags(whole.configs.folder, whole.learned.micro_batch)
    outcome = whole.configs.run(whole.steps + flags, WAYS[way].ranks)
    whole.check(outcome)
    assert (f"group(s) of {WAYS[way].shared} ranks that share a sample" in outcome.output) is (WAYS[way].shared > 1)


@of(LEARNED, RESUMED_IN_QUICK)
def test_a_resumed_run_prints_the_same_lines_and_has_the_same_bits(whole, tmp_path):
    there, batch = whole.configs.folder / "whole", whole.learned.batch
    shutil.copytree(there / "iter_0000003", tmp_path / "iter_0000003")
    resumed = whole.configs.run(whole.undivided + f"--load {tmp_path} --save {tmp_path}")
    assert "resumed from" in resumed.output and "changed since" not in resumed.output
    assert f"iteration 3, {3 * batch} samples consumed" in resumed.output, resumed.output
    assert resumed.lines == {iteration: line for iteration, line in whole.outcome.lines.items() if iteration > 3}
    assert resumed.validations == {n: line for n, line in whole.outcome.validations.items() if n > 3}
    wanted, found = (PYTORCH.read(folder / "iter_0000006").trees for folder in (there, tmp_path))
    assert found.keys() == wanted.keys()
    for tree, arrays in wanted.items():
        assert found[tree].keys() == arrays.keys()
        assert [name for name in arrays if found[tree][name].tobytes() != arrays[name].tobytes()] == [], tree


@of((name for name, learned in LEARNED.items() if learned.elsewhere), {"noise", "clips", "captions"})
def test_samples_from_a_cache_or_from_shards_teach_what_files_do(whole, tmp_path):
    whole.check(whole.learned.elsewhere(whole.configs, tmp_path).run(whole.undivided))


@pytest.mark.costly("a run on MindSpore learns what one on PyTorch learns")
@mindspore.needs_mindspore
@of((name for name, learned in LEARNED.items() if learned.on_mindspore), {"flow"})
def test_mindspore_learns_what_pytorch_does(whole, tmp_path):
    """From a cache, where only PyTorch runs what makes it."""
    configs = (whole.learned.elsewhere or Configs.copy)(whole.configs, tmp_path)
    whole.check(mindspore.run(configs, whole.undivided), SAME_ON_MINDSPORE)


@pytest.mark.extended
@mindspore.needs_mindspore
def test_a_run_that_changes_its_framework_on_its_way_is_one_loss_curve(tiny, tmp_path):
    flags = "--micro-batch-size 8 --lr 1e-3 --lr-decay-style constant --seed 3 --train-iters "
    whole, one = tiny.run(flags + "9"), tiny.run(flags + f"3 --save {tmp_path}/one")
    convert(tmp_path / "one", tmp_path / "two", "mindspore")
    two = mindspore.run(tiny, flags + f"6 --load {tmp_path}/two --save {tmp_path}/two")
    convert(tmp_path / "two", tmp_path / "three", "pytorch")
    three = tiny.run(flags + f"9 --load {tmp_path}/three")
    moved = one.losses | two.losses | three.losses
    assert moved == pytest.approx(whole.losses, rel=SAME_ON_MINDSPORE) and len(moved) == 9, two.output + three.output

"""Small architectures that have little in common, each proved in layouts drawn for it: none may be called wrong."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import numpy as np

from mindspeed_mm_dit.configs.model import load_model_config
from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.tools.verify.processes import StepResult
from mindspeed_mm_dit.tools.verify.proof import open_config, reference_tasks, references_from
from mindspeed_mm_dit.tools.verify.prove import LAYOUTS, Layout, Reference64
from tests.captions_fixtures import CAPTIONS, captioned_configs, write_beside
from tests.clips_fixtures import clip_configs
from tests.tools.verify.forked_tasks import run_tasks
from tests.training.launch import Configs

PYTHONS = {"pytorch": sys.executable, "mindspore": PlatformError("mindspore is not asked for.")}
ARGS = "--lr 1e-3 --weight-decay 0.01 --num-workers 0 --train-iters 10 --global-batch-size 16\n"
SINGLE, JOINT = ("dit", "dit", "dit", "custom_dit", "wan"), ("flux", "sd3", "qwen_image", "z_image", "flux2")
"""Of every five architectures: without and with joint attention of image and text."""
STEPS = 2


def config_folder(configs: Configs, flags: str = "") -> Path:
    """Write the train.args of a config folder, and return it."""
    (configs.folder / "train.args").write_text(ARGS + flags)
    return configs.folder


def truths_here(config, layouts, watched=False) -> dict:
    """Compute the truths in this process, which knows the framework already."""
    from mindspeed_mm_dit.framework import activate, runtime

    activate("pytorch")
    from mindspeed_mm_dit.tools.verify.worker import compute_task

    asked = reference_tasks(config, layouts, watched)
    tasks = [task for each in asked.values() for own in each.values() for task in own]
    with patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}):
        for task in tasks:
            compute_task(task)
        runtime.shutdown()
    return references_from(asked, {task.output: StepResult.read(task) for task in tasks})


def called_wrong(seeds: Iterable[int], place: Path, digits: Path, clips=None, kinds="single") -> dict:
    """Prove random architectures in a layout of one, two and four ranks; return what is past its bound, by both."""
    asked = []
    for seed in seeds:
        folder = place / f"proof{seed}"
        folder.mkdir()
        given = random_config(seed, place / f"config{seed}", digits, clips, kinds)
        config = open_config(given, folder, None, True, steps=STEPS)
        layouts = drawn_layouts(seed, given)
        truths = truths_here(config, layouts)
        asked += [(seed, each, truths[each.reference_key], config.task(each, each.stem)) for each in layouts]
    said = {}
    for ranks in sorted({layout.ranks for _, layout, _, _ in asked}):
        tasks = [task for _, layout, _, task in asked if layout.ranks == ranks]
        said[ranks] = run_tasks(ranks, "pytorch", tasks, config.folder, PYTHONS)
    found = {}
    for seed, layout, truth, task in asked:
        taken = StepResult.read(task)
        report = (seed, layout, taken, truth, said[layout.ranks])
        assert isinstance(taken, StepResult) and isinstance(truth, Reference64), report
        found[seed, str(layout)] = [finding for finding in truth.judge(layout, taken) if not finding.good]
    return {key: wrong for key, wrong in found.items() if wrong}


def drawn_layouts(seed: int, given: Path) -> list[Layout]:
    """Return one layout of each number of ranks, in which these can share a sample if the network of ``given`` can."""
    draw, predictor = np.random.default_rng(seed), load_model_config(str(given / "model.json")).predictor
    here = ("pytorch", "standalone")
    ours = [each for each in LAYOUTS if (each.framework, each.host) == here and not each.cpu_reference]
    fit = [each for each in ours if each.context_parallel == 1 or _can_share(predictor, each.context_parallel)]
    by_ranks = ([each for each in fit if each.ranks == ranks] for ranks in (1, 2, 4))
    return [own[int(draw.integers(len(own)))] for own in by_ranks]


def _can_share(predictor, ranks: int) -> bool:
    try:
        predictor.check_context_parallel(ranks)
    except ConfigError:
        return False
    return predictor.model_id != "dit"  # (whose campaign drew none before it could)


def random_config(seed: int, place: Path, digits: Path, clips: Path | None, kinds: str) -> Path:
    """Write the configs of a small model whose options, objective and optimizer are drawn."""
    draw = np.random.default_rng(seed)
    kind = (JOINT if kinds == "joint" else SINGLE)[seed % 5]
    if kinds == "joint":
        configs = _joint(draw, place, kind)
    else:
        configs = _images(draw, place, digits) if kind == "dit" else _videos(draw, place, clips, kind)
    model = json.loads((place / "model.json").read_text())
    model["diffusion"] = _flow(draw, kind) if kinds == "joint" else _objective(draw, model)
    (place / "model.json").write_text(json.dumps(model))
    optimizer = "muon" if draw.random() < 0.3 else "adam"
    words = f"--seed {seed} --optimizer {optimizer} --lr {draw.choice([1e-4, 2e-3])}"
    words += f" --adam-beta2 {draw.choice([0.95, 0.999])}" if optimizer == "adam" else ""
    return config_folder(configs, words + "\n")


def _images(draw: np.random.Generator, place: Path, digits: Path) -> Configs:
    heads, head_dim = int(draw.integers(1, 4)), 4 * int(draw.integers(1, 5))
    options = {name: bool(draw.random() < 0.4) for name in ("qk_norm", "rms_norm", "swiglu", "rope", "wo_shift")}
    sizes = {
        "hidden_size": heads * head_dim, "num_heads": heads, "num_layers": int(draw.integers(1, 4)),
        "patch_size": int(draw.choice([1, 2, 4])), "mlp_ratio": float(draw.choice([1.0, 2.5, 4.0])),
        "bottleneck_dim": int(draw.integers(2, 9)) if draw.random() < 0.3 else None,
    }  # fmt: skip
    return Configs.create(place, digits, **sizes, **options)


def _videos(draw: np.random.Generator, place: Path, clips: Path | None, kind: str) -> Configs:
    assert clips is not None, "a predictor of clips is proved on clips"
    configs = clip_configs(place, clips, kind)
    model = json.loads((place / "model.json").read_text())
    heads, head_dim = "num_attention_heads", "attention_head_dim"
    if kind == "custom_dit":
        heads, head_dim = "num_heads", "head_dim"
    model["predictor"] |= {
        heads: 2 * int(draw.integers(1, 3)), head_dim: 2 * int(draw.integers(3, 8)),
        "num_layers": int(draw.integers(1, 4)), "ffn_dim": 4 * int(draw.integers(2, 16)),
        "patch_size": [int(draw.choice([1, 3])), *[int(draw.choice([8, 16]))] * 2],
    }  # fmt: skip
    (place / "model.json").write_text(json.dumps(model))
    return configs


def _joint(draw: np.random.Generator, place: Path, kind: str) -> Configs:
    """Write a network in which image and text attend to each other: depths, widths, heads, axes and texts are drawn."""
    heads, head_dim, side = int(draw.integers(1, 5)), 4 * int(draw.integers(2, 7)), 4 * int(draw.integers(1, 4))
    layers, single = map(int, draw.integers(1, 4, 2))
    length, widths = int(draw.integers(6, 40)), draw.integers(8, 33, 3)
    axes = _parts(draw, head_dim, 4 if kind == "flux2" else 3)
    wide, dual = int(widths[0]), [block for block in range(layers) if draw.random() < 0.4]
    own = {
        "flux": {"num_single_layers": single, "axes_dims_rope": axes, "pooled_projection_dim": wide,
                 "pooled_encoder": 0, "guidance_embeds": bool(draw.random() < 0.5)},
        "flux2": {"num_single_layers": single, "axes_dims_rope": axes, "guidance_embeds": bool(draw.random() < 0.5),
                  "mlp_ratio": float(draw.choice([1.0, 2.5, 3.0]))},
        "sd3": {"qk_norm": str(draw.choice(["rms_norm", ""])) or None, "dual_attention_layers": dual,
                "joint_attention_dim": int(max(widths[0] + widths[1], widths[2])),
                "pooled_projection_dim": int(widths[0] + widths[1]), "encoder_dropout_prob": 0.3},
        "qwen_image": {"axes_dims_rope": axes},
        "z_image": {"axes_dims_rope": axes, "num_refiner_layers": single},
    }[kind]  # fmt: skip
    configs = captioned_configs(place, image_size=side)
    write_beside(place / "images", 2 * CAPTIONS)
    model = json.loads((place / "model.json").read_text())
    model["predictor"] = {
        "model_id": kind, "num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head_dim,
        "joint_attention_dim": wide, "in_channels": 3, "latent_size": [side, side], **own,
    }  # fmt: skip
    words = [{"model_id": "words", "width": int(width), "max_length": length} for width in widths]
    model["text_encoder"] = words if kind == "sd3" else words[0]
    (place / "model.json").write_text(json.dumps(model))
    return configs


def _parts(draw: np.random.Generator, width: int, count: int) -> list[int]:
    """Return ``count`` positive even numbers whose sum is ``width``."""
    cuts = sorted(draw.choice(np.arange(1, width // 2), count - 1, replace=False))
    return [2 * int(part) for part in np.diff([0, *cuts, width // 2])]


def _flow(draw: np.random.Generator, kind: str) -> dict:
    """Return a section ``diffusion`` of joint attention: how times are drawn and shifted, and losses weighted."""
    by_tokens = draw.random() < 0.4 and kind != "flux2"
    shift = {"dynamic_shift": str(draw.choice(["flux", "qwen_image"]))} if by_tokens else {"shift": 3.0}
    return {
        "model_id": "flow_matching", "data_time": int(kind == "z_image"), **shift,
        "timestep_sampling": str(draw.choice(["uniform", "logit_normal", "mode"])),
        "loss_weight": str(draw.choice(["", "sigma_sqrt", "cosmap", "data"])) or None,
    }  # fmt: skip


def _objective(draw: np.random.Generator, model: dict) -> dict:
    """Return a section ``diffusion``: what is learned of clips, or a chain or flow of images."""
    flow = {"model_id": "flow_matching", "path": str(draw.choice(["linear", "gvp"]))}
    if "text_encoder" in model:
        return model["diffusion"] if draw.random() < 0.5 else flow
    if draw.random() < 0.5:
        return flow
    return {**model["diffusion"], "prediction_type": str(draw.choice(["epsilon", "sample", "v_prediction"]))}

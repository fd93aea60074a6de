"""A browser page that samples a model with ``Pipeline.sample`` and shows the path from noise."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import lines_of
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.pipeline import Pipeline, Samples
from mindspeed_mm_dit.sampling.request import Asked
from mindspeed_mm_dit.sampling.video_files import draw_strips
from mindspeed_mm_dit.terminal import say

LOOPBACK = "127.0.0.1"
POINTS = 8
"""States shown on the path from noise."""
MOST_STEPS, MOST_SCALE, MOST_EACH = 250, 10, 8


def gradio() -> Any:
    """Import Gradio, with its analytics off; raises PlatformError if it is not installed."""
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio
    except ImportError as error:
        raise PlatformError(
            "mm-dit app", f"the page needs Gradio, which cannot be imported here: {error}",
            "pip install 'gradio<6.18' 'pandas<3'",
        ) from None  # fmt: skip
    return gradio


def serve(pipe: Pipeline, title: str, port: int) -> None:
    """Serve the page to this machine alone, until Ctrl-C."""
    page = page_of(pipe, title)
    try:
        _, address, _ = page.launch(
            server_name=LOOPBACK, server_port=port, share=False, ssr_mode=False, quiet=True, prevent_thread_lock=True
        )
    except OSError as error:
        raise ConfigError(f"--port = {port}", f"cannot be listened on: {error}", "use another") from None
    say(f"open {address} in your browser; Ctrl-C ends it")
    page.block_thread()


def page_of(pipe: Pipeline, title: str) -> Any:
    """Return the page, not served yet."""
    gr, conditions, objective = gradio(), pipe.config.predictor.conditions, objective_of(pipe.config.diffusion)
    if "vector" in conditions.items:
        raise ConfigError("mm-dit app", "this model is steered by vectors, for which the page has no input",
                          "sample it from Python: docs/python.md")  # fmt: skip
    is_video = len(pipe.config.sample_size) == 3
    with gr.Blocks(title=title) as page, gr.Row():
        with gr.Column():
            classes = _classes(pipe)
            prompts = gr.Textbox(label="Prompts, one per line", lines=3, visible="caption" in conditions.items)
            num = gr.Slider(1, MOST_EACH, 1 if is_video else 4, step=1, label="Samples per class or prompt")
            scale = gr.Slider(1, MOST_SCALE, 2 if conditions.has_null else 1, step=0.1, label="Guidance scale",
                              visible=conditions.has_null)  # fmt: skip
            steps = gr.Slider(1, MOST_STEPS, 25, step=1, label="Steps")
            sampler = gr.Dropdown([*objective.samplers], value=objective.quick_sampler, label="Sampler")
            seed = gr.Number(0, label="Seed", precision=0, minimum=0)
            button = gr.Button("Draw", variant="primary")
        with gr.Column(scale=2):
            gr.Markdown("### Samples")
            samples = gr.Gallery(show_label=False, object_fit="contain") if is_video else _picture()
            gr.Markdown("### The path from noise")
            path = _picture()
        asked = [classes, prompts, num, scale, steps, sampler, seed]
        button.click(lambda *values: _drawn(pipe, *values), asked, [samples, path], api_name="draw")
    return page


def _picture() -> Any:
    return gradio().Image(show_label=False, format="png", buttons=["download", "fullscreen"])


def _classes(pipe: Pipeline) -> Any:
    label = pipe.config.predictor.conditions.label
    labels = list(range(label.num_classes)) if label else []
    names = Asked({"label": labels}).titles(pipe.classes)
    choices = list(zip(names, labels))
    return gradio().Dropdown(choices, value=labels[:1], label="Classes", multiselect=True, visible=bool(labels))


def _drawn(
    pipe: Pipeline, classes: list[int], prompts: str, num: float, scale: float, steps: float, sampler: str, seed: float
) -> tuple[Any, Image.Image]:
    """Return what the page shows: the samples, and their paths from noise; the page also shows errors."""
    items = pipe.config.predictor.conditions.items
    try:
        samples = pipe.sample(
            np.array(classes, np.int64) if "label" in items else None,
            prompts=[line for line in lines_of(prompts) if line.strip()] if "caption" in items else None,
            num=int(num), steps=int(steps), guidance=scale, sampler=sampler, seed=int(seed), path=POINTS,
        )  # fmt: skip
        return _shown(samples), _way(samples)
    except UserError as error:
        raise gradio().Error(str(error)) from None


def _shown(samples: Samples) -> Any:
    """Return a grid of images, or an animation per video."""
    if samples.arrays.ndim == 4:
        return samples.grid()
    folder = Path(tempfile.mkdtemp())
    samples.save(folder / "video.gif")
    return [(str(file), title) for file, title in zip(sorted(folder.iterdir()), samples.titles)]


def _way(samples: Samples) -> Image.Image:
    """Return a strip per sample: the states of an image, or the middle frame of each state of a video."""
    path = samples.path
    assert path is not None
    return draw_strips(path if path.ndim == 5 else path[:, :, path.shape[2] // 2], samples.titles)

"""A browser page that samples a model with ``Pipeline.sample`` and shows the path from noise."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mindspeed_mm_dit.configs.files import error_text, lines_of
from mindspeed_mm_dit.configs.limits import check_between
from mindspeed_mm_dit.errors import ConfigError, PlatformError, UserError
from mindspeed_mm_dit.models.words_encoder import note_of_words
from mindspeed_mm_dit.objectives.registry import objective_of
from mindspeed_mm_dit.sampling.conditions import SampleConditions
from mindspeed_mm_dit.sampling.outputs import GeneratedSamples, draw_strips
from mindspeed_mm_dit.sampling.pictures import draw_grid
from mindspeed_mm_dit.sampling.pipeline import Pipeline
from mindspeed_mm_dit.terminal import echo

LOOPBACK = "127.0.0.1"
POINTS = 8
"""States shown on the path from noise."""
MAX_APP_STEPS, MAX_SCALE, MAX_SAMPLES_EACH = 250, 10, 8
MAX_CONDITIONS, MAX_PROMPT_LETTERS, MAX_BODY_BYTES, MAX_WAITING = 64, 10_000, 1 << 20, 16
"""Limits: classes or prompts per request, characters of its prompts, bytes of a request, and queued requests."""
MAX_DRAWINGS, IMAGE_PIXELS, STATE_PIXELS = 12, 256, 96
"""Number of earlier drawings on the page; minimum displayed size of an image, and of a state on its path."""
STYLE = """
.grid-container { grid: auto / repeat(auto-fill, minmax(240px, 1fr)) !important }
.thumbnail-item { aspect-ratio: auto !important }
"""
"""Drawings side by side in their own aspect ratios; Gradio would fill the page with the first, cropped to a square."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


class _VisitorLeft(Exception):
    """The user has closed the page."""


def gradio() -> Any:
    """Import Gradio, with its analytics off; raises PlatformError if it is not installed.

    From then on this process uses no proxy, because it only connects to this machine.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    warnings.filterwarnings("ignore", module=r"gradio\.")  # (deprecations in the packages that it uses)
    for name in [name for name in os.environ if name.lower() in _PROXIES]:
        del os.environ[name]
    try:
        import gradio
    except ImportError as error:
        raise PlatformError(
            f"mm-dit app needs Gradio, which cannot be imported: {error}. Run: pip install 'gradio<6.18' 'pandas<3'"
        ) from None
    return gradio


def serve(pipe: Pipeline, title: str, port: int) -> None:
    """Serve the page to this machine alone, until Ctrl-C."""
    page = page_of(pipe, title)
    try:
        address = launch(page, port)
    except OSError as error:
        raise ConfigError(f"--port = {port} cannot be listened on: {error_text(error)}. Use another.") from None
    echo(f"open {address} in your browser; Ctrl-C ends it")
    page.block_thread()


def launch(page: Any, port: int | None = None) -> str:
    """Serve a page in the background, and return its address; ``port``: None for any that is free.

    It only answers requests whose Host header is this machine, which prevents DNS rebinding. Nothing is uploaded, and
    requests are processed one at a time.
    """
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    trusted_hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"])
    page.queue(max_size=MAX_WAITING, default_concurrency_limit=1, api_open=False)
    _, address, _ = page.launch(
        server_name=LOOPBACK,
        server_port=port,
        share=False,
        ssr_mode=False,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size="1kb",
        css=STYLE,
        app_kwargs={"middleware": [trusted_hosts, Middleware(_LimitedBody)]},
    )
    return str(address)


class _TooLarge(Exception):
    """A request has more than MAX_BODY_BYTES bytes."""


class _LimitedBody:
    """Refuses requests with large bodies (ASGI middleware), which Gradio would parse and keep."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        stated, received = dict(scope["headers"]).get(b"content-length", b"0"), 0

        async def limited() -> Any:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _TooLarge
            return message

        try:
            if not stated.isdigit() or int(stated) > MAX_BODY_BYTES:
                raise _TooLarge
            await self._app(scope, limited, send)
        except _TooLarge:
            await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body", "body": f"at most {MAX_BODY_BYTES:,} bytes are read".encode()})


def page_of(pipe: Pipeline, title: str) -> Any:
    """Return the page, not served yet."""
    gr, conditions = gradio(), pipe.config.predictor.conditions
    if "vector" in conditions.items:
        raise ConfigError(
            "mm-dit app has no input for vectors, on which this model is conditioned. Sample it from Python, as "
            "docs/sampling.md shows."
        )
    if conditions.needs_frames:
        raise ConfigError(
            "mm-dit app has no input for an image, with which this model begins a clip. Run: mm-dit sample --image FILE"
        )
    is_video, left = len(pipe.config.sample_size) == 3, set[str]()

    def draw(values, request) -> Any:  # type: ignore[no-untyped-def]
        def go_on(samples: int) -> None:
            if request.session_hash in left:
                raise _VisitorLeft

        return _samples_and_paths(pipe, {name: values[component] for name, component in inputs.items()}, go_on)

    def leave(request) -> None:  # type: ignore[no-untyped-def]
        left.add(request.session_hash)

    for function in (draw, leave):
        function.__annotations__["request"] = gr.Request  # tells Gradio to pass it
    with gr.Blocks(title=title, delete_cache=(600, 3600), fill_width=True) as page:
        gr.Markdown(f"## {title}")
        with gr.Row():
            inputs, button, samples, path = _inputs_and_outputs(pipe)
        if not is_video:
            gr.Markdown("### Drawn so far, the newest first")
        before = gr.Gallery(
            show_label=False,
            height=320,
            object_fit="contain",
            format="png",
            interactive=False,
            buttons=["download", "fullscreen"],
            visible=not is_video,
        )
        drawings = [button.click(draw, {*inputs.values()}, [samples, path], api_name="draw")]
        if pipe.description.captions or "caption" not in conditions.items:
            drawings.append(page.load(draw, {*inputs.values()}, [samples, path], api_name=False))
        for drawing in () if is_video else drawings:
            drawing.success(_with_newest, [samples, before], before, api_name=False)
        page.unload(leave)
    return page


def _with_newest(newest: Any, before: Any) -> list[Any]:
    """Return the drawings to show, the newest first."""
    return [newest, *(picture for picture, _ in before or ())][:MAX_DRAWINGS]


def _inputs_and_outputs(pipe: Pipeline) -> tuple[dict[str, Any], Any, Any, Any]:
    """Return an input for each setting of a SampleRequest that the page offers, its button, and the outputs.

    The outputs are those for samples and for their path from noise.
    """
    gr, conditions, objective = gradio(), pipe.config.predictor.conditions, objective_of(pipe.config.diffusion)
    is_video, guided = len(pipe.config.sample_size) == 3, conditions.has_unconditional
    labels = list(range(conditions.label.num_classes)) if conditions.label else []
    names = SampleConditions({"label": labels}).titles(pipe.description.classes)
    caption = " ".join("".join(pipe.description.captions[:1]).split())
    with gr.Column(min_width=280):
        inputs = {
            "classes": gr.Dropdown(
                [*zip(names, labels)], value=labels[:1], label="Classes", multiselect=True, visible=bool(labels)
            ),
            "prompts": gr.Textbox(
                caption, label="Prompts, one per line", lines=3, visible="caption" in conditions.items
            ),
            "num": gr.Slider(1, MAX_SAMPLES_EACH, 1 if is_video else 3, step=1, label="Samples per class or prompt"),
            "guidance": gr.Slider(1, MAX_SCALE, 2 if guided else 1, step=0.1, label="Guidance scale", visible=guided),
            "steps": gr.Slider(1, MAX_APP_STEPS, 25, step=1, label="Steps"),
            "sampler": gr.Dropdown([*objective.samplers], value=objective.quick_sampler, label="Sampler"),
            "seed": gr.Number(0, label="Seed", precision=0, minimum=0),
        }
        button = gr.Button("Draw", variant="primary")
    with gr.Column(scale=3):  # (three images of SHOWN_PIXELS side by side on a laptop's screen)
        gr.Markdown("### Samples")
        samples = gr.Gallery(show_label=False, object_fit="contain") if is_video else _picture()
        gr.Markdown("### The path from noise")
        path = _picture()
    return inputs, button, samples, path


def _picture() -> Any:
    return gradio().Image(show_label=False, format="png", interactive=False, buttons=["download", "fullscreen"])


def _samples_and_paths(
    pipe: Pipeline, settings: Mapping[str, Any], on_step: Callable[[int], object] | None = None
) -> tuple[Any, Image.Image]:
    """Return what the page shows: the samples, and their paths from noise; the page also shows errors.

    The ``settings`` come from anyone who can reach the page; Gradio has checked them against its sliders and choices.
    """
    try:
        settings = {
            **settings,
            "prompts": _lines(settings["prompts"]),
            "classes": np.array(settings["classes"] or [], np.int64),
        }
        items = pipe.config.predictor.conditions.items
        for name, item in (("classes", "label"), ("prompts", "caption")):
            check_between(f"number of {name}", len(settings[name]) if item in items else 0, 0, MAX_CONDITIONS)
            settings |= {} if item in items else {name: None}
        if note := note_of_words(pipe.config, pipe.description.words, settings["prompts"] or ()):
            gradio().Info(note)
        samples = pipe.sample(**settings, path=POINTS, on_step=on_step)
        return _displayed(samples), _path_strips(samples)
    except (UserError, OSError) as error:
        raise gradio().Error(str(error), print_exception=False) from None
    except _VisitorLeft:
        raise gradio().Error("its visitor left", print_exception=False) from None


def _lines(prompts: Any) -> list[str]:
    check_between("letters of the prompts", len(str(prompts)), 0, MAX_PROMPT_LETTERS)
    return [line for line in lines_of(str(prompts)) if line.strip()]


def _displayed(samples: GeneratedSamples) -> Any:
    """Return a grid of images, or an animation per video."""
    if samples.arrays.ndim == 4:
        return draw_grid(samples.arrays, samples.titles, least=IMAGE_PIXELS)
    folder = Path(tempfile.mkdtemp())
    samples.save(folder / "video.gif")
    return [(str(file), title) for file, title in zip(sorted(folder.iterdir()), samples.titles)]


def _path_strips(samples: GeneratedSamples) -> Image.Image:
    """Return a strip per sample: the states of an image, or the middle frame of each state of a video."""
    path = samples.path
    assert path is not None
    return draw_strips(path if path.ndim == 5 else path[:, :, path.shape[2] // 2], samples.titles, STATE_PIXELS)

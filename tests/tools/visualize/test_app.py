"""mm-dit app: a page of a real browser draws what mm-dit sample draws, from this machine alone."""

import contextlib
import dataclasses
import http.client
import importlib.util
import shutil
import threading
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
from PIL import Image

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.errors import ConfigError
from mindspeed_mm_dit.sampling.pictures import draw_grid
from tests.conftest import FRAMEWORK

client = pytest.importorskip("gradio_client")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="of requirements/app.txt")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@contextlib.contextmanager
def serving(pipe):
    """The address of a model's page."""
    from mindspeed_mm_dit.tools.visualize.app import launch, page_of

    page = page_of(pipe, "some model")
    yield launch(page)
    page.close()


@pytest.fixture(scope="module")
def served():
    """An untrained model of digits, and the address of its page."""
    pipe = dit.create("digits", framework=FRAMEWORK)
    with serving(pipe) as address:
        yield pipe, address


def pixels_of(address_or_path):
    if address_or_path.startswith("http"):
        address_or_path, _ = urllib.request.urlretrieve(address_or_path)
    return np.asarray(Image.open(address_or_path).convert("RGB"))


def test_the_page_answers_with_the_samples_of_the_pipeline_and_their_way(served, tmp_path):
    pipe, address = served
    assert address.startswith("http://127.0.0.1:")
    asked = client.Client(address, verbose=False, download_files=str(tmp_path))
    grid, way = asked.predict([3, 7], "", 2, 2.0, 4, "ddim", 5, api_name="/draw")
    samples = pipe.sample([3, 7], num=2, guidance=2.0, steps=4, sampler="ddim", seed=5)
    np.testing.assert_array_equal(pixels_of(grid), np.asarray(draw_grid(samples.arrays, samples.titles, least=256)))
    assert pixels_of(way).shape[1] > 8 * 48


GOOD = {"classes": [3], "prompts": "", "num": 1, "guidance": 2.0, "steps": 4, "sampler": "ddim", "seed": 5}


def test_drawings_that_would_take_too_much_are_refused(served):
    from mindspeed_mm_dit.tools.visualize import app

    for name, value, words in (
        ("classes", [], "classes"), ("classes", [1] * 65, "classes = 65"), ("num", 1.5, "num = 1.5"),
        ("seed", -1, "seed"), ("prompts", "x" * 10_001, "prompts = 10001"),
    ):  # fmt: skip
        with pytest.raises(app.gradio().Error, match=words):
            app._samples_and_paths(served[0], {**GOOD, name: value})


def test_server_takes_no_upload_and_no_other_host(served):
    asked = client.Client(served[1], verbose=False)
    for name, value, most in (("num", 900, 8), ("steps", 251, 250), ("guidance", 11, 10)):
        with pytest.raises(client.exceptions.AppError, match=f"{value} is greater than maximum value {most}"):
            asked.predict(*{**GOOD, name: value}.values(), api_name="/draw")
    there = urllib.parse.urlsplit(served[1])
    body = b"--x\r\nContent-Disposition: form-data; name=files; filename=a\r\n\r\n" + b"0" * 5000 + b"\r\n--x--\r\n"
    sent = {"Content-Type": "multipart/form-data; boundary=x", "Host": there.netloc}
    draw, of_json = "/gradio_api/call/draw", {"Content-Type": "application/json"}
    for method, path, content, headers, code in (
        ("POST", "/gradio_api/upload", body, sent, 413),
        ("POST", draw, b"1" * (2 << 20), of_json, 413),
        ("POST", draw, iter([b"1" * (1 << 16)] * 20), of_json, 400),
        ("GET", "/", None, {"Host": "elsewhere.example"}, 400),
        ("GET", "/", None, {"Host": f"localhost:{there.port}"}, 200),
    ):
        link = http.client.HTTPConnection(there.hostname, there.port)
        link.request(method, path, content, headers)
        assert link.getresponse().status == code, path


def test_drawing_ends_when_its_visitor_leaves(served, monkeypatch):
    began, ended = threading.Event(), threading.Event()

    def sample(*asked, on_step, **more):
        began.set()
        try:
            while True:
                on_step(1)
                time.sleep(0.05)
        finally:
            ended.set()

    monkeypatch.setattr(type(served[0]), "sample", sample)
    asked = client.Client(served[1], verbose=False)
    asked.submit(*GOOD.values(), api_name="/draw")
    assert began.wait(120)
    asked.close()
    assert ended.wait(120)


@pytest.mark.extended
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium of this system")
@pytest.mark.parametrize("config", ["digits", "emoji"])
def test_page_opens_without_asking_another_machine(config):
    sync_api = pytest.importorskip("playwright.sync_api")
    words = {"captions": ("green\nheart", "a fairy")} if config == "emoji" else {}
    pipe = dit.create(config, framework=FRAMEWORK)
    pipe = dataclasses.replace(pipe, description=dataclasses.replace(pipe.description, **words))
    with sync_api.sync_playwright() as play, serving(pipe) as address:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 360, "height": 800})
        page.set_default_timeout(180_000)
        errors, asked = [], []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.locator("img[src*='/file=']").nth(1).wait_for()
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        written = page.get_by_label("Prompts").input_value() if words else None
        browser.close()
    assert written == ("green heart" if words else None)
    assert errors == [] and overflow <= 0
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []


def test_videos_are_animations(tmp_path, monkeypatch):
    from mindspeed_mm_dit.tools.visualize import app

    monkeypatch.setattr(app.tempfile, "mkdtemp", lambda: str(tmp_path))
    pipe = dit.create("moving_digits_labels", framework=FRAMEWORK)
    assert app.page_of(pipe, "clips").title == "clips"
    asked = {**GOOD, "classes": [1, 0], "guidance": 1.0, "steps": 1, "sampler": "euler", "seed": 0}
    shown, way = app._samples_and_paths(pipe, asked)
    assert [title for _, title in shown] == ["1", "0"] and Image.open(shown[1][0]).n_frames > 1
    assert way.size[0] >= 8 * 48


def test_ports_that_cannot_be_listened_on_are_refused(served, capsys):
    from mindspeed_mm_dit.tools.visualize.app import serve

    pipe, address = served
    port = urllib.parse.urlsplit(address).port
    with pytest.raises(ConfigError, match=f"--port = {port}"):
        serve(pipe, "digits", port)
    assert main(["app", "--checkpoint", "nowhere", "--port", "0"]) == 2
    assert "--port = 0" in capsys.readouterr().err

"""mm-dit get, against a hub on the loopback that breaks off, lies, refuses and makes people wait."""

import fcntl
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest

from mindspeed_mm_dit.cli.main import main
from mindspeed_mm_dit.tools.planning.get import PUBLISHED, PublishedWeights
from tests.tools.tables import table

REPO, COMMIT = "people/net", "c" * 40
FILES = {
    "config.json": b'{"_class_name": "AutoencoderKL"}',
    "vae/weights.safetensors": bytes(range(256)) * 8000,
    "vae/weights.bin": b"a pickle of the same",
    "old/weights.bin": b"a pickle alone",
    "README.md": b"words",
}
FETCHED = ["config.json", "old/weights.bin", "vae/weights.safetensors"]


class Hub(BaseHTTPRequestHandler):
    """Answers as the Hugging Face hub does. ``ills``: what is wrong with the answers for a path."""

    protocol_version = "HTTP/1.1"
    ills: ClassVar[dict[str, list]] = {}
    edit: ClassVar = staticmethod(lambda listing: listing)
    ranges: ClassVar[list[str]] = []

    def log_message(self, *words):
        pass

    def do_HEAD(self):
        self.do_GET(head=True)

    def do_GET(self, head=False):
        path = re.sub(rf"^/(api/models/)?{REPO}(/resolve/{COMMIT})?/?", "", self.path.partition("?")[0])
        ill = self.ills.get(path, [])
        if not self.path.startswith((f"/{REPO}/", f"/api/models/{REPO}", "/plain-")) or 404 in ill:
            return self.send(404, b"", {"X-Error-Code": "RepoNotFound"}, head)
        if 429 in ill:
            return self.send(429, b"", {"Retry-After": "17"}, head)
        if self.path.startswith("/api/"):
            listing = self.edit(self.listing())
            content = listing if isinstance(listing, bytes) else json.dumps(listing).encode()
            return self.send(200, content, {"Content-Type": "application/json"}, head)
        if "loop" in ill:
            return self.send(302, b"", {"Location": self.path}, head)
        content = FILES.get(path, b"all alone")
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        content = content + bytes(10**7) if "endless" in ill else content
        content = content[:-1] + b"!" if "damaged" in ill else content
        start = int(re.search(r"\d+", self.headers.get("Range", "0"))[0])
        if not head and self.headers.get("Range"):
            self.ranges.append(self.headers["Range"])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        breaks = not head and "breaks" in ill
        if breaks:
            ill.remove("breaks")
        self.send(206 if start else 200, content[start:], headers, head, breaks)

    def listing(self):
        siblings = []
        for name, body in FILES.items():
            stated = {"blobId": hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()}
            if name.endswith((".safetensors", ".bin")):
                stated = {"lfs": {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}}
            siblings.append({"rfilename": name, "size": len(body), **stated})
        return {"id": REPO, "sha": COMMIT, "siblings": siblings, "cardData": {"license": "cc-by-nc-4.0"}}

    def send(self, status, content, headers, head, breaks=False):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(content[: len(content) // 2] if breaks else content)
        self.close_connection = self.close_connection or breaks


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, as HF_ENDPOINT, and "net", which is people/net there; the folder of the test is empty."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.handle_error = lambda *connection: None  # (the command hangs up)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Hub.ills, Hub.ranges, Hub.edit = {}, [], staticmethod(lambda listing: listing)
    monkeypatch.chdir(tmp_path)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    alone = {"address": f"{address}/plain-{hashlib.sha256(b'all alone').hexdigest()[:8]}.pth"}
    monkeypatch.setitem(PUBLISHED, "net", PublishedWeights("a net", {"huggingface": REPO}))
    monkeypatch.setitem(PUBLISHED, "alone", PublishedWeights("a file", alone))
    both = PublishedWeights("both", {"huggingface": REPO}, ("config.json",), ("alone",))
    monkeypatch.setitem(PUBLISHED, "both", both)
    yield Hub
    server.shutdown()
    server.server_close()
    thread.join()


def there(folder):
    files = [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".part"]
    return sorted(str(file.relative_to(folder)) for file in files)


def test_files_licence_and_digests_are_printed_and_checked(hub, tmp_path, capsys):
    assert main(["get", "net"]) == 0
    said = capsys.readouterr().out
    digest = hashlib.sha256(FILES["vae/weights.safetensors"]).hexdigest()
    assert "cc-by-nc-4.0" in said and f"2.0 MB  vae/weights.safetensors  sha256:{digest}" in said
    assert there(tmp_path / "weights/net") == FETCHED
    assert all((tmp_path / "weights/net" / name).read_bytes() == FILES[name] for name in FETCHED)
    (tmp_path / "weights/net/old/weights.bin").unlink()
    (tmp_path / "weights/net/config.json").write_bytes(FILES["config.json"][:-1] + b"!")
    hub.ills = {"vae/weights.safetensors": [404]}  # missing and damaged files alone are fetched again
    assert main(["get", "net"]) == 0
    assert all((tmp_path / "weights/net" / name).read_bytes() == FILES[name] for name in FETCHED)


def test_download_that_broke_off_goes_on(hub, tmp_path):
    hub.ills = {"vae/weights.safetensors": ["breaks", "breaks"], "plain": ["breaks"]}
    assert main(["get", "net", "alone"]) == 0
    sizes = [int(re.search(r"\d+", one)[0]) for one in hub.ranges]
    assert 0 < sizes[0] < sizes[1] < len(FILES["vae/weights.safetensors"])
    assert (tmp_path / "weights/net/vae/weights.safetensors").read_bytes() == FILES["vae/weights.safetensors"]
    assert main(["get", "both", "--output", "elsewhere"]) == 0  # a file of another name comes along by its digest
    [alone] = (tmp_path / "elsewhere").glob("plain-*.pth")
    assert there(tmp_path / "elsewhere") == ["net/config.json", alone.name] and alone.read_bytes() == b"all alone"


@table(
    "path ill flags named",
    """
vae/weights.safetensors | damaged | net                       | sha256
config.json             | damaged | net                       | config.json
vae/weights.safetensors | breaks  | net                       | 5 times
vae/weights.safetensors | 429     | net                       | 17 seconds
                        | 429     | net                       | 17 seconds
                        | 404     | net                       | net
nowhere                 | 404     | nobody/net                | nobody/net
nowhere                 | 404     | nte                       | 'net'
nowhere                 | 404     | net --output /dev/null    | --output = /dev/null/net
vae/weights.safetensors | endless | net                       | 2,048,000 bytes
vae/weights.safetensors | loop    | net                       | PlatformError: mm-dit get net
nowhere                 | 404     | SiT-XL/2 --hub modelscope | --hub = modelscope
""",
)
def test_wrong_answers_of_a_hub_leave_nothing(hub, tmp_path, monkeypatch, capsys, path, ill, flags, named):
    hub.ills = {path: [int(ill) if ill.isdigit() else ill] * 99}
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # (the hub's package waits between attempts)
    assert main(["get", *flags.split()]) == 2
    assert named in capsys.readouterr().err and len(there(tmp_path)) == path.startswith("vae")
    assert not [*tmp_path.rglob("*.part")] or ill == "breaks"


def test_next_command_resumes_a_file_that_broke_off(hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    hub.ills = {"vae/weights.safetensors": ["breaks"] * 99}
    assert main(["get", "net"]) == 2
    hub.ills, hub.ranges = {}, []
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**6))  # (enough for the rest)
    assert main(["get", "net"]) == 0
    assert int(re.search(r"\d+", hub.ranges[0])[0]) > len(FILES["vae/weights.safetensors"]) / 2


def test_file_that_another_process_fetches_is_named(hub, tmp_path, capsys):
    digest = hashlib.sha256(FILES["vae/weights.safetensors"]).hexdigest()
    part = tmp_path / f"weights/net/vae/weights.safetensors.{digest[-8:]}.part"
    part.parent.mkdir(parents=True)
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(["get", "net"]) == 2
    assert capsys.readouterr().err.startswith(f"PlatformError: {part.relative_to(tmp_path)} is being fetched")


def with_file(**stated):
    return lambda listing: listing["siblings"][1].update(stated) or listing


@pytest.mark.parametrize("edit", [
    *(with_file(size=size) for size in ("2048000", -1, True, None, 10**400)),
    *(with_file(rfilename=path) for path in ("../x", "/x", "a//x", "", 5, "a\0x", "a\x1b[2J", "a\nb", "\ud800")),
    *(with_file(lfs=lfs) for lfs in (5, [5], {"sha256": "a"}, {"sha256": "z" * 64}, {"sha256": 5}, {"size": 1})),
    *(lambda listing, value=value: {**listing, "siblings": value} for value in (5, None, "x", [5], [{}])),
    *(lambda listing, value=value: value for value in (5, [], b"{", b"\xff", b"[" * 100_000, bytes(2**17))),
    lambda listing: {**listing, "sha": 5},
])  # fmt: skip
def test_impossible_listings_are_refused_before_a_download(hub, tmp_path, monkeypatch, capsys, edit):
    monkeypatch.setattr("mindspeed_mm_dit.tools.planning.hubs.MAX_LISTING_BYTES", 2**17 - 1)
    hub.edit = staticmethod(edit)
    assert main(["get", "net"]) == 2
    assert re.match(rf"CheckpointError: http://\S+/api/models/{REPO}", capsys.readouterr().err)
    assert not list(tmp_path.rglob("*"))


def test_digests_in_capitals_are_checked_and_lacking_ones_named(hub, capsys):
    digest = hashlib.sha256(FILES["vae/weights.safetensors"]).hexdigest()
    for stated, checked in ((digest.upper(), 3), ("", 2)):
        hub.edit = staticmethod(with_file(lfs={"sha256": stated}))
        assert main(["get", "net"]) == 0
        said = capsys.readouterr().out
        assert f"{checked} file(s)" in said and ("not checked" in said) == (checked == 2)


def test_disk_that_is_too_full_is_refused_before_a_download(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert main(["get", "net"]) == 2
    assert "--output = weights/net" in capsys.readouterr().err and not there(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["get", "DiT-XL/2"]) == 2
    assert "cannot be reached" in capsys.readouterr().err and not there(tmp_path)


def test_modelscope_is_asked_through_its_own_package(hub, tmp_path, monkeypatch, capsys):
    """A stand-in with the members that are called, as modelscope-hub 0.5 has them."""
    content = b"weights"
    part = SimpleNamespace(path="a/w.pt", size=7, sha256=hashlib.sha256(content).hexdigest(), is_dir=False)

    class HubApi:
        list_repo_files = staticmethod(lambda repo, kind: [SimpleNamespace(path="a", is_dir=True), part])
        get_repo = staticmethod(lambda repo, kind: SimpleNamespace(license="mit"))

        def download_file(self, repo, kind, path, revision, local_dir, file_size):
            (local_dir / path).parent.mkdir(parents=True)
            (local_dir / path).write_bytes(content)

    package = SimpleNamespace(HubApi=HubApi, HubConfig=lambda: SimpleNamespace(endpoint="https://modelscope.cn"))
    for installed, code in ((package, 0), (None, 2)):
        monkeypatch.setitem(sys.modules, "modelscope_hub", installed)
        assert main(["get", "sd-vae-ft-ema", "--hub", "modelscope"]) == code
    assert (tmp_path / "weights/sd-vae-ft-ema/a/w.pt").read_bytes() == content
    assert "modelscope-hub" in capsys.readouterr().err

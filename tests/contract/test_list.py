"""The list of what we rely on in the host: complete, and true where unpacked trees are at hand."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.wings.mindspeed_mm.installed import lacks
from mindspeed_mm_dit.wings.mindspeed_mm.megatron import versions
from mindspeed_mm_dit.wings.mindspeed_mm.megatron.contract import RELIED_ON, check_host
from tests.conftest import ROOT
from tests.contract.hosted import TREES, needs_trees, tree

ROOM = ROOT / "mindspeed_mm_dit/wings/mindspeed_mm/megatron"
HOST = ("megatron", "mindspeed", "mindspeed_mm", "checkpoint")


def imports(path: Path) -> list[tuple[str, str]]:
    """(module, name) of everything a file imports from the host."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, a.name) for n in nodes if n.module and n.module.split(".")[0] in HOST for a in n.names]


def test_the_list_names_everything_the_room_imports_from_the_host() -> None:
    found = {pair for path in ROOM.glob("*.py") for pair in imports(path)} - {
        ("megatron.core.package_info", "__version__")
    }
    assert found == {(module, name) for module, names in RELIED_ON.items() for name in names}


def test_only_the_rooms_of_the_host_import_mindspeed() -> None:
    rooms = {ROOM, ROOM.parent / "native"}
    others = [path for path in (ROOT / "mindspeed_mm_dit").rglob("*.py") if not rooms & set(path.parents)]
    assert not [path for path in others if any(m.startswith("mindspeed") for m, _ in imports(path))]


@needs_trees
@pytest.mark.parametrize("module", RELIED_ON)
def test_the_host_has_what_the_list_says(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for home in reversed(TREES):
        monkeypatch.syspath_prepend(str(tree(home)))
    assert lacks({module: RELIED_ON[module]}) == []


@needs_trees
def test_the_pair_is_a_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for home in reversed(TREES):
        monkeypatch.syspath_prepend(str(tree(home)))
    assert versions.warnings("0.12.1") == []


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with every module and name that we rely on, and nothing behind them."""
    monkeypatch.delenv("NON_MEGATRON", raising=False)  # (of a shell for the native engine)
    for package in HOST:  # (without, those of real trees on PYTHONPATH would come first)
        _add(tmp_path, f"{package}.__init__")
        monkeypatch.delitem(sys.modules, package, raising=False)  # (of another test)
    for module, names in RELIED_ON.items():
        is_package = any(other.startswith(f"{module}.") for other in RELIED_ON)
        defined = [f"{name} = 1" if of is None else f"def {name}({', '.join(of)}): ..." for name, of in names.items()]
        _add(tmp_path, f"{module}.__init__" if is_package else module, "\n".join(defined))
    _add(tmp_path, "megatron.training.__init__", "from x import get_args\nif 1:\n    from y import print_rank_0")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _add(root: Path, module: str, source: str = "") -> None:
    file = root / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)


def test_a_host_with_all_we_rely_on_is_taken(host: Path) -> None:
    check_host(mindspore=True, in_their_scripts=True)


@pytest.mark.parametrize(
    ("module", "source", "missing"),
    [
        ("mindspeed_mm.training", "", "mindspeed_mm.training.pretrain"),
        ("mindspeed_mm.training", "def pretrain(config): ...", "mindspeed_mm.training.pretrain(train_valid_test"),
        ("mindspeed_mm.training", None, "lacks mindspeed_mm.training, which"),
        ("mindspeed.megatron_adaptor", None, "lacks mindspeed.megatron_adaptor, which"),
    ],
)
def test_what_the_host_lacks_is_named_before_it_is_imported(
    host: Path, module: str, source: str | None, missing: str
) -> None:
    file = host / f"{module.replace('.', '/')}.py"
    file.unlink() if source is None else file.write_text(source)
    with pytest.raises(PlatformError, match=re.escape(missing)) as raised:
        check_host(mindspore=False)
    assert "MindSpeed-MM v26.1.0 with MindSpeed 26.1.0_core_r0.12.1" in str(raised.value)


def test_a_parameter_more_that_may_be_left_out_is_no_fault(host: Path) -> None:
    known = RELIED_ON["mindspeed_mm.training"]["pretrain"] or ()
    file = host / "mindspeed_mm/training.py"
    file.write_text(f"def pretrain({', '.join(known)}, callbacks=None): ...")
    check_host(mindspore=False)
    file.write_text(f"def pretrain({', '.join(known)}, callbacks): ...")
    with pytest.raises(PlatformError, match=r"mindspeed_mm\.training\.pretrain\("):
        check_host(mindspore=False)


def test_of_a_file_that_is_no_python_the_import_says_so(host: Path) -> None:
    (host / "mindspeed_mm/training.py").write_bytes(b"def pretrain(\n\xff")
    check_host(mindspore=False)


def test_what_only_a_script_of_the_host_needs_is_not_asked_for_by_ours(host: Path) -> None:
    (host / "mindspeed_mm/models/predictor/predict_model.py").unlink()
    check_host(mindspore=False)
    with pytest.raises(PlatformError, match="predict_model"):
        check_host(mindspore=False, in_their_scripts=True)


def test_a_shell_of_the_native_engine_is_refused(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NON_MEGATRON", "true")
    with pytest.raises(ConfigError, match=r"NON_MEGATRON = true: .*\n.*unset NON_MEGATRON"):
        check_host(mindspore=False)


def marked(root: Path, mm: int, mindspeed: int) -> None:
    """Write the marks of the first ``mm`` releases of MindSpeed-MM and the first ``mindspeed`` of MindSpeed."""
    for package in HOST:
        _add(root, f"{package}.__init__")
    for mark in (*versions.MINDSPEED_MM[:mm], *versions.MINDSPEED[:mindspeed]):
        _add(root, mark.module)


@pytest.mark.parametrize(("mm", "mindspeed"), [(1, 1), (1, 2), (2, 3), (3, 4)])
def test_a_tested_pair_is_known_by_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mm: int, mindspeed: int
) -> None:
    marked(tmp_path, mm, mindspeed)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (versions.recognise(versions.MINDSPEED_MM), versions.recognise(versions.MINDSPEED)) in versions.TESTED
    assert versions.warnings("0.12.1") == []


def test_another_pair_is_warned_of_with_the_tested_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked(tmp_path, 2, 2)
    _add(tmp_path, "mindspeed.__init__", "__version__ = '0.12.1'")
    monkeypatch.syspath_prepend(str(tmp_path))
    pair, core = versions.warnings("0.13.0")
    assert "MindSpeed-MM (v26.1.0, by its modules) with MindSpeed (26.0.0_core_r0.12.1, by its modules)" in pair
    assert all(f"MindSpeed-MM {mm} with MindSpeed {mindspeed}" in pair for mm, mindspeed in versions.TESTED)
    assert "Megatron-LM core_v0.13.0 was not tested; tested: core_v0.12.1" in core


def test_a_tree_older_than_any_tested_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mindspeed", "mindspeed_mm"):
        _add(tmp_path, f"{package}.__init__")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "MindSpeed (older than any tested, by its modules)" in versions.warnings("0.12.1")[0]


def test_what_the_old_route_may_unpickle_is_named_with_its_module() -> None:
    body = ast.parse((ROOT / "mindspeed_mm_dit/wings/mindspeed_mm/megatron/state.py").read_text()).body
    (names,) = [ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign)
                and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "MAY_BE_PICKLED"]  # fmt: skip
    assert "argparse.Namespace" in names and [name for name in names if "." not in name] == []

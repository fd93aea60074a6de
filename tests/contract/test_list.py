"""The lists of what we rely on in the host, and replace: complete, and true where unpacked trees are at hand."""

import ast
import os
import re
import sys
from pathlib import Path

import pytest

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.integrations.mindspeed_mm.installed import missing_from
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import contract
from mindspeed_mm_dit.integrations.mindspeed_mm.megatron.contract import RELIED_ON, check_host
from mindspeed_mm_dit.integrations.mindspeed_mm.native import contract as native
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import FLAGS, OURS, SHARDING, THEIRS
from tests.conftest import ROOT
from tests.contract.hosted import TREES, needs_trees, tree
from tests.contract.native_hosted import needs_engine

ROOM = ROOT / "mindspeed_mm_dit/integrations/mindspeed_mm/megatron"
NATIVE_ROOM = ROOM.parent / "native"
HOST = ("megatron", "mindspeed", "mindspeed_mm", "checkpoint")


def imports(path):
    """(module, name) of everything a file imports from the host."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return [(n.module, a.name) for n in nodes if n.module and n.module.split(".")[0] in HOST for a in n.names]


@pytest.mark.parametrize(("room", "relied_on"), [(ROOM, RELIED_ON), (NATIVE_ROOM, native.RELIED_ON)])
def test_list_names_all_imports_from_the_host(room, relied_on):
    found = {pair for path in room.glob("*.py") for pair in imports(path)}
    version = {("megatron.core.package_info", "__version__")}
    assert found - version == {(module, name) for module, names in relied_on.items() for name in names}


def test_mindspeed_is_imported_by_its_rooms_alone():
    others = [path for path in (ROOT / "mindspeed_mm_dit").rglob("*.py") if not {ROOM, NATIVE_ROOM} & {*path.parents}]
    assert not [path for path in others if any(m.startswith("mindspeed") for m, _ in imports(path))]


@needs_trees
def test_host_has_what_the_list_says(monkeypatch):
    for home in reversed(TREES):
        monkeypatch.syspath_prepend(str(tree(home)))
    assert missing_from(RELIED_ON) == [] and contract.warnings("0.12.1") == []


@pytest.fixture
def host(tmp_path, monkeypatch):
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


def _add(root, module, source=""):
    file = root / f"{module.replace('.', '/')}.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)


@pytest.mark.parametrize(("module", "source", "missing"), [
    ("mindspeed_mm.training", "", "mindspeed_mm.training.pretrain"),
    ("mindspeed_mm.training", "def pretrain(config): ...", "mindspeed_mm.training.pretrain(train_valid_test"),
    ("mindspeed_mm.training", None, "mindspeed_mm.training"),
    ("mindspeed.megatron_adaptor", None, "mindspeed.megatron_adaptor"),
])  # fmt: skip
def test_name_that_the_host_lacks_is_refused_before_import(host, module, source, missing):
    check_host(mindspore=True, in_their_scripts=True)
    file = host / f"{module.replace('.', '/')}.py"
    file.unlink() if source is None else file.write_text(source)
    with pytest.raises(PlatformError, match=re.escape(missing)):
        check_host(mindspore=False)


def test_optional_parameter_more_is_taken_and_scripts_of_the_host_need_more(host, monkeypatch):
    known = RELIED_ON["mindspeed_mm.training"]["pretrain"] or ()
    file = host / "mindspeed_mm/training.py"
    file.write_text(f"def pretrain({', '.join(known)}, callbacks=None): ...")
    check_host(mindspore=False)
    file.write_text(f"def pretrain({', '.join(known)}, callbacks): ...")
    with pytest.raises(PlatformError, match=r"mindspeed_mm\.training\.pretrain\("):
        check_host(mindspore=False)
    file.write_text(f"def pretrain({', '.join(known)}): ...")
    (host / "mindspeed_mm/models/predictor/predict_model.py").unlink()
    check_host(mindspore=False)
    with pytest.raises(PlatformError, match="predict_model"):
        check_host(mindspore=False, in_their_scripts=True)
    monkeypatch.setenv("NON_MEGATRON", "true")
    with pytest.raises(ConfigError, match="NON_MEGATRON = true"):
        check_host(mindspore=False)


def marked(root, mm, mindspeed):
    """Write the marks of the first ``mm`` releases of MindSpeed-MM and the first ``mindspeed`` of MindSpeed."""
    for package in HOST:
        _add(root, f"{package}.__init__")
    for mark in (*contract.MINDSPEED_MM[:mm], *contract.MINDSPEED[:mindspeed]):
        _add(root, mark.module)


@pytest.mark.parametrize(("mm", "mindspeed"), [(1, 1), (1, 2), (2, 3), (3, 4)])
def test_tested_pair_is_recognised_by_its_modules(tmp_path, monkeypatch, mm, mindspeed):
    marked(tmp_path, mm, mindspeed)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (contract.recognise(contract.MINDSPEED_MM), contract.recognise(contract.MINDSPEED)) in contract.TESTED
    assert contract.warnings("0.12.1") == []


def test_another_pair_is_a_warning(tmp_path, monkeypatch):
    marked(tmp_path, 2, 2)
    _add(tmp_path, "mindspeed.__init__", "__version__ = '0.12.1'")
    monkeypatch.syspath_prepend(str(tmp_path))
    pair, core = contract.warnings("0.13.0")
    assert "v26.1.0" in pair and "26.0.0_core_r0.12.1" in pair and "core_v0.13.0" in core


def test_names_that_may_be_unpickled_have_a_module():
    body = ast.parse((ROOT / "mindspeed_mm_dit/integrations/mindspeed_mm/megatron/state.py").read_text()).body
    (names,) = [ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign)
                and isinstance(n.targets[0], ast.Name) and n.targets[0].id == "MAY_BE_PICKLED"]  # fmt: skip
    assert "argparse.Namespace" in names and [name for name in names if "." not in name] == []


def source(module):
    home = Path(os.environ["MINDSPEED_HOME" if module.startswith("mindspeed.") else "MINDSPEED_MM_HOME"])
    return ast.parse((home / f"{module.replace('.', '/')}.py").read_text())


def test_engine_with_other_functions_is_refused():
    class DistributedCheckpointer:
        @classmethod
        def save(cls, path, state, save_async=False, iteration=None, save_ckpt_dtype=None, **kwargs): ...

        @classmethod
        def load(cls, folder, state): ...

    with pytest.raises(Exception, match=r"load.*\('folder', 'state'\).* path"):
        native.check_replaced(DistributedCheckpointer)


@needs_engine
@pytest.mark.parametrize("module", native.RELIED_ON)
def test_engine_has_what_the_list_says(module):
    body = source(module).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    for name, parameters in native.RELIED_ON[module].items():
        assert name in {*defined, *assigned}
        if parameters is not None:
            assert tuple(argument.arg for argument in defined[name].args.args) == parameters


@needs_engine
def test_engine_has_the_functions_that_are_replaced():
    body = source("mindspeed_mm.fsdp.checkpoint.dcp_checkpointer").body
    (checkpointer,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == "DistributedCheckpointer"]
    defined = {n.name: {a.arg for a in n.args.args} for n in checkpointer.body if isinstance(n, ast.FunctionDef)}
    assert not [name for name, taken in native.REPLACED.items() if not set(taken) <= defined[name]]


@needs_engine
def test_engine_has_the_keys_and_defaults_that_are_left_out():
    declared = defaults()
    theirs = {*FLAGS, *(f"parallel.fsdp_plan.{key}" for key in SHARDING), *THEIRS} - set(OURS)
    assert theirs <= set(declared)
    written = {key: value for key, value in THEIRS.items() if value not in (None, ())}  # (others are never written)
    assert {key: declared[key] for key in written} == written


def defaults():
    """Dotted key -> default of what the engine declares in ``training`` and ``parallel.fsdp_plan``."""
    found: dict[str, object] = {}
    for file, name, prefix in (
        ("training_args", "TrainingArguments", "training."),
        ("lora_args", "LoraArguments", "training.lora."),
        ("model_args", "ModelArguments", "model."),
        ("parallel_args", "ParallelArguments", "parallel."),
        ("parallel_args", "FSDPPlanConfig", "parallel.fsdp_plan."),
    ):
        body = source(f"mindspeed_mm.fsdp.params.{file}").body
        (declared,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
        for node in declared.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                keywords = {k.arg: k.value for k in node.value.keywords} if isinstance(node.value, ast.Call) else {}
                value = keywords.get("default", node.value)
                found[f"{prefix}{node.target.id}"] = value.value if isinstance(value, ast.Constant) else ...
    return found

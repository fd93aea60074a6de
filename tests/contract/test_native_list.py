"""The lists of what we rely on and replace in the native engine: complete, and true where a tree is at hand."""

import ast
import os
from pathlib import Path

import pytest

from mindspeed_mm_dit.integrations.mindspeed_mm.native.contract import RELIED_ON, REPLACED, check_replaced
from mindspeed_mm_dit.integrations.mindspeed_mm.native.settings import FLAGS, OURS, SHARDING, THEIRS
from tests.conftest import ROOT
from tests.contract.native_hosted import needs_engine
from tests.contract.test_list import imports

ROOM = ROOT / "mindspeed_mm_dit/integrations/mindspeed_mm/native"


def source(module):
    """A module of the unpacked trees."""
    home = Path(os.environ["MINDSPEED_HOME" if module.startswith("mindspeed.") else "MINDSPEED_MM_HOME"])
    return ast.parse((home / f"{module.replace('.', '/')}.py").read_text())


def test_list_names_all_imports_from_the_engine():
    found = {pair for path in ROOM.glob("*.py") for pair in imports(path)}
    assert found == {(module, name) for module, names in RELIED_ON.items() for name in names}


def test_engine_with_other_functions_is_refused():
    class DistributedCheckpointer:
        @classmethod
        def save(cls, path, state, save_async=False, iteration=None, save_ckpt_dtype=None, **kwargs): ...

        @classmethod
        def load(cls, folder, state): ...

    with pytest.raises(Exception, match=r"load: has the parameters \('folder', 'state'\), and lacks path"):
        check_replaced(DistributedCheckpointer)


@needs_engine
@pytest.mark.parametrize("module", RELIED_ON)
def test_engine_has_what_the_list_says(module):
    body = source(module).body
    defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assigned = {t.id for n in body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    for name, parameters in RELIED_ON[module].items():
        assert name in {*defined, *assigned}
        if parameters is not None:
            assert tuple(argument.arg for argument in defined[name].args.args) == parameters


@needs_engine
def test_engine_has_the_functions_that_are_replaced():
    body = source("mindspeed_mm.fsdp.checkpoint.dcp_checkpointer").body
    (checkpointer,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == "DistributedCheckpointer"]
    defined = {n.name: {a.arg for a in n.args.args} for n in checkpointer.body if isinstance(n, ast.FunctionDef)}
    assert not [name for name, taken in REPLACED.items() if not set(taken) <= defined[name]]


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

"""Say in one page what of MindSpeed-MM and MindSpeed has drifted between two pairs of trees: python drift.py OLD NEW.

OLD and NEW hold mindspeed_mm/ and mindspeed/, as setup.sh unpacks them; this project and Megatron-LM are on PYTHONPATH.
"""

import ast
import sys
from pathlib import Path

TREES = ("mindspeed_mm", "mindspeed")
PARAMS = "mindspeed_mm/mindspeed_mm/fsdp/params"
FOLLOWED = [f"mindspeed_mm.fsdp.{name}" for name in ("train.trainer", "train.train_engine", "models.modelhub")]
"""Modules whose order of doing things we count on, though none of their names is imported."""


def file_of(pair, module):
    return pair / module.partition(".")[0] / f"{module.replace('.', '/')}.py"


def keys(pair):
    """Return the keys of the native engine's yaml, as Class.key, each with its type and default as they are written."""
    found = {}
    for file in sorted((pair / PARAMS).glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            for each in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    default = each.value
                    if isinstance(default, ast.Call):
                        given = {keyword.arg: keyword.value for keyword in default.keywords}
                        default = given.get("default", given.get("default_factory"))
                    words = [ast.unparse(each.annotation), ast.unparse(default) if default else "required"]
                    found[f"{node.name}.{each.target.id}"] = " = ".join(words)
    return found


def changed(old, new, modules):
    """Yield a line for each module that is gone, or has other lines."""
    for module in modules:
        before, after = (file_of(pair, module) for pair in (old, new))
        if not after.is_file():
            yield f"{module}: gone" if before.is_file() else f"{module}: in neither"
        elif not before.is_file():
            yield f"{module}: new"
        elif before.read_bytes() != after.read_bytes():
            lines = [set(file.read_text().splitlines()) for file in (before, after)]
            yield f"{module}: {len(lines[1] - lines[0])} lines more, {len(lines[0] - lines[1])} fewer"


def page(old, new):
    """Yield the lines of the page; the trees of ``new`` must be what Python finds."""
    from mindspeed_mm_dit.integrations.mindspeed_mm.installed import missing_from
    from mindspeed_mm_dit.integrations.mindspeed_mm.megatron import contract as megatron
    from mindspeed_mm_dit.integrations.mindspeed_mm.native import contract as native

    yield f"# From {old.name} to {new.name}"
    for tree in TREES:
        head = new / tree / ".git/HEAD"
        yield f"{tree}: {head.read_text().strip()}" if head.is_file() else tree
    for route, relied_on in (("native engine", native.RELIED_ON), ("old route", megatron.RELIED_ON)):
        missing = missing_from(relied_on)
        yield from ("", f"## What the {route} lacks of what we rely on", *(missing or ["nothing"]))
        modules = [module for module in relied_on if module.startswith(("mindspeed.", "mindspeed_mm."))]
        more = FOLLOWED if relied_on is native.RELIED_ON else []
        lines = list(changed(old, new, sorted({*modules, *more})))
        yield from ("", f"## Files behind it, {route}", *(lines or ["all as they were"]))
    before, after = keys(old), keys(new)
    yield from ("", "## Keys of the native engine's yaml")
    yield from (f"new: {key}: {after[key]}" for key in after if key not in before)
    yield from (f"gone: {key}" for key in before if key not in after)
    other = [key for key in after if before.get(key, after[key]) != after[key]]
    yield from (f"changed: {key}: {before[key]} -> {after[key]}" for key in other)
    yield from () if before != after else ("all as they were",)


if __name__ == "__main__":
    print("\n".join(page(*map(Path, sys.argv[1:3]))))

"""Published faults, planted in somebody else's network, are found and named by ``dit.prove``; right ways are not."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mindspeed_mm_dit as dit
from mindspeed_mm_dit.errors import UserError
from tests.conftest import FRAMEWORK, ROOT
from tests.mindspore.launch import needs_mindspore, run_script
from tests.tools.verify import foreign
from tests.tools.verify.foreign import EITHER, FAULTS, FUSED, PLAIN, PYTORCH, inputs, network, nn, ops, rows


@pytest.fixture
def given(framework):
    """What both networks are asked."""
    return inputs()


FEW = ["causal joint attention"] if FRAMEWORK == "mindspore" else [*FAULTS][:2]


@pytest.mark.parametrize("name", rows(FAULTS, FEW))
def test_fault_of_a_network_is_found_and_its_module_named(framework, given, name):
    parts, where = FAULTS[name]
    found = dit.prove(network(framework, parts), network(framework), given)
    assert not found.good and where in found.where, (found.where, str(found))


RIGHT = ("keys in another order", *(("fused queries, keys and values", "recomputed blocks") if PYTORCH else ()))


@pytest.mark.pytorch
def test_what_rounding_hides_is_seen_in_float64(framework, given):
    def of_another_eps(x):
        centred = x - x.mean(-1)[..., None]
        return centred / ((centred * centred).mean(-1)[..., None] + 1e-5) ** 0.5

    found = dit.prove(network(framework, replace(PLAIN, norm=of_another_eps)), network(framework), given)
    assert "in float64: the outputs are" in str(found) and "apart, from blocks.0.norm1 on: a constant" in str(found)
    same = dit.prove(network(framework), network(framework), given)
    assert same.good and float(same.about["in float64"].split()[3]) < 1e-12


@pytest.mark.pytorch
@pytest.mark.parametrize(("eps", "scale", "where"), [
    (1e-6, 1.0, ""), (1e-5, 1.0, "forward: module norm"), (1e-6, 2.0, "")]
)  # fmt: skip
def test_module_past_its_bound_is_wrong_if_it_moves_the_output(eps, scale, where):
    import torch

    class Loud(torch.nn.Module):
        """Rounding moves its output by more than another eps does."""

        def __init__(self, eps, scale):
            super().__init__()
            self.norm, self.fc, self.scale = torch.nn.LayerNorm(8, eps), torch.nn.Linear(8, 8), scale
            self.norm.register_forward_hook(lambda module, given, output: output * scale)

        def forward(self, x):
            return self.norm(x) / self.scale + torch.sin(1e4 * self.fc(x))

    found = dit.prove(Loud(eps, scale), Loud(1e-6, 1.0), [torch.randn(4, 8, generator=torch.manual_seed(0))])
    assert (found.good, found.where) == (not where, where), str(found)
    assert next(f for f in found.findings if f.name == "output/").good


@pytest.mark.pytorch
@needs_mindspore
def test_torch_module_and_mindspore_cell_meet_in_one_process(tmp_path):
    import torch

    script, packages = ROOT / "tests/tools/verify/both_frameworks.py", Path(torch.__file__).parents[1]
    outcome = run_script([str(script), str(packages)], tmp_path)
    assert outcome.output.splitlines()[-4:] == ["right", "right", "forward: module 1", "forward: module 1"]


@pytest.mark.parametrize("name", rows([*EITHER, *PYTORCH], RIGHT))
def test_network_computed_another_right_way_is_right(framework, given, name):
    parts = replace(PLAIN, **(EITHER | PYTORCH)[name])
    found = dit.prove(network(framework, parts), network(framework), given, names=FUSED if parts.is_fused else None)
    assert found.good, str(found)


@pytest.mark.pytorch
@pytest.mark.parametrize(
    "name", rows(["compiled", "in float64", "in bfloat16 by autocast", "in bfloat16"], ["in bfloat16 by autocast"])
)
def test_other_precision_or_compiler_is_right(framework, given, name):
    import torch

    turned = replace(PLAIN, rotary=foreign.turned_in_pairs)

    class Low(foreign.Wrapped):
        def __init__(self):
            super().__init__(network(framework, turned))

        def forward(self, **given):
            with torch.autocast("cpu", torch.bfloat16):
                return self.net(**given)

    mine, more = network(framework), {}
    if name == "compiled":
        mine = torch.compile(mine, backend="aot_eager")
    elif name == "in float64":
        mine, more = mine.double(), {"their_inputs": given}
        given = {key: value.astype(np.float64) for key, value in given.items()}
    elif name == "in bfloat16":
        mine, more = network(framework, turned).bfloat16(), {"their_inputs": given}
        given = {key: torch.from_numpy(value).bfloat16() for key, value in given.items()}
    else:
        mine, more = Low(), {"names": {"net": ""}, "precision": "bfloat16"}
    found = dit.prove(mine, network(framework), given, **more)
    assert found.good, str(found)


@pytest.mark.pytorch
def test_activation_used_twice_is_proved():
    (mine, given), (theirs, _) = foreign.odd(), foreign.odd()
    assert dit.prove(mine, theirs, given).good


@pytest.mark.pytorch
@pytest.mark.parametrize("place", rows(["blocks.0.mlp.fc2", "proj_out"], ["proj_out"]))
def test_module_without_gradient_is_named(framework, given, place):
    made = network(framework)
    made.get_submodule(place).register_forward_pre_hook(lambda module, asked: asked[0].detach())
    found = dit.prove(made, network(framework), given)
    assert found.where == f"backward: module {place}", str(found)


@pytest.mark.parametrize(("change", "other", "words"), [
    (math.nan, {}, r"proves nothing \(forward: the data: input x"),
    pytest.param(1e30, {}, r"proves nothing \(forward: module blocks.0.norm1", marks=pytest.mark.pytorch),
    (1.0, {"output": lambda x: ops.permute(x, (0, 2, 1)), "loss": lambda x: (x * x).mean()},
     r"mine has shape \(3, 4, 6\), .* theirs \(3, 6, 4\)"),
])  # fmt: skip
def test_inputs_that_prove_nothing_are_refused(framework, given, change, other, words):
    with pytest.raises(UserError, match=words):
        dit.prove(network(framework), network(framework), given | {"x": given["x"] * np.float32(change)},
                  **({"their_output": lambda x: x} | other))  # fmt: skip


class Tabled(foreign.Wrapped):
    """A network that adds a table, which others compute, to what it takes."""

    def __init__(self, net):
        super().__init__(net)
        self.table = nn.parameter((foreign.N, foreign.C), trained=False)

    def forward(self, x, *given):
        return self.net(x + self.table, *given)


def test_names_without_partner_are_refused_but_for_a_table(framework, given):
    plain, tabled, asked = network(framework), Tabled(network(framework)), list(given.values())
    assert dit.prove(tabled, plain, asked, names={"net": "", "table": None}).good
    with pytest.raises(UserError, match="'tabel'"):
        dit.prove(plain, tabled, asked, names={"": "net", "tabel": None})
    for names, words in ((None, r"(?s)mine blocks\.1\.attn.*theirs"), ({"blokcs.*": "blocks.*"}, r"'blokcs.\*'")):
        with pytest.raises(UserError, match=words):
            dit.prove(plain, network(framework, depth=1), given, names=names)

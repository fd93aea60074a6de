"""Memory of an accelerator is given back in the words that every PyTorch since 2.7 has."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")


def test_an_npu_gives_back_its_memory_where_torch_accelerator_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from mindspeed_mm_dit.framework.pytorch import runtime

    emptied: list[str] = []
    npu = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: emptied.append("npu"))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delattr(torch.accelerator, "empty_cache", raising=False)  # as in 2.7 and 2.8
    runtime.free_memory()
    assert emptied == ["npu"]

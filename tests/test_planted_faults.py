"""Faults that mutants cannot see (constants, ranks, files that `make mutants` leaves out) turn their tests red."""

import os
import shutil
import sys

import pytest

from tests.conftest import ROOT
from tests.forked import DEVICE, PATH, PATIENCE_SECONDS, STARTED, Forked

FAULTS = {
    "schedule": ("objectives/gaussian/schedule.py", "scale * 0.02", "scale * 0.0201",
        "tests/objectives/gaussian/test_schedule.py"),
    "validation": ("objectives/gaussian/objective.py", "np.floor(noise_levels * count",
        "np.floor(noise_levels * (count - 1)", "tests/objectives/test_validation_draws.py"),
    "epsilon": ("models/dit.py", "nn.LayerNorm(config.hidden_size, eps=1e-6",
        "nn.LayerNorm(config.hidden_size, eps=1e-5", "tests/golden/test_block.py"),
    "colours of videos": ("data/video_file.py", '"src_colorspace": matrix or other', '"src_colorspace": other',
        "tests/data/test_video_display.py -k colours_are_those"),
    "strength of adapters": ("integrations/formats/lora_settings.py", "rank if alpha is None else alpha", "rank",
        "tests/checkpoint/test_lora_files.py -k alpha_and_rank"),
    "base of adapters": ("training/resume.py", "if base != there:", "if base == '':",
        "tests/training/test_lora_run.py -k go_on_beside_their_own_base"),
    "resume": ("training/progress.py", 'facts.get("consumed_samples", ', 'facts.get("consumed_sample", 0 * ',
        "tests/training/test_same_numbers.py -k the_same_bits[noise]"),
    "optimizer state": ("training/pytorch/stepper.py", "state, has_power_ema = self.state(with_optimizer),",
        "state, has_power_ema = self.state(False),", "tests/training/test_engine.py -k test_a_resumed_engine"),
    "sharding": ("training/pytorch/engine.py", "        average_ignored(self.model)\n", "",
        "tests/training/test_same_numbers.py -k noise-ignoring"),
    "replication": ("training/pytorch/parallel.py", "if runtime.world_size() == 1:", "if runtime.world_size() >= 1:",
        "tests/training/test_same_numbers.py -k noise-replicated"),
    "stretched positions": ("models/positions.py", "rows * (base / height)", "rows * (base / width)",
        "tests/models/test_dit_shapes.py -k pixart"),
    "shares of sources": ("data/order.py", "int((plan[:position] == source).sum())", "position",
        "tests/data/test_mixed.py -k has_its_share"),
    "classes": ("data/listing.py", "if not is_hidden(entry.name)]", "]", "tests/data/test_folder.py -k hidden"),
    "coins": ("data/conditions.py", "sample_indices, probability, self.dropout_key)", "sample_indices, probability)",
        "tests/data/test_conditions.py -k of_their_own"),
    "contact sheet": ("tools/planning/data.py", "reader.views_at(seed, chosen)",
        "reader.views_at(seed, images[chosen])", "tests/tools/planning/test_data.py -k first_epoch"),
    "conversion": ("integrations/formats/families.py",
        "split_rows(array, ends * (len(array) // whole)), join_rows",
        "np.split(array, n)[::-1], lambda parts: np.concatenate(parts[::-1])",
        "tests/checkpoint/test_convert.py -k outputs_equal"),
    "first of all": ("tools/verify/pytorch_steps.py", "self.not_finite is not None or ", "",
        "tests/tools/verify/test_probe.py -k overflows"),
    "evaluated images": ("tools/evaluate/drawing.py", "first_number=int(numbers[0])", "first_number=0",
        "tests/tools/evaluate/test_evaluate.py -k of_their_numbers"),
    "kept classes": ("models/dit_adapter.py", "table[label] = value[other]",
        "table[label] = value[label]", "tests/checkpoint/test_adapting.py -k by_name_wherever"),
    "resized patches": ("models/dit_adapter.py", "np.linalg.pinv(resize_matrix(weight.shape[-1], after).T)",
        "resize_matrix(weight.shape[-1], after)", "tests/checkpoint/test_adapting.py -k embedded_as"),
    "timesteps of diffusers": ("integrations/formats/diffusers_folder.py",
        "@ conversion_matrix(np.array(changes.right_at)).T", "@ conversion_matrix(np.array(changes.right_at))",
        "tests/checkpoint/test_pipeline.py -k answers_alike"),
    "images of ranks": ("sampling/generate.py", "config, conditions.at(numbers), request",
        "config, SampleConditions(conditions.at(numbers).values), request", "tests/cli/test_sample.py -k two_ranks"),
}  # fmt: skip
"""A file, a line of it broken on purpose, and the test that must notice."""
STEP = "tests/device/test_steps.py -k [digits_flow]"
WAITING = "tests/training/test_low_bit_run.py -k wait_in_memory"
ON_A_DEVICE = {
    "a block's copy not awaited": ("training/pytorch/parallel.py",
        "current_stream().wait_event(self._copied[number % 2])", "current_stream()", WAITING),
    "a block's buffer reused too early": ("training/pytorch/parallel.py",
        "        self._stream.wait_stream(devices.current_stream())\n", "", WAITING),
    "a table left on the host": ("framework/pytorch/nn.py",
        "module.register_buffer(name, torch.tensor(make()), persistent=False)",
        "setattr(module, name, torch.tensor(make()))", STEP),
    "a copy read before it arrives": ("framework/pytorch/runtime.py", "self._arrived.synchronize()", "pass",
        "tests/device/test_transport.py -k scalars"),
    "a wait in the step": ("training/pytorch/engine.py", 'reported.append(metrics["loss"])',
        'reported.append(torch.full((), metrics["loss"].item(), device=runtime.device()))', STEP),
    "weights of before the move": ("training/pytorch/engine.py",
        "self.model = shard(model, fsdp2) if fsdp2 else replicate(model)\n"
        "        super().__init__(unwrap(self.model).predictor, model.declared, args)",
        "super().__init__(model.predictor, model.declared, args)\n"
        "        self.model = shard(model, fsdp2) if fsdp2 else replicate(model)", STEP),
    "clipping by a number": ("training/pytorch/engine.py", "(self.args.clip_grad / (norm + 1e-6)).clamp(max=1.0)",
        "min(1.0, self.args.clip_grad / (float(norm) + 1e-6))", STEP),
    "weights saved while they change": ("checkpoint/torch_dcp.py", 'value.to("cpu", non_blocking=True, copy=True)',
        "value.detach()", "tests/device/test_transport.py -k checkpoint"),
    "a checkpoint written before it arrives": ("checkpoint/torch_dcp.py", "torch.accelerator.synchronize()", "pass",
        "tests/device/test_transport.py -k checkpoint"),
    "a generator on another device": ("tools/verify/pytorch.py", "generator=self._draw, ",
        "generator=self._draw, device=x.device, ", "tests/device/test_transport.py -k roundings"),
}  # fmt: skip
"""Those that no CPU sees."""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, each fault planted in it and taken out again."""
    folder = tmp_path_factory.mktemp("project")
    for part in ("mindspeed_mm_dit", "tests", "examples", "benchmarks"):
        shutil.copytree(ROOT / part, folder / part)
    for file in ("pretrain_dit.py", "pyproject.toml"):
        shutil.copy(ROOT / file, folder)
    return folder


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, project):
    assert_is_caught(FAULTS[name], project, str(project))


@pytest.mark.ranks
@pytest.mark.skipif(DEVICE not in PATH, reason="no device apart here: make test-device")
@pytest.mark.parametrize("name", ON_A_DEVICE)
def test_a_fault_that_no_cpu_sees_is_caught_on_a_device(name, project):
    assert_is_caught(ON_A_DEVICE[name], project, f"{project}{os.pathsep}{project}/tests/mock_accelerator")


def test_every_fault_has_its_line():
    for file, line, _, _ in (FAULTS | ON_A_DEVICE).values():
        assert (ROOT / "mindspeed_mm_dit" / file).read_text().count(line) == 1, (file, line)


def assert_is_caught(fault, project, path):
    file, line, broken, test = fault
    source = project / "mindspeed_mm_dit" / file
    text = source.read_text()
    source.write_text(text.replace(line, broken))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "--extended", *test.split()]
    process = Forked(command, environment, str(project), imported="libraries")
    STARTED.append(process)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    shutil.copy2(ROOT / "mindspeed_mm_dit" / file, source)
    assert process.returncode == 1 and "failed" in output, output[-2000:]

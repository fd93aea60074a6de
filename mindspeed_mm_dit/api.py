"""The Python API, ``import mindspeed_mm_dit as dit``. A framework is imported only when a function is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mindspeed_mm_dit.sampling.pipeline import Pipeline
    from mindspeed_mm_dit.tools.verify.compare import Comparison
    from mindspeed_mm_dit.tools.verify.step_trace import TraceRecorder

from mindspeed_mm_dit.sampling.request import ModelRequest, arguments_of, naming_arguments


@arguments_of(ModelRequest)
def load(request: ModelRequest) -> Pipeline:
    """Load a trained model and return it, ready to sample from.

    checkpoint: the folder of a run or of its checkpoints (the newest is used), a .pt, .safetensors or MindSpore .ckpt
    file, or a diffusers folder. lora: adapters to add to the weights, each "FILE" or "FILE:STRENGTH".
    low_noise_checkpoint: the second expert of Wan 2.2, if ``checkpoint`` is the first; a diffusers folder with
    transformer_2 contains both.

    >>> import mindspeed_mm_dit as dit
    >>> pipe = dit.load("outputs/digits/checkpoints")                                          # doctest: +SKIP
    >>> pipe.sample(classes=["3", 7], num=4, steps=25, guidance=2.0, seed=0).save("some.png")  # doctest: +SKIP
    """
    from mindspeed_mm_dit.framework import activate

    activate(request.framework)
    from mindspeed_mm_dit.sampling.pipeline import Pipeline

    return Pipeline.load(request)


@naming_arguments()
def create(config: str | Path, *, seed: int = 0, framework: Literal["pytorch", "mindspore"] = "pytorch") -> Pipeline:
    """Return an untrained model; its initial weights depend only on ``seed``.

    config: a model.json, a folder with one, or the name of an embedded config.

    >>> import mindspeed_mm_dit as dit
    >>> pipe = dit.create("digits")
    >>> sum(weight.numel() for weight in pipe.predictor.parameters())
    1275920
    >>> image, *_ = pipe.sample(classes=[3], steps=2, guidance=1.0)
    >>> image.size
    (8, 8)
    """
    from mindspeed_mm_dit.configs.arguments import config_folder
    from mindspeed_mm_dit.configs.limits import expand_path
    from mindspeed_mm_dit.configs.model import load_model_config
    from mindspeed_mm_dit.framework import activate

    activate(framework)
    from mindspeed_mm_dit.sampling.pipeline import Pipeline

    path = expand_path("config", config)
    model_json = next((file for file in (Path(path), Path(path) / "model.json") if file.is_file()), None)
    return Pipeline.untrained(load_model_config(model_json or config_folder(path) / "model.json"), seed)


def prove(
    mine: Any,
    theirs: Any,
    inputs: Any,
    *,
    names: Mapping[str, str | Sequence[str] | None] | None = None,
    loss: Callable[[Any], Any] | None = None,
    their_inputs: Any = None,
    output: Callable[[Any], Any] | None = None,
    their_output: Callable[[Any], Any] | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
) -> Comparison:
    """Compare a network with a third-party one: outputs, a loss and every gradient, within measured bounds.

    Both use the weights of ``theirs``, with random numbers in place of zeros; their weights are restored at the end.
    The reference is ``theirs`` in float64, or ``mine`` if only that is on PyTorch.

    mine, theirs: any ``nn.Module`` or MindSpore ``Cell``. inputs: arrays or tensors, as a mapping by keyword or a
    sequence. names: parameter or module of mine -> of theirs, ``*`` for any part of a name; several of theirs are
    stacked in mine, None has no counterpart. loss: output -> scalar to differentiate (default: the mean of the output
    times random numbers). their_inputs: if they differ. output, their_output: result of a network -> the tensor to
    compare (default: the first). precision: in which mine computes, if that is not the dtype of its weights.

    Returns the report: ``print`` it; ``good``, ``where`` and ``named`` show what is wrong; ``save("port.html")``.

    Raises ConfigError, which lists parameters without a counterpart and names that match nothing.
    """
    from mindspeed_mm_dit.tools.verify import port

    return port.prove(
        mine,
        theirs,
        inputs,
        names=names,
        loss=loss,
        their_inputs=their_inputs,
        output=output,
        their_output=their_output,
        precision=precision,
    )


def record_trace(
    model: Any, optimizer: Any, folder: str | Path, *, average: Any = None, repeats: int = 3, steps: int = 2
) -> TraceRecorder:
    """Record the first steps of your training loop, to compare them with those on another machine.

    >>> with dit.record_trace(model, optimizer, "gpu.trace") as w:  # doctest: +SKIP
    ...     for batch in batches:
    ...         loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
    ...         w.step(loss)

    The first ``steps`` in the block are recorded into ``folder``; the run itself is unchanged. Before the optimizer
    steps, each is repeated ``repeats`` times with every number perturbed by its rounding error, which measures how far
    two correct machines may differ. average: a module with the EMA of the weights. On MindSpore the model must run
    in PyNative mode. ``mm-dit compare gpu.trace npu.trace`` shows where two machines diverge.
    """
    from mindspeed_mm_dit.tools.verify.step_trace import TraceRecorder

    return TraceRecorder(model, optimizer, str(folder), average, repeats, steps)

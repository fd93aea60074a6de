"""The gradient of the loss that a training script computes, with the network compiled to one graph.

Only the network is compiled, not the script. The script computes its loss L from the losses l_i of the samples, so

    dL/dw = sum_i a_i dl_i/dw    with    a_i = dL/dl_i.

One graph computes all l_i, and that sum for given weights a. The script runs as it is written, and is differentiated
with respect to the l_i. The graph first gets the a of the last micro-batch (at the start, those of a mean); if the
script yields others, the graph runs once more with these. A loss that is linear in the l_i, such as their mean, never
needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, ops

from mindspeed_mm_dit.errors import ConfigError, PlatformError
from mindspeed_mm_dit.framework.mindspore.ops import no_grad
from mindspeed_mm_dit.training.contract import ForwardStep


class InterpretedLoss:
    """The loss of a micro-batch and its gradient, as a script computes them, operator by operator.

    model: the composite; parameters: those that the gradient is computed for.
    """

    def __init__(self, model: Any, parameters: Sequence[Parameter]) -> None:
        self._model, self._parameters = model, parameters

    def sample_losses(self, forward_step: ForwardStep, batches: Iterator[Any]) -> Tensor:
        """Return the loss of each sample of the next micro-batch, (B,)."""
        return forward_step(batches, self._losses)[0]

    def gradient(self, forward_step: ForwardStep, batches: Iterator[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the loss that the script reports for the next micro-batch, and the gradient of the one minimised."""

        def loss() -> tuple[Tensor, Tensor]:
            return self._script_loss(forward_step, batches)

        (_, reported), gradient = mindspore.value_and_grad(loss, None, self._parameters, has_aux=True)()
        return reported, gradient

    def _script_loss(self, forward_step: ForwardStep, batches: Iterator[Any]) -> tuple[Tensor, Tensor]:
        return _run_script(forward_step, batches, self._losses)

    def _losses(self, **batch: Tensor) -> Tensor:
        losses = self._model.losses(*self._inputs(batch))
        return losses * batch["loss_weights"] if "loss_weights" in batch else losses

    def _inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Return (latents, condition ..., draws ...) of a batch; the encoding is never compiled here."""
        with no_grad():
            return self._model.latents(batch), *self._model.loss_inputs(batch)


class CompiledLoss(InterpretedLoss):
    """The same with the network compiled; ``micro_batch_size``: samples in a micro-batch, B."""

    def __init__(self, model: Any, parameters: Sequence[Parameter], micro_batch_size: int) -> None:
        super().__init__(model, parameters)
        if model.calls_model:
            raise PlatformError(
                "MindSpore does not compile the derivative in the loss of this objective (diffusion.model_id). Train "
                "it with --ai-framework pytorch; MindSpore can sample from the checkpoint."
            )
        gradient = mindspore.value_and_grad(_WeightedLosses(model), None, parameters, has_aux=True)
        self._losses_and_gradient = mindspore.jit(gradient)
        self._weights = np.full(micro_batch_size, 1 / micro_batch_size, np.float32)

    def gradient(self, forward_step: ForwardStep, batches: Iterator[Any]) -> tuple[Tensor, Sequence[Tensor]]:
        """Do what :class:`InterpretedLoss` does.

        Raises:
            ConfigError: the script does not call the model once with a whole micro-batch.
        """
        calls: list[tuple[tuple[Tensor, ...], Sequence[Tensor]]] = []
        factors = np.ones_like(self._weights)  # factors of the batch for each l_i

        def loss(shift: Tensor) -> tuple[Tensor, Tensor]:  # added to the l_i: zeros
            def model(**batch: Tensor) -> Tensor:
                with no_grad():
                    inputs = self._inputs(batch)
                    _check_size(inputs[0].shape[0], len(self._weights))
                    if "loss_weights" in batch:
                        factors[:] = batch["loss_weights"].asnumpy()
                    losses, gradient = self._run(self._weights * factors, inputs)
                calls.append((inputs, gradient))
                return losses * Tensor(factors) + shift

            return _run_script(forward_step, batches, model)

        shift = Tensor(np.zeros_like(self._weights))
        (_, reported), weights = mindspore.value_and_grad(loss, 0, None, has_aux=True)(shift)
        _check_calls(len(calls))
        ((inputs, gradient),) = calls
        if not np.array_equal(weights.asnumpy(), self._weights):
            self._weights = weights.asnumpy()
            gradient = self._run(self._weights * factors, inputs)[1]
        return reported, gradient

    def compile(self, inputs: tuple[Tensor, ...]) -> None:
        """Compile the graph for micro-batches of the shapes of ``inputs``: latents, conditions, draws."""
        self._run(self._weights, inputs)

    def _run(self, weights: np.ndarray, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Sequence[Tensor]]:
        (_, losses), gradient = self._losses_and_gradient(Tensor(weights), *inputs)
        return losses, gradient


def _run_script(
    forward_step: ForwardStep, batches: Iterator[Any], model: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Return (the loss to minimise, the one to report)."""
    output, loss_func = forward_step(batches, model)
    minimised, metrics = loss_func(output)
    return minimised, metrics["loss"]


class _WeightedLosses(mindspore.nn.Cell):
    """(weights (B,), latents, condition ..., draws ...) -> (weighted sum of the losses, loss of each sample (B,))."""

    def __init__(self, model: Any) -> None:
        super().__init__(auto_prefix=False)
        self.model = model

    def construct(self, weights: Tensor, latents: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        losses = self.model.losses(latents, *inputs)
        return ops.sum(weights * losses), losses


def _check_size(samples: int, micro_batch_size: int) -> None:
    if samples != micro_batch_size:
        raise ConfigError(
            f"forward_step calls model(**batch) with {samples} samples, but a compiled step needs whole micro-batches, "
            f"of --micro-batch-size = {micro_batch_size}. Hand the whole batch to the model, or add --pynative, which "
            "is slower."
        )


def _check_calls(count: int) -> None:
    if count != 1:
        raise ConfigError(
            f"forward_step calls the model {count} times for a micro-batch, but a compiled step needs one call. Call "
            "the model once and leave the rest to loss_func, or add --pynative, which is slower."
        )

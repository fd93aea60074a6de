"""A host as another package brings it: it takes one step of plain gradient descent, and says the loss before it."""

import sys
from enum import Enum

from mindspeed_mm_dit.hosts.registry import HostSpec


class ModelType(Enum):
    encoder_or_decoder = 1


class OneStep:
    name = "one-step"
    ModelType = ModelType

    def get_args(self):
        return self._args

    def print_rank_0(self, message):
        print(message, flush=True)

    def load_encoders(self):
        from mindspeed_mm_dit.models.registry import load_encoders

        return load_encoders(self._args.mm.model, self._args.mm.encodes)

    def average_losses_across_data_parallel_group(self, losses):
        return losses

    def pretrain(self, train_valid_test_dataset_provider, model_provider, model_type, forward_step_func,
                 process_non_loss_data_func=None, extra_args_provider=None, args_defaults=None):  # fmt: skip
        from mindspeed_mm_dit.framework import runtime
        from mindspeed_mm_dit.hosts.preflight import preflight
        from mindspeed_mm_dit.training.flags import parse, standalone_parser

        args = self._args = preflight(parse(sys.argv[1:], extra_args_provider(standalone_parser())))
        runtime.initialize(None, args.micro_batch_size, args.global_batch_size)
        model = model_provider()
        runtime.load_arrays(model.predictor, model.initial_weights(args.seed))
        runtime.to_runtime_device(model)
        batches, *_ = train_valid_test_dataset_provider([args.global_batch_size, 0, 0])
        losses, loss_func = forward_step_func(batches, model)
        loss, said = loss_func(losses)
        loss.backward()
        for parameter in model.predictor.parameters():
            parameter.data -= args.lr * parameter.grad if parameter.grad is not None else 0
        self.print_rank_0(f"one step, from loss {said['loss'].item():.6E}")
        runtime.shutdown()


ONE_STEP = HostSpec("one-step", lambda argv: OneStep())

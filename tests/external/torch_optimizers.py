"""Optimizers of PyTorch as another package brings them, and classes that no run can use."""

import torch


class Odd(torch.optim.Optimizer):
    """Momentum, with state of many kinds: numbers, nothing, a list, and a tensor of twice the parameter's size."""

    def __init__(self, params, lr=1e-3, beta=0.9, weight_decay=0.0, mode="plain"):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay, "mode": mode, "seen": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["seen"] += 1
            group["grown"] = 1 - group["beta"] ** group["seen"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, size=0.0, name="odd", nothing=None, is_new=True)
                    state["pair"] = torch.stack([torch.zeros_like(p)] * 2)
                    state["list"] = [torch.zeros_like(p), torch.zeros(())]
                state["step"] += 1
                state["size"] = state["size"] / 2 + 1 / state["step"]
                state["list"][0].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                state["list"][1] += 1
                state["pair"].copy_(torch.stack([p.grad, state["pair"][0]]))
                kept = state["list"][0] / group["grown"] + 0.1 * state["pair"].sum(0) + 0.1 * state["is_new"] * p.grad
                state["is_new"] = False
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(kept * state["size"], alpha=group["lr"])


class Switched(torch.optim.Optimizer):
    """Gradients are taken between the weights and ``z``, which a plain step moves; the weights are the mean of z."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0, beta=0.9):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "k": 0, "training": False})

    def _switch(self, training, weight):
        for group in self.param_groups:
            if group["training"] != training:
                for p in (p for p in group["params"] if self.state[p]):
                    with torch.no_grad():
                        p.lerp_(self.state[p]["z"], weight(group["beta"]))
                group["training"] = training

    def train(self):
        self._switch(True, lambda beta: 1 - beta)

    def eval(self):
        self._switch(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["training"], "train() must be called first"
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["z"] = p.detach().clone()
                mean = p + (1 - 1 / group["beta"]) * (state["z"] - p)
                state["z"].sub_(p.grad, alpha=group["lr"])
                mean.lerp_(state["z"], 1 / group["k"])
                p.copy_(group["beta"] * mean + (1 - group["beta"]) * state["z"])


class Generator(torch.optim.Optimizer):
    """Keeps a generator, which no checkpoint can hold."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"random": torch.Generator()}


class Reading(torch.optim.Optimizer):
    """Reads a number of its parameter, which a meta tensor does not have."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"size": p.abs().sum().item(), "last": p.grad.clone()}


class Stateless(Odd):
    state_dict = None


class NoRate(torch.optim.Optimizer):
    def __init__(self, params, weight_decay=0.0):
        super().__init__(params, {"weight_decay": weight_decay})


class Plain:
    """No optimizer of PyTorch."""

    def state_dict(self):
        return {}

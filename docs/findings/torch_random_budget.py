# torch 2.13.0, on CPU: within a budget for activations, a backward draws random numbers anew (pytorch issue 190758).
import torch
from torch._functorch import config

config.activation_memory_budget = 0.0


def forward(x):
    return (torch.rand_like(x) * x.sin()).exp().sum()


x = torch.ones(4, requires_grad=True)
for function in (forward, torch.compile(forward)):
    torch.manual_seed(0)
    loss = function(x)
    print(torch.autograd.grad(loss, x)[0])  # of the same draw

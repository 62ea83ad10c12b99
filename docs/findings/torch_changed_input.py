# torch 2.13.0, on CPU: within a budget for activations, a backward reads a buffer that has changed since.
import torch
from torch._functorch import config

config.activation_memory_budget = 0.0


def forward(x, buffer):
    y = (x * buffer.clone()).sin()
    buffer.add_(1)
    return y.exp().sum()


for function in (forward, torch.compile(forward)):
    x = torch.ones(4, requires_grad=True)
    function(x, torch.ones(4)).backward()
    print(x.grad)  # 1.2534, and then -2.0662 for the same input

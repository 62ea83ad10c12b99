# bitsandbytes 0.50.2: a tensor of 2^31 elements or more ends the process. Needs a GPU with 48 GB.
import torch
from bitsandbytes.optim import AdamW8bit

for numel in (2**20, 2**31 - 4096, 2**31 + 4096):
    weight = torch.nn.Parameter(torch.ones(numel, device="cuda"))
    optimizer = AdamW8bit([weight], lr=0.1, weight_decay=0)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    print(numel, int((weight.detach() != 1).sum()))
    del weight, optimizer

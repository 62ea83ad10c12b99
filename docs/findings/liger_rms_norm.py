# liger-kernel 0.8.5 with torch 2.11: gradients of RMSNorm are wrong in a graph, or memory of others is read.
import copy

import torch
from liger_kernel.transformers import LigerRMSNorm

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), LigerRMSNorm(1024), torch.nn.Linear(1024, 1024)).cuda()
compiled = torch.compile(copy.deepcopy(model))
for _ in range(3):
    x = torch.randn(512, 1024, device="cuda")
    expected, found = (torch.autograd.grad(run(x).square().mean(), run.parameters()) for run in (model, compiled))
    print([f"{(a - b).norm() / a.norm():.1e}" for a, b in zip(expected, found, strict=True)])

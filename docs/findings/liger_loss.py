# liger-kernel 0.8.5 with torch 2.11: the loss is wrong in a graph where a label is ignored (its pull request 1338).
import torch
from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

head, hidden = torch.randn(4096, 1024, device="cuda"), torch.randn(512, 1024, device="cuda")
labels = torch.randint(0, 4096, (512,), device="cuda")
labels[::4] = -100
loss = LigerFusedLinearCrossEntropyLoss()
print(float(loss(head, hidden, labels)), float(torch.compile(loss)(head, hidden, labels)))

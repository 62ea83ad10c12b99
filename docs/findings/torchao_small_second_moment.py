# torchao 0.18.0: a step of thousands of learning rates, where a small second moment has become zero.
import torch
from torchao.optim import AdamW8bit

weight = torch.nn.Parameter(torch.zeros(4096))
optimizer = AdamW8bit([weight], lr=1.0, weight_decay=0)
sizes = torch.where(torch.arange(4096) % 2 == 0, 1.0, 1e-3)
longest = 0.0
for seed in range(20):
    weight.grad = torch.randn(4096, generator=torch.Generator().manual_seed(seed)) * sizes
    before = weight.detach().clone()
    with torch.compiler.set_stance("force_eager"):  # its compilation takes long on a CPU
        optimizer.step()
    longest = max(longest, float((weight.detach() - before).abs().max()))
print(longest)  # AdamW makes 1.0

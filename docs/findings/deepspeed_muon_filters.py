# DeepSpeed 0.19.8: Muon's update of a convolution's filters has another shape, or raises. Set TORCH_COMPILE_DISABLE=1.
import torch

from deepspeed.runtime.zero.muon.original_muon import muon_update

for kernel in (1, 3):
    filters = torch.randn(8, 4, kernel, kernel)
    update = muon_update(filters.clone(), torch.zeros_like(filters))
    print(list(filters.shape), "becomes", list(update.shape))  # [8, 4, 8, 4], then RuntimeError

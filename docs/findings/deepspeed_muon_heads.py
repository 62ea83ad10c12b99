# DeepSpeed 0.19.8: per_head_muon has no effect where ZeRO-1/2 pads a parameter. Start with deepspeed.
import torch

import deepspeed


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4})()
        self.q_proj, self.odd = torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(3, 17, bias=False)

    def forward(self, x):
        return self.q_proj(x).square().sum() + self.odd(x[:, :3]).sum()


for aligned in (False, True):
    torch.manual_seed(0)
    model = Attention()
    before = model.q_proj.weight.detach().clone()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": {"lr": 1.0, "per_head_muon": True}},
        "zero_optimization": {"stage": 1, "parameter_alignment": aligned},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine.backward(engine(torch.eye(16)))
    engine.step()
    # If heads are orthogonalized one by one, the smallest singular value of the whole matrix is far from 1.
    print(aligned, torch.linalg.svdvals((before - model.q_proj.weight).detach())[-1].item())

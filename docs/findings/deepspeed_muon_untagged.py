# DeepSpeed 0.19.8: under ZeRO-1/2, a MuonWithAuxAdam that the caller makes is plain SGD. Start with deepspeed.
import torch

import deepspeed
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

model = torch.nn.Linear(4, 4, bias=False)
before = model.weight.detach().clone()
# With this line, Muon's: model.weight.use_muon = True
optimizer = MuonWithAuxAdam([{"params": [model.weight], "use_muon": True, "lr": 0.1}])
config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
engine.backward(engine(torch.eye(4)).square().sum())  # The gradient is 2 * weight.
engine.step()
print("plain SGD:", torch.allclose(model.weight, before - 0.1 * 2 * before))  # True

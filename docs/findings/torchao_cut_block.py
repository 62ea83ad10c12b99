# DeepSpeed 0.19.8 with torchao 0.18.0: a parameter that begins within a block ends the step. Start with deepspeed.
import torch
from torchao.optim import AdamW8bit

import deepspeed

model = torch.nn.Sequential(*[torch.nn.Linear(40, 40, bias=False) for _ in range(16)])  # 25600 = 100 * 256 parameters
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(model=model, optimizer=AdamW8bit(model.parameters()), config=config)[0]
engine.backward(engine(torch.ones(1, 40)).sum())
engine.step()  # ValueError: Invalid start or end ... Received start=0, end=1600

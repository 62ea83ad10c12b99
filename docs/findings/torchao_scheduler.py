# DeepSpeed 0.19.8 with torchao 0.18.0: a scheduler of DeepSpeed's ends the step. Start with deepspeed.
import torch
from torchao.optim import AdamW8bit

import deepspeed

model = torch.nn.Linear(64, 64, bias=False)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}
engine = deepspeed.initialize(model=model, optimizer=AdamW8bit(model.parameters()), config=config)[0]
engine.backward(engine(torch.ones(1, 64)).sum())
engine.step()  # RuntimeError: lr was changed to a non-Tensor object

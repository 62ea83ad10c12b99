# DeepSpeed 0.19.8 with torch 2.10 or newer: its removal of empty parameter groups breaks a scheduler made before.
import os

import torch

import deepspeed

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": []}])
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()
scheduler.step()  # ValueError: zip() argument 2 is longer than argument 1

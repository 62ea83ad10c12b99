# DeepSpeed 0.19.8 makes a new Adagrad with one group of those it is given. Start with deepspeed.
import torch

import deepspeed

model = torch.nn.Linear(4, 4)
groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.Adagrad(groups, lr=0.1), config=config)[0]
engine.backward(engine(torch.ones(1, 4)).sum())
engine.step()  # IndexError: list index out of range

# DeepSpeed 0.19.8: a scheduler of Adagrad has no effect, because the engine steps another one. Start with deepspeed.
import torch

import deepspeed

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step == 0 else 0.0)
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)[0]
for _ in range(3):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    print(schedule.get_last_lr(), engine.optimizer.param_groups[0]["lr"], model.weight[0, 0].item())

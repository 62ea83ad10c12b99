# prodigyopt 1.1.2 under ZeRO: each rank estimates a step size of its own. Start with deepspeed on 2 ranks.
import prodigyopt
import torch

import deepspeed

deepspeed.init_distributed("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine = deepspeed.initialize(model=model, optimizer=prodigyopt.Prodigy(model.parameters()), config=config)[0]
for _ in range(20):
    engine.backward(engine(torch.ones(1, 32)).square().sum())
    engine.step()
print(deepspeed.comm.get_rank(), engine.optimizer.param_groups[0]["d"])

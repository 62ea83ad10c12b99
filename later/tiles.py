import sys, os, json, dataclasses
import torch, deepspeed
from benchmarks.workload import build_model, Shape
from benchmarks import tiles
LAYERS, SEQ, MT, LT = 3, 8192, int(sys.argv[1]), int(sys.argv[2])
shape = Shape(LAYERS, 256, 768, 4, 2, 64, 2048, tie_word_embeddings=False)
dtype = torch.float32
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29876")
deepspeed.init_distributed("gloo")
def make(): 
    m = build_model(shape, dtype, "cpu", True)
    if MT: tiles.tile_mlps(m, MT)
    if LT: tiles.tile_loss(m, LT, True)
    return m
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "compile": {"deepcompile": True, "memory_picture": {"folder": "/tmp/exp/pic", "step": 3} if False else {"folder": "/tmp/exp/pic"}}, "steps_per_print": 10**9}
model = make()
from deepspeed.runtime.activation_checkpointing.offload_activations import CheckpointHiddenStatesOffload
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
engine.train()
for step in range(5):
    ids = torch.randint(0, 2048, (1, SEQ))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss); engine.step()
    print(step, loss.item())

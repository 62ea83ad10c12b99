import os, sys, torch, deepspeed, gc
from benchmarks.workload import build_model, Shape
from benchmarks import tiles
shape = Shape(4, 64, 128, 4, 2, 16, 256, tie_word_embeddings=False)
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29877")
deepspeed.init_distributed("gloo")
m = build_model(shape, torch.float32, "cpu", True)
if "mlp" in sys.argv: tiles.tile_mlps(m, 4)
if "loss" in sys.argv: tiles.tile_loss(m, 4, True)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}, "compile": {"deepcompile": "off" not in sys.argv}, "steps_per_print": 10**9}
from deepspeed.runtime.activation_checkpointing import offload_activations as oa
from deepspeed.compile.fixes.base import inputs_on_host
orig = inputs_on_host.brought_back
log = []
def brought_back(manager, number):
    inputs_on_host.reuse_memory(manager)
    log.append((number, sorted(manager._keep_last), sorted(manager._fwd_stash), sorted(manager._tracker)))
    return orig(manager, number)
inputs_on_host.brought_back = brought_back
engine, *_ = deepspeed.initialize(model=m, config=config, model_parameters=m.parameters())
engine.train()
off = oa.CheckpointHiddenStatesOffload(use_pin_memory=False, use_streams=False, min_offload_bytes=1); off._should_skip = lambda t: False
for step in range(3):
    ids = torch.randint(0, 256, (1, 64))
    log.clear()
    with off:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        inputs_on_host.reuse_memory(off)
        print("end", sorted(off._keep_last), sorted(off._tracker))
        for l in log: print(l)
    engine.step()

import os, sys, threading, time, traceback, gc, tempfile, shutil
mode = sys.argv[1]; rank=int(os.environ.setdefault("RANK","0")); os.environ.setdefault("WORLD_SIZE","1"); os.environ.setdefault("LOCAL_RANK",os.environ["RANK"]); os.environ.setdefault("MASTER_ADDR","127.0.0.1"); os.environ.setdefault("MASTER_PORT","29777")
os.environ["LOCAL_SIZE"]=os.environ["WORLD_SIZE"]
import torch, deepspeed
torch.set_num_threads(1)
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(s,w):
        super().__init__(); s.a=torch.nn.Linear(w,w)
    def forward(s,x): return x+torch.tanh(s.a(x))
class Body(torch.nn.Module):
    def __init__(s,w,n):
        super().__init__(); s.layers=torch.nn.ModuleList(Block(w) for _ in range(n))
    def forward(s,x):
        for l in s.layers: x=l(x)
        return x
W,N=1024,12
m=Body(W,N)
world=int(os.environ["WORLD_SIZE"])
opts={"deepcompile": mode!="off"}
if mode=="sharded": opts["shard_parameters"]="all"
if mode=="8bit": opts["optimizer_states"]="8bit"
if mode=="remainders": opts["store_param_remainders"]=True
cfg={"train_micro_batch_size_per_gpu":1,"bf16":{"enabled":True},"zero_optimization":{"stage":2},
 "optimizer":{"type":"AdamW","params":{"lr":1e-3,"torch_adam":True}},"compile":opts}
engine=deepspeed.initialize(model=m,model_parameters=m.parameters(),config=cfg)[0]
if mode!="off": engine.compile(backend="eager")
for _ in range(2):
    engine.backward(engine(torch.randn(1,W,dtype=torch.bfloat16)).float().square().mean()); engine.step()
gc.collect()
numel=sum(p.numel() for p in m.parameters())
gc.collect(); gc.disable()
before={id(o) for o in gc.get_objects() if isinstance(o,torch.Tensor)}
def big():
    return [o for o in gc.get_objects() if isinstance(o,torch.Tensor) and id(o) not in before and o.numel()>=numel]
engine.save_checkpoint("/tmp/ck/memout/cyc",tag="x")
found=big(); print("## alive after save:",len(found),[tuple(x.shape) for x in found],flush=True)
def describe(o):
    t=type(o).__name__
    if isinstance(o,dict): return f"dict{list(o)[:6]}"
    if t=="frame": return f"frame {o.f_code.co_name}:{o.f_lineno}"
    if t=="cell": return "cell"
    if t in("function","builtin_function_or_method","method"): return f"{t} {getattr(o,'__qualname__',o)}"
    if isinstance(o,(list,tuple)): return f"{t} len {len(o)} {[type(x).__name__ for x in o[:5]]}"
    return f"{t} {str(o)[:80]}" if not isinstance(o,torch.Tensor) else "Tensor"
seen=set()
def walk(o,depth):
    if depth>9 or id(o) in seen: return
    seen.add(id(o))
    for r in gc.get_referrers(o):
        if r is found or r is globals() or type(r).__name__ in("frame","list_iterator") or id(r) in seen: continue
        print("##"+"  "*depth, describe(r),flush=True); walk(r,depth+1)
if found: walk(found[0],1)

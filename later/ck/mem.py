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
def rss():
    with open("/proc/self/smaps_rollup") as f:
        d={l.split()[0][:-1]:int(l.split()[1]) for l in f.readlines()[1:]}
    return d["Rss"]/1024
numel=sum(p.numel() for p in m.parameters())
main=threading.main_thread().ident
seen=[];stop=False
def watch(base):
    last=base; peak=base
    while not stop:
        r=rss()
        if abs(r-last)>8:
            st=traceback.extract_stack(sys._current_frames()[main])
            seen.append((round(r-base),[f"{os.path.basename(x.filename)}:{x.lineno}:{x.name}" for x in st[-6:]])); last=r
        time.sleep(0.002)
d="/tmp/ck/memout/ck"
for turn in range(3):
    gc.collect(); seen.clear(); stop=False
    import ctypes; ctypes.CDLL("libc.so.6").malloc_trim(0)
    base=rss(); open("/proc/self/clear_refs","w").write("5")
    t=threading.Thread(target=watch,args=(base,)); t.start()
    t0=time.time(); engine.save_checkpoint(d,tag="x"); took=time.time()-t0; stop=True; t.join()
    hwm=[int(l.split()[1])/1024 for l in open("/proc/self/status") if l.startswith("VmHWM")][0]
    after=rss()
    print(f"rank{rank} {mode} turn {turn}: numel {numel/1e6:.1f}M partition states {12*numel/world/2**20:.0f} MiB base {base:.0f} peak +{hwm-base:.0f} after +{after-base:.0f} MiB took {took:.1f}s",flush=True)
    if rank==0 and turn in (0,2):
        for r,s in seen: print("   +%d"%r," < ".join(reversed(s)))
shutil.rmtree(d,ignore_errors=True)

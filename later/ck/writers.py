import os, sys, json, subprocess, shutil, time
if len(sys.argv) == 2 and sys.argv[1]=="main":
    cases=[("python",False,True,"no"),("python",True,True,"no"),("python",True,False,"no"),("python",False,True,"cut"),("python",False,False,"no")]
    for n,c in enumerate(cases):
        d=f"/tmp/ck/memout/w{n}"; shutil.rmtree(d,ignore_errors=True)
        ps=[]
        for r in range(2):
            env=dict(os.environ,RANK=str(r),LOCAL_RANK=str(r),WORLD_SIZE="2",LOCAL_SIZE="2",MASTER_ADDR="127.0.0.1",MASTER_PORT=str(29800+n),CROSS_SIZE="1",CROSS_RANK="0")
            ps.append(subprocess.Popen([sys.executable,__file__,json.dumps(c),d],env=env,stdout=subprocess.PIPE,stderr=subprocess.STDOUT,text=True))
        print("=====",c,flush=True)
        for r,p in enumerate(ps):
            try: out=p.communicate(timeout=100)[0]
            except subprocess.TimeoutExpired: p.kill(); out="TIMEOUT "+p.communicate()[0]
            print("".join(l+"\n" for l in out.splitlines() if l.startswith(("##","TIMEOUT")) or "Error" in l or "was not saved" in l or "is whole" in l or "datastates" in l.lower()),f"rank {r} rc {p.returncode}",flush=True)
    sys.exit()
kind,decoupled,dc,cut=json.loads(sys.argv[1]); d=sys.argv[2]; rank=int(os.environ["RANK"])
import torch, deepspeed
def main():
    torch.manual_seed(0)
    def make():
        m=torch.nn.Sequential(torch.nn.Linear(32,32),torch.nn.Tanh(),torch.nn.Linear(32,32))
        ck={"checkpoint":{"writer":{"type":kind,"decoupled":decoupled}}} if kind!="datastates" else {"datastates_ckpt":{"enabled":True}}
        cfg={"train_micro_batch_size_per_gpu":1,"zero_optimization":{"stage":1},"optimizer":{"type":"AdamW","params":{"lr":1e-2,"torch_adam":True}},"compile":{"deepcompile":dc},**ck}
        e=deepspeed.initialize(model=m,model_parameters=m.parameters(),config=cfg)[0]
        if dc: e.compile(backend="eager")
        return e
    def step(e):
        e.backward(e(torch.ones(1,32)).square().mean()); e.step()
    latest=lambda: open(d+"/latest").read() if os.path.exists(d+"/latest") else None
    e=make(); step(e)
    print("##",rank,type(e.checkpoint_engine).__name__)
    e.save_checkpoint(d,tag="one"); print("##",rank,"after save one: latest",latest())
    step(e); print("##",rank,"after the next step: latest",latest())
    if cut=="cut" and rank==1:
        import torch as t
        def fail(*a,**k): raise OSError("disk full")
        deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine.torch.save=fail
    try:
        e.save_checkpoint(d,tag="two")
    except Exception as x: print("##",rank,"save two raised",type(x).__name__,str(x)[:200])
    print("##",rank,"latest",latest(), sorted(os.listdir(d+"/two")))
    if cut=="cut": os._exit(0)
    a=[p.detach().clone() for p in e.module.parameters()]
    e.destroy(); print("##",rank,"after destroy: latest",latest())
    torch.distributed.barrier()
    kind2=kind
    e=make()
    try:
        r=e.load_checkpoint(d,tag="two"); print("##",rank,"loaded",r[0], all(torch.equal(x,y) for x,y in zip(a,e.module.parameters())))
    except Exception as x: print("##",rank,"load raised",type(x).__name__,str(x)[:200].replace("\n"," "))
    e.destroy()
if __name__=="__main__": main()

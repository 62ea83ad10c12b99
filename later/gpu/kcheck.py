import torch, sys
from deepspeed.compile.features.update import adam_kernel as k
from deepspeed.compile.features.update.adam_operators import Elements, Settings, Scalars, step_rows
from deepspeed.compile.features.update.remainders import split
torch.manual_seed(0)
shards=[256, 512, 3072, 256, 1280, 2304, 768]
grads=[256, 509, 3000, 10, 1280, 2304, 700]
n=sum(shards)
for rem in (False, True):
  for bits in (False, True):
    from deepspeed.compile.features.update.blockwise import SIGNED, map_of
    flat=torch.randn(3*n).bfloat16(); offs=[]; o=0
    for s in shards: offs.append((o, 3*o+s)); o+=s
    part=torch.cat([flat[p:p+s] for (o,p),s in zip(offs,shards)])
    master=torch.randn(n) if not rem else torch.randint(-30000,30000,(n,),dtype=torch.int16)
    G=[torch.randn(g).bfloat16() for g in grads]
    full=torch.cat([torch.nn.functional.pad(g,(0,s-g.numel())) for g,s in zip(G,shards)])
    sc=torch.tensor([0.7,0.01,0.002,0.1,0.05,0.01,0.3,0.4,1e-8])
    if bits:
        states=tuple(torch.randint(0,256,(n,),dtype=torch.uint8) for _ in range(2)); scales=tuple(torch.rand(n//256) for _ in range(2))
        like=torch.zeros(1); settings=Settings(sc, tuple(map_of(s, like) for s in SIGNED))
    else:
        states=(torch.randn(n), torch.rand(n)); scales=(); settings=Settings(sc)
    c=256 if bits else 16
    e=Elements(full.view(-1,c).clone(), master.view(-1,c).clone(), part.view(-1,c).clone(), tuple(s.view(-1,c).clone() for s in states), tuple(s.clone() for s in scales))
    step_rows(e, settings)
    before=flat.clone()
    runs=[k.Run(o, g, flat[p:p+s]) for (o,p),s,g in zip(offs,shards,G)]
    k.step_runs(runs[:3], master, settings, states, scales); k.step_runs(runs[3:], master, settings, states, scales)
    got=torch.cat([flat[p:p+s] for (o,p),s in zip(offs,shards)])
    rel=lambda a,b: ((a.double()-b.double()).norm()/b.double().norm()).item()
    mask=torch.ones(3*n,dtype=bool)
    for (o,p),s in zip(offs,shards): mask[p:p+s]=False
    print(rem,bits,"new",rel(got,e.new.view(-1)),"master",rel(master,e.master.view(-1)) if not rem else (master!=e.master.view(-1)).float().mean().item(), "states",[ (a!=b.view(-1)).float().mean().item() if bits else rel(a,b.view(-1)) for a,b in zip(states,e.states)], "outside", torch.equal(before[mask],flat[mask]), "scales", [rel(a,b) for a,b in zip(scales,e.scales)])

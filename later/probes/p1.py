from h import *
import h
@case
def plain(E):
    m = LM(); e = E.engine(m)
    for s in range(4):
        ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    return e
class GatherGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(2)]; dist.all_gather(out, x.contiguous()); return torch.cat(out)
    @staticmethod
    def backward(ctx, g):
        g = g.contiguous(); dist.all_reduce(g); n = g.shape[0] // 2; return g[dist.get_rank() * n:(dist.get_rank() + 1) * n]
@case
def contrastive_two_forwards(E):
    m = Vec(); e = E.engine(m)
    for s in range(3):
        a, b = e(E.f(s, 0, shape=(4, 32))), e(E.f(s, 1, shape=(4, 32)))
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        A, B = GatherGrad.apply(a), GatherGrad.apply(b)
        loss = F.cross_entropy(A @ B.T * 5, torch.arange(8)); e.backward(loss); e.step()
    return e
@case
def contrastive_functional_allgather(E):
    import torch.distributed.nn.functional as DF
    m = Vec(); e = E.engine(m)
    for s in range(3):
        a, b = e(torch.cat([E.f(s, 0, shape=(4, 32)), E.f(s, 1, shape=(4, 32))])).chunk(2)
        A, B = torch.cat(DF.all_gather(a)), torch.cat(DF.all_gather(b))
        e.backward(F.cross_entropy(A @ B.T, torch.arange(8))); e.step()
    return e
@case
def gradcache(E):
    m = Vec(); e = E.engine(m, gradient_accumulation_steps=1)
    if E.on: e.compile(backend=h.BACKEND)
    for s in range(3):
        xs = [E.f(s, i, shape=(4, 32)) for i in range(4)]
        with torch.no_grad(): reps = [e(x) for x in xs]
        reps = [r.detach().requires_grad_() for r in reps]
        A, B = torch.cat(reps[:2]), torch.cat(reps[2:])
        F.cross_entropy(A @ B.T, torch.arange(8)).backward()
        for i, (x, r) in enumerate(zip(xs, reps)):
            e.set_gradient_accumulation_boundary(i == 3)
            e.backward((e(x) * r.grad).sum())
        e.set_gradient_accumulation_boundary(True)
        e.step()
        e.set_gradient_accumulation_boundary(None) if False else None
    return e
@case
def gan_two_engines(E):
    g, d = Vec(out=32), Vec(out=1); eg, ed = E.engine(g, adam=True, lr=0.02), E.engine(d, adam=True, lr=0.02)
    for s in range(3):
        z, real = E.f(s, 0), E.f(s, 1)
        fake = eg(z)
        ed.backward(F.softplus(-ed(real)).mean() + F.softplus(ed(fake.detach())).mean()); ed.step()
        d.requires_grad_(False)
        eg.backward(F.softplus(-ed(fake)).mean()); eg.step()
        d.requires_grad_(True)
    return E.params(eg) | {"d" + k: v for k, v in E.params(ed).items()}
@case
def gan_one_forward_both(E):
    g, d = Vec(out=32), Vec(out=1); eg, ed = E.engine(g), E.engine(d)
    for s in range(3):
        z, real = E.f(s, 0), E.f(s, 1)
        fake = eg(z); lr_, lf = ed(real), ed(fake)
        lg = F.softplus(-lf).mean()
        eg.backward(lg, retain_graph=False); eg.step(); ed.optimizer.zero_grad()
        fake = eg(z).detach()
        ed.backward(F.softplus(-ed(real)).mean()); 
        ed.step()
    return E.params(eg) | {"d" + k: v for k, v in E.params(ed).items()}
@case
def batch_size_changed(E):
    m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    k = 0
    for s, acc in enumerate([2, 2, 3, 3, 1, 1, 2]):
        e.set_train_batch_size(2 * 2 * acc)
        for i in range(acc):
            ids = E.x(s, i); e.backward(ce(e(ids), ids)); e.step()
    return E.params(e) | {"steps": e.global_steps}
@case
def no_sync(E):
    m = LM(); e = E.engine(m)
    for s in range(3):
        if E.stage == 1:
            with e.no_sync():
                for i in range(2): ids = E.x(s, i); e.backward(ce(e(ids), ids))
        ids = E.x(s, 2); e.backward(ce(e(ids), ids)); e.step()
    return e
@case
def unfreezing(E):
    m = LM(n=4); 
    e = E.engine(m, params=list(m.parameters()))
    for s in range(8):
        for i, l in enumerate(m.body.layers): l.requires_grad_(i >= 3 - s // 2)
        m.emb.requires_grad_(s >= 6)
        ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    return e
class LoraBlock(Block):
    def __init__(self, d=32, h=64):
        super().__init__(d, h); self.A = nn.Parameter(torch.randn(4, d) * .2); self.B = nn.Parameter(torch.randn(d, 4) * .2)
        for p in (*self.norm.parameters(), *self.up.parameters(), *self.down.parameters()): p.requires_grad_(False)
    def forward(self, x): return super().forward(x) + x @ self.A.T @ self.B.T
@case
def lora_alternate(E):
    m = LM(n=3, block=LoraBlock); e = E.engine(m)
    for s in range(6):
        for n, p in m.named_parameters():
            if n.endswith(".A"): p.requires_grad_(s % 2 == 0)
            if n.endswith(".B"): p.requires_grad_(s % 2 == 1)
        ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    return e
@case
def lr_by_groups(E):
    m = LM(); dec = [p for p in m.parameters() if p.ndim > 1]; no = [p for p in m.parameters() if p.ndim < 2]
    opt = torch.optim.AdamW([{"params": dec, "weight_decay": 0.1}, {"params": no, "weight_decay": 0.0, "lr": 0.05}], lr=0.02, eps=0.1)
    e = E.engine(m, optimizer=opt)
    for s in range(6):
        for i, g in enumerate(e.optimizer.param_groups): g["lr"] = [0.02, 0.0, 0.05, 0.01, 0, 0.02][s] * (1 + i); g["betas"] = (0.9 - 0.05 * s, 0.99); g["weight_decay"] = 0.02 * s
        ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    return e
@case
def head_replaced_new_engine(E):
    m = LM(); e = E.engine(m)
    for s in range(2): ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    with E.whole(e): e.destroy() if not E.sharded else None
    if E.sharded: e.destroy()
    E.engines.clear()
    torch.manual_seed(5)
    old = m.emb.weight.detach()
    m.emb = nn.Embedding(60, 32); m.head = nn.Linear(32, 60, bias=False)
    with torch.no_grad(): m.emb.weight[:50] = old
    e = E.engine(m)
    for s in range(3): ids = E.x(s, vocab=60); e.backward(ce(e(ids), ids)); e.step()
    return e
@case
def head_replaced_without_destroy(E):
    m = LM(); e = E.engine(m)
    for s in range(2): ids = E.x(s); e.backward(ce(e(ids), ids)); e.step()
    torch.manual_seed(5)
    if E.sharded: e.destroy()
    m.head = nn.Linear(32, 60, bias=False)
    e = E.engine(m); E.engines[:] = [e]
    for s in range(3): ids = E.x(s, vocab=50); e.backward(ce(e(ids), ids)); e.step()
    return e
if __name__ == "__main__": main()

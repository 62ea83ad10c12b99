from h import *
import h, pickle
from torch.optim import swa_utils
def run(E, e, steps, start=0, loss=None, ids=None):
    for s in range(start, start + steps):
        x = E.x(s); e.backward(loss(e, x) if loss else ce(e(x), x)); e.step()
@case
def deepcopy_pickle_between(E):
    m = LM(); e = E.engine(m); out = {}
    for s in range(3):
        run(E, e, 1, s)
        with E.whole(e):
            c = copy.deepcopy(e.module); c.eval()
            buf = io.BytesIO(); torch.save(e.module, buf); buf.seek(0); l = torch.load(buf, weights_only=False)
            with torch.no_grad(): out[f"c{s}"] = c(E.x(9)); out[f"l{s}"] = l(E.x(9))
            d = pickle.loads(pickle.dumps(e.module.state_dict())); out[f"d{s}"] = d["emb.weight"]
        # copies train by themselves
        l.train(); ce(l(E.x(8)), E.x(8)).backward(); out[f"g{s}"] = l.emb.weight.grad
    return E.params(e) | out
@case
def swa(E):
    m = LM(); e = E.engine(m)
    avg = swa_utils.AveragedModel(e.module) if not E.sharded else None
    if E.sharded:
        run(E, e, 1)
        avg = swa_utils.AveragedModel(e.module)
    else: run(E, e, 1)
    for s in range(1, 4):
        run(E, e, 1, s); avg.update_parameters(e.module)
    ema = swa_utils.AveragedModel(e.module, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    for s in range(4, 7):
        run(E, e, 1, s); ema.update_parameters(e.module)
    with E.whole(e): pass
    return E.params(e) | {"a" + n: p for n, p in avg.named_parameters()} | {"e" + n: p for n, p in ema.named_parameters()}
@case
def functional_call_stacked(E):
    m = LM(); e = E.engine(m); run(E, e, 2); out = {}
    with E.whole(e):
        ps, bs = torch.func.stack_module_state([e.module, e.module])
        base = copy.deepcopy(m).to("meta")
        out["v"] = torch.vmap(lambda p, b, x: torch.func.functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(ps, bs, E.x(7))
        out["f"] = torch.func.functional_call(e.module, {k: v * 1.1 for k, v in e.module.named_parameters()}, (E.x(7),)).detach()
    run(E, e, 2, 2)
    return E.params(e) | out
@case
def functional_call_in_training(E):
    m = LM(); e = E.engine(m)
    run(E, e, 1)
    for s in range(1, 4):
        with E.whole(e):
            noisy = {k: v.detach() + 0.01 * torch.randn(v.shape, generator=E.gen(s, i)) for i, (k, v) in enumerate(e.module.named_parameters())}
            with torch.no_grad(): t = torch.func.functional_call(e.module, noisy, (E.x(s),))
        x = E.x(s); o = e(x)
        e.backward(ce(o, x) + (o - t).square().mean()); e.step()
    return e
@case
def full_backward_hooks_all_modules(E):
    m = LM(); seen = {}
    def hook(n):
        def f(mod, gi, go): seen[n] = seen.get(n, 0) + float(go[0].abs().sum())
        return f
    for n, mod in m.named_modules():
        if n.startswith("body.layers") and n.count(".") == 2 or n == "head": mod.register_full_backward_hook(hook(n))
    e = E.engine(m); run(E, e, 3)
    return E.params(e) | {k: torch.tensor(v) for k, v in seen.items()}
@case
def post_accumulate_and_tensor_hooks(E):
    m = LM(); e = E.engine(m); seen = {}
    run(E, e, 1)
    hs = []
    for n, p in m.named_parameters():
        hs.append(p.register_hook(lambda g: g.clamp(-0.01, 0.01)))
        hs.append(p.register_post_accumulate_grad_hook(lambda p, n=n: seen.__setitem__(n, seen.get(n, 0) + float(p.grad.abs().sum()) if p.grad is not None else -1.0)))
    run(E, e, 2, 1)
    for x in hs: x.remove()
    run(E, e, 1, 3)
    return E.params(e) | {"h" + k: torch.tensor(v) for k, v in seen.items()}
@case
def activation_hooks(E):
    m = LM(); e = E.engine(m); got = []
    run(E, e, 1)
    h1 = m.body.layers[1].register_forward_hook(lambda mod, i, o: got.append(o.detach().mean()) or o * 1.01)
    h2 = m.head.register_forward_pre_hook(lambda mod, a: (a[0] * 0.9,))
    run(E, e, 2, 1); h1.remove(); run(E, e, 1, 3); h2.remove(); run(E, e, 1, 4)
    return E.params(e) | {"got": torch.stack(got)}
@case
def autograd_grad_penalty(E):
    m = Vec(out=1); e = E.engine(m); out = {}
    for s in range(3):
        x = E.f(s).requires_grad_()
        with torch.compiler.set_stance("force_eager"):
            y = e(x); g, = torch.autograd.grad(y.sum(), x, create_graph=True)
            e.backward(y.square().mean() + (g.norm(dim=1) - 1).square().mean())
        e.step()
    return e
@case
def autograd_grad_params(E):
    # gradnorm: balance two losses by the norm of the grads at the last shared layer
    m = Vec(out=2); e = E.engine(m); out = {}; w = torch.ones(2)
    import torch._functorch.config as fc
    fc.donated_buffer = False
    for s in range(3):
        y = e(E.f(s)); ls = [y[:, 0].square().mean(), (y[:, 1] - 1).abs().mean()]
        shared = m.out.weight
        gs = [torch.autograd.grad(l, shared, retain_graph=True)[0].norm() for l in ls]
        w = torch.stack([gs[1], gs[0]]) / sum(gs); out[f"w{s}"] = w
        e.backward(w[0] * ls[0] + w[1] * ls[1]); e.step()
    fc.donated_buffer = True
    return E.params(e) | out
@case
def selective_checkpoint(E):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, CheckpointPolicy
    import functools
    def policy(ctx, op, *a, **k): return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default or op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
    class B2(Body):
        def forward(self, x):
            for l in self.layers: x = checkpoint(l, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
            return x
    m = LM(); b = B2(3); m.body = b; e = E.engine(m); run(E, e, 3); return e
@case
def selective_checkpoint_within(E):
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, CheckpointPolicy
    import functools
    ops = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    class Bk(Block):
        def forward(self, x):
            return x + checkpoint(lambda y: self.down(F.gelu(self.up(self.norm(y)))), x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, ops))
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
class MySwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w): ctx.save_for_backward(x, w); return x * torch.sigmoid(x) @ w
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors; s = torch.sigmoid(x); h = x * s
        return (g @ w.T) * (s * (1 + x * (1 - s))), (h.reshape(-1, h.shape[-1]).T @ g.reshape(-1, g.shape[-1]))
@case
def custom_function_in_block(E):
    class Bk(nn.Module):
        def __init__(self, d=32): super().__init__(); self.norm = nn.LayerNorm(d); self.w = nn.Parameter(torch.randn(d, d) * .1)
        def forward(self, x): return x + MySwish.apply(self.norm(x), self.w)
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
@case
def odd_parameters(E):
    class Bk(Block):
        def __init__(self, d=32):
            super().__init__(d); self.gate = nn.Parameter(torch.tensor(0.5)); self.register_buffer("rot", torch.polar(torch.ones(d // 2), torch.arange(d // 2).float()))
            self.register_buffer("ema", torch.zeros(d)); self.register_buffer("n", torch.tensor(0)); self.pl = nn.ParameterList([torch.randn(d) * .1 for _ in range(2)]); self.pd = nn.ParameterDict({"a": torch.ones(1), "b": torch.zeros(d)})
        def forward(self, x):
            if self.training:
                with torch.no_grad(): self.ema.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1); self.n += 1
            r = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * self.rot).flatten(-2)
            return super().forward(x) + self.gate * torch.tanh(r * self.pl[0] + self.pl[1]) * self.pd["a"] + self.pd["b"]
    m = LM(block=Bk); m.scale = nn.Parameter(torch.tensor(1.0)); m.register_buffer("cc", torch.ones(3, dtype=torch.complex64))
    e = E.engine(m); run(E, e, 4, loss=lambda e, x: ce(e(x) * m.scale, x)); return e
@case
def batchnorm_conv(E):
    class Bk(nn.Module):
        def __init__(self, c=16): super().__init__(); self.c = nn.Conv2d(c, c, 3, padding=1); self.bn = nn.BatchNorm2d(c)
        def forward(self, x): return x + F.relu(self.bn(self.c(x)))
    class R(nn.Module):
        def __init__(self): super().__init__(); self.inp = nn.Conv2d(3, 16, 3, padding=1); self.body = Body(3, 16, Bk); self.out = nn.Linear(16, 10)
        def forward(self, x): return self.out(self.body(self.inp(x)).mean((2, 3)))
    m = R(); e = E.engine(m); out = {}
    for s in range(4):
        x = E.f(s, shape=(4 if s != 3 else 2, 3, 8, 8)); e.backward(F.cross_entropy(e(x), torch.arange(x.shape[0]), label_smoothing=0.1)); e.step()
        e.eval()
        with torch.no_grad(): out[f"o{s}"] = e(E.f(7, shape=(4, 3, 8, 8)))
        e.train()
    return E.params(e) | out
@case
def stochastic_depth_by_rank(E):
    class SD(Body):
        def forward(self, x):
            for i, l in enumerate(self.layers):
                keep = float(torch.rand((), generator=self.g)) > 0.4
                if E.sharded: x = x + (l(x) - x) * (1.0 if keep else 0.0)
                elif keep: x = l(x)
            return x
    m = LM(n=4); b = SD(4); m.body = b; b.g = E.gen(3, E.rank)
    e = E.engine(m); run(E, e, 6); return e
@case
def early_exit_by_batch(E):
    class SD(Body):
        def forward(self, x):
            for i, l in enumerate(self.layers[: self.k]): x = l(x)
            return x
    m = LM(n=4); m.body = SD(4); e = E.engine(m)
    for s, k in enumerate([4, 2, 3, 1, 4, 0, 4]): m.body.k = k; run(E, e, 1, s)
    return e
@case
def mixture_idle_rank(E):
    class MoE(nn.Module):
        def __init__(self, d=32): super().__init__(); self.gate = nn.Linear(d, 4); self.ex = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(4))
        def forward(self, x):
            p = self.gate(x).softmax(-1); v, i = p.max(-1); o = torch.zeros_like(x)
            for k, ex in enumerate(self.ex):
                mask = i == k
                if mask.any(): o = o.masked_scatter(mask[..., None], ex(x[mask]) * v[mask][:, None])
            return x + o
    m = LM(block=MoE); e = E.engine(m); 
    if E.sharded and E.on: pass
    run(E, e, 4); return e
@case
def uneven_last_batch(E):
    m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    for ep in range(2):
        for s in range(3):
            for i in range(2):
                n = 3 if s < 2 else (1 + E.rank)
                x = E.x(ep, s, i, shape=(n, 8 if s < 2 else 5)); e.backward(ce(e(x), x)); e.step()
    return e
if __name__ == "__main__": main()

from h import *
import h, types
def run(E, e, steps, start=0, loss=None, acc=1):
    for s in range(start, start + steps):
        for i in range(acc):
            x = E.x(s, i); e.backward(loss(e, x) if loss else ce(e(x), x)); e.step()
@case
def l2_penalty_of_all(E):
    m = LM(); p0 = [p.detach().clone() for p in m.parameters()]; e = E.engine(m)
    run(E, e, 3, loss=lambda e, x: ce(e(x), x) + 0.05 * sum((p - q).square().sum() for p, q in zip(m.parameters(), p0))); return e
@case
def orthogonal_penalty_some(E):
    m = LM(); e = E.engine(m)
    run(E, e, 3, loss=lambda e, x: ce(e(x), x) + 0.01 * sum((w @ w.T - torch.eye(len(w))).square().sum() for w in (l.down.weight for l in m.body.layers[:2]))); return e
@case
def prune_mid_training(E):
    from torch.nn.utils import prune
    m = LM(); e = E.engine(m); run(E, e, 2)
    with E.whole(e):
        for l in m.body.layers: prune.l1_unstructured(l.up, "weight", 0.4)
    run(E, e, 2, 2)
    with E.whole(e): pass
    return e
@case
def parametrize_mid_training(E):
    from torch.nn.utils import parametrize
    class Sym(nn.Module):
        def forward(self, w): return w * 0.9
    m = LM(); e = E.engine(m); run(E, e, 2)
    with E.whole(e): parametrize.register_parametrization(m.body.layers[1].up, "weight", Sym()); parametrize.register_parametrization(m.head, "weight", Sym())
    run(E, e, 3, 2); return e
@case
def layer_removed_mid_training(E):
    m = LM(n=4); e = E.engine(m); run(E, e, 2); 
    gone = m.body.layers[1]; del m.body.layers[1]; run(E, e, 2, 2)
    m.body.layers = nn.ModuleList(reversed(list(m.body.layers))); run(E, e, 2, 4); return e
@case
def annealed_attribute(E):
    class Bk(Block):
        t = 1.0
        def forward(self, x): return x + self.down(torch.tanh(self.up(self.norm(x)) / self.t))
    m = LM(block=Bk); e = E.engine(m)
    for s in range(14):
        for l in m.body.layers: l.t = 1.0 + 0.1 * s; l.step = s
        run(E, e, 1, s)
    return e
@case
def annealed_int_and_str(E):
    class Bk(Block):
        def forward(self, x):
            y = self.norm(x)
            for _ in range(self.k): y = torch.tanh(y)
            return x + self.down((F.gelu if self.act == "gelu" else F.relu)(self.up(y)))
    m = LM(block=Bk); e = E.engine(m)
    for s in range(12):
        for i, l in enumerate(m.body.layers): l.k = (s * 7 + i) % 11; l.act = ["gelu", "relu"][s % 2]
        run(E, e, 1, s)
    return e
@case
def aux_loss_attribute(E):
    class Bk(Block):
        def forward(self, x): y = super().forward(x); self.l_aux = y.square().mean(); return y
    m = LM(block=Bk); e = E.engine(m, gradient_accumulation_steps=2)
    run(E, e, 3, loss=lambda e, x: ce(e(x), x) + 0.01 * sum(l.l_aux for l in m.body.layers), acc=2); return e
@case
def aux_loss_global_list(E):
    L = []
    class Bk(Block):
        def forward(self, x): y = super().forward(x); L.append(y.square().mean()); return y
    m = LM(block=Bk); e = E.engine(m)
    def loss(e, x): L.clear(); l = ce(e(x), x); return l + 0.01 * sum(L)
    run(E, e, 3, loss=loss); return e
@case
def hooked_features_in_loss(E):
    f = {}
    m = LM(); 
    for i, l in enumerate(m.body.layers): l.register_forward_hook(lambda mod, a, o, i=i: f.__setitem__(i, o))
    e = E.engine(m)
    run(E, e, 3, loss=lambda e, x: ce(e(x), x) + 0.01 * sum(v.abs().mean() for v in list(f.values()))); return e
@case
def features_hooked_inside(E):
    f = {}
    m = LM(); m.body.layers[1].up.register_forward_hook(lambda mod, a, o: f.__setitem__("up", o)); e = E.engine(m)
    def loss(e, x): l = ce(e(x), x); return l + 0.05 * f["up"].square().mean()
    run(E, e, 3, loss=loss); return e
@case
def retain_grad_gradcam(E):
    f = {}; out = {}
    m = LM(); m.body.layers[1].register_forward_hook(lambda mod, a, o: (o.retain_grad() if o.requires_grad else None, f.__setitem__("a", o))[1]); e = E.engine(m)
    for s in range(3): x = E.x(s); e.backward(ce(e(x), x)); out[f"g{s}"] = f["a"].grad; e.step()
    return E.params(e) | out
@case
def input_gradients_adversarial(E):
    m = Vec(); e = E.engine(m); t = torch.arange(2)
    for s in range(3):
        x = E.f(s).requires_grad_(); g, = torch.autograd.grad(F.cross_entropy(e(x), t), x)
        e.backward(F.cross_entropy(e((x + 0.1 * g.sign()).detach()), t)); e.step()
    return e
@case
def freeat_adversarial(E):
    # free adversarial training: gradient of the input from the same backward
    m = Vec(); e = E.engine(m); t = torch.arange(2); out = {}; d = torch.zeros(2, 32)
    for s in range(4):
        x = (E.f(0) + d).detach().requires_grad_(); e.backward(F.cross_entropy(e(x), t)); e.step(); d = d + 0.1 * x.grad.sign(); out[f"{s}"] = x.grad
    return E.params(e) | out
@case
def embedding_gradient_freelb(E):
    class M(LM):
        def forward(self, ids=None, emb=None): return self.head(self.body(self.emb(ids) if emb is None else emb))
    m = M(); e = E.engine(m)
    for s in range(3):
        x = E.x(s); d = torch.zeros(2, 8, 32, requires_grad=True)
        for k in range(2):
            e.set_gradient_accumulation_boundary(k == 1)
            l = ce(e(emb=m.emb(x) + d), x) / 2; e.backward(l); d = (d.grad.sign() * 0.05 if d.grad is not None else d).detach().requires_grad_()
        e.step()
    return e
@case
def skip_after_forward_all(E):
    m = LM(); e = E.engine(m)
    for s in range(6):
        x = E.x(s); l = ce(e(x), x)
        bad = torch.tensor(float(s in (2, 3) and E.rank == 0)); dist.all_reduce(bad)
        if bad: del l; continue
        e.backward(l); e.step()
    return e
@case
def dummy_loss_on_a_rank(E):
    m = LM(); e = E.engine(m)
    for s in range(4):
        x = E.x(s)
        if s == 2 and E.rank == 1:
            l = sum(p.sum() * 0 for p in m.parameters()) if not E.sharded else ce(e(x), x) * 0
        else: l = ce(e(x), x)
        e.backward(l); e.step()
    return e
@case
def loss_backward_direct(E):
    m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    for s in range(3):
        for i in range(2): x = E.x(s, i); l = ce(e(x), x); l.backward(); e.step()
    return e
@case
def module_called_directly(E):
    m = LM(); e = E.engine(m)
    for s in range(4): x = E.x(s); l = ce((m if s % 2 else e)(x), x); e.backward(l); e.step()
    return e
@case
def parts_called(E):
    m = LM(); e = E.engine(m)
    for s in range(4): x = E.x(s); h_ = m.body(m.emb(x)); e.backward(ce(m.head(h_), x)); e.step()
    return e
@case
def fork_workers(E):
    from torch.utils.data import DataLoader, Dataset
    class D(Dataset):
        def __init__(self, r): self.r = r
        def __len__(self): return 10
        def __getitem__(self, i): return torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(100 * self.r + i))
    m = LM(); e = E.engine(m); run(E, e, 1)
    for ep in range(2):
        for x in DataLoader(D(E.rank), 4, num_workers=2): e.backward(ce(e(x), x)); e.step()
    return e
@case
def anomaly_profiler_deterministic(E):
    m = LM(); e = E.engine(m); run(E, e, 1)
    with torch.autograd.detect_anomaly(check_nan=True): run(E, e, 1, 1)
    with torch.profiler.profile() as p: run(E, e, 1, 2)
    torch.use_deterministic_algorithms(True); run(E, e, 1, 3); torch.use_deterministic_algorithms(False)
    with torch.autograd.set_multithreading_enabled(False): run(E, e, 1, 4)
    with torch.autograd.graph.save_on_cpu(): run(E, e, 1, 5)
    return e
@case
def lr_finder(E):
    m = LM(); e = E.engine(m, adam=True, lr=0.02); run(E, e, 1)
    with E.whole(e): sd = copy.deepcopy(m.state_dict())
    osd = copy.deepcopy(e.optimizer.state_dict())
    for s in range(4):
        for g in e.optimizer.param_groups: g["lr"] = 1e-3 * 2 ** s
        run(E, e, 1, 1 + s)
    m.load_state_dict(sd); e.optimizer.load_state_dict(osd)
    for g in e.optimizer.param_groups: g["lr"] = 0.02
    run(E, e, 2, 5); return e
@case
def reptile(E):
    from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
    m = LM(); e = E.engine(m)
    for it in range(2):
        old = [safe_get_full_fp32_param(p).clone() for p in m.parameters()]
        run(E, e, 2, 10 * it)
        for p, o in zip(m.parameters(), old): safe_set_full_fp32_param(p, o + 0.5 * (safe_get_full_fp32_param(p) - o))
        e.optimizer.update_lp_params() if hasattr(e.optimizer, "update_lp_params") else None
    run(E, e, 1, 50); return e
@case
def optional_inputs(E):
    class M(LM):
        def __init__(self): super().__init__(); self.img = nn.Linear(12, 32)
        def forward(self, *, ids, image=None, **kw):
            x = self.emb(ids)
            if image is not None: x = torch.cat([self.img(image), x], 1)
            return {"logits": self.head(self.body(x))[:, -8:], **{k: v for k, v in kw.items() if k == "tag"}}
    m = M(); e = E.engine(m)
    for s in range(5):
        x = E.x(s); kw = {"image": E.f(s, shape=(2, 1 + s % 3, 12))} if s in (1, 2, 4) else {}
        if s == 2: kw["tag"] = "a"
        e.backward(ce(e(ids=x, **kw)["logits"], x)); e.step()
    return e
@case
def data_dependent_branch(E):
    class Bk(Block):
        def __init__(self, d=32): super().__init__(d); self.alt = nn.Linear(d, d)
        def forward(self, x):
            if (x.sum() * 1000).long().item() % 2 == 0: return super().forward(x)
            return x + self.alt(x)
    m = LM(block=Bk, n=4); e = E.engine(m); run(E, e, 5); return e
@case
def prints_and_item(E):
    class Bk(Block):
        calls = 0
        def forward(self, x):
            Bk.calls += 1; y = self.up(self.norm(x)); print("mean", float(y.mean()), flush=False); 
            try: assert torch.isfinite(y).all()
            except AssertionError: y = torch.zeros_like(y)
            return x + self.down(F.gelu(y))
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return E.params(e) | {"calls": Bk.calls}
@case
def transformer_encoder(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 32, padding_idx=0); self.t = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True), 3, enable_nested_tensor=False); self.head = nn.Linear(32, 50)
        def forward(self, x): return self.head(self.t(self.emb(x), mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), src_key_padding_mask=torch.zeros(x.shape)))
    m = M(); e = E.engine(m); out = {}
    for s in range(3):
        run(E, e, 1, s); e.eval()
        with torch.inference_mode(): out[f"{s}"] = e(E.x(9)).clone()
        e.train()
    return E.params(e) | {k: v.clone() for k, v in out.items()}
@case
def nn_transformer_full(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 32); self.t = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True); self.head = nn.Linear(32, 50)
        def forward(self, x): y = self.emb(x); return self.head(self.t(y, y.flip(1), tgt_mask=nn.Transformer.generate_square_subsequent_mask(8), tgt_is_causal=True))
    m = M(); e = E.engine(m); run(E, e, 3); return e
@case
def embedding_bag_ctc(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.b = nn.EmbeddingBag(50, 32, mode="mean", padding_idx=0); self.body = Body(2); self.o = nn.Linear(32, 12)
        def forward(self, x): return self.o(self.body(self.b(x.reshape(-1, 4)).reshape(2, 10, 32))).log_softmax(-1).transpose(0, 1)
    m = M(); e = E.engine(m)
    for s in range(3): e.backward(F.ctc_loss(e(E.x(s, shape=(2, 40))), E.x(s, 1, shape=(2, 4), vocab=11) + 1, torch.tensor([10, 9]), torch.tensor([4, 3]), zero_infinity=True)); e.step()
    return e
@case
def fft_linalg(E):
    class Bk(nn.Module):
        def __init__(self, d=32): super().__init__(); self.w = nn.Parameter(torch.randn(5, d, 2) * .1); self.g = nn.Parameter(torch.eye(d) + .01 * torch.randn(d, d)); self.n = nn.LayerNorm(d)
        def forward(self, x):
            y = torch.fft.irfft(torch.fft.rfft(self.n(x), dim=1) * torch.view_as_complex(self.w), n=x.shape[1], dim=1)
            return x + y @ torch.linalg.inv(self.g) 
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
@case
def dropout_changed(E):
    class Bk(Block):
        def __init__(self, d=32): super().__init__(d); self.dr = nn.Dropout(0.3)
        def forward(self, x): return x + self.dr(self.down(F.gelu(self.up(self.norm(x)))))
    m = LM(block=Bk); e = E.engine(m)
    for s in range(6):
        for l in m.body.layers: l.dr.p = [0.3, 0.3, 0.1, 0.0, 0.2, 0.3][s]
        torch.manual_seed(100 + s); run(E, e, 1, s)
    return e
@case
def part_in_eval(E):
    class Bk(nn.Module):
        def __init__(self, d=32): super().__init__(); self.l = nn.Linear(d, d); self.b = nn.BatchNorm1d(d)
        def forward(self, x): return x + self.b(self.l(x))
    m = Vec(block=Bk); e = E.engine(m)
    for s in range(5):
        m.train(); [l.eval() for l in m.body.layers[: s % 3]]
        e.backward(F.cross_entropy(e(E.f(s, shape=(4, 32))), torch.arange(4))); e.step()
    return e
@case
def many_engines(E):
    out = {}
    for k in range(4):
        torch.manual_seed(k); m = LM(n=2 + k % 2, d=32 if k != 2 else 16); e = E.engine(m); run(E, e, 2, k); out |= {f"{k}{n}": v for n, v in E.params(e).items()}; e.destroy(); E.engines.clear(); del e, m
    return out
@case
def actor_critic_shared_trunk_one_engine_wrapper(E):
    class AC(nn.Module):
        def __init__(self): super().__init__(); self.actor = LM(); self.critic = LM(); self.critic.head = nn.Linear(32, 1)
        def forward(self, ids, which): return getattr(self, which)(ids)
    m = AC(); e = E.engine(m)
    for s in range(4):
        x = E.x(s)
        e.backward(ce(e(x, "actor"), x) + 0.1 * e(x, "critic").square().mean() if s != 2 else e(x, "critic").square().mean()); e.step()
    return e
@case
def vae_reparam_two_optim_groups(E):
    class V(nn.Module):
        def __init__(self): super().__init__(); self.enc = Vec(out=16); self.dec = Vec(d=8, out=32)
        def forward(self, x, eps): mu, lv = self.enc(x).chunk(2, -1); return self.dec(mu + eps * (lv / 2).exp()), mu, lv
    m = V(); e = E.engine(m, optimizer=torch.optim.AdamW([{"params": m.enc.parameters(), "lr": 0.01}, {"params": m.dec.parameters(), "lr": 0.03, "betas": (0.5, 0.9)}], eps=0.1))
    for s in range(4):
        x = E.f(s, shape=(4, 32)); r, mu, lv = e(x, E.f(s, 1, shape=(4, 8))); b = min(1.0, s / 3); e.backward(F.mse_loss(r, x) + b * -0.5 * (1 + lv - mu ** 2 - lv.exp()).mean()); e.step()
    return e
@case
def weights_zeroed_soft_threshold(E):
    m = LM(); e = E.engine(m)
    for s in range(4):
        run(E, e, 1, s)
        with torch.no_grad():
            for p in m.parameters(): p.copy_(torch.sign(p) * (p.abs() - 0.01).clamp(min=0))
    return e
@case
def monkeypatched_init_to(E):
    m = LM(); e = E.engine(m); run(E, e, 1); 
    if not E.sharded: e.module.float(); e.module.to("cpu")
    e.module.requires_grad_(True); e.module.apply(lambda mod: None); run(E, e, 2, 1); return e
if __name__ == "__main__": main()

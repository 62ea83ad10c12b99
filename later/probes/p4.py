from h import *
import h
from typing import NamedTuple, Optional
import dataclasses
def run(E, e, steps, start=0, loss=None, acc=1):
    for s in range(start, start + steps):
        for i in range(acc):
            x = E.x(s, i); e.backward(loss(e, x) if loss else ce(e(x), x)); e.step()
class NT(NamedTuple):
    loss: torch.Tensor; logits: torch.Tensor; none: Optional[torch.Tensor]; hidden: tuple
@dataclasses.dataclass
class DC:
    x: torch.Tensor; mask: Optional[torch.Tensor] = None
@case
def namedtuple_outputs(E):
    class B2(Block):
        def forward(self, x, aux=None): y = super().forward(x); return {"x": y, "aux": None, "norm": (y.square().mean(),)}
    class Bd(Body):
        def __init__(self, n): super().__init__(n, 32, B2)
        def forward(self, x):
            hs = []; a = 0
            for l in self.layers: o = l(x, aux=None); x = o["x"]; hs.append(x); a = a + o["norm"][0]
            return x, tuple(hs), a
    class M(LM):
        def __init__(self): super().__init__(); self.body = Bd(3)
        def forward(self, ids, labels=None):
            x, hs, a = self.body(self.emb(ids)); lo = self.head(x)
            return NT(ce(lo, labels) + 0.01 * a if labels is not None else None, lo, None, hs)
    m = M(); e = E.engine(m); run(E, e, 3, loss=lambda e, x: (lambda o: o.loss + 0.001 * o.hidden[1].abs().mean())(e(x, labels=x))); return e
@case
def dataclass_between_blocks(E):
    class B2(Block):
        def forward(self, d): return DC(super().forward(d.x) * d.mask, d.mask)
    class Bd(Body):
        def __init__(self, n): super().__init__(n, 32, B2)
        def forward(self, x):
            d = DC(x, torch.ones(x.shape[:2])[..., None])
            for l in self.layers: d = l(d)
            return d.x
    m = LM(); m.body = Bd(3); e = E.engine(m); run(E, e, 3); return e
@case
def token_weights_outside(E):
    m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    def loss(e, x):
        lo = e(x); w = (x[:, 1:] % 3).float(); l = F.cross_entropy(lo[:, :-1].reshape(-1, 50), x[:, 1:].reshape(-1), reduction="none", label_smoothing=0.1).view(x.shape[0], -1)
        return (l * w).sum() / w.sum().clamp(min=1)
    run(E, e, 3, loss=loss, acc=2); return e
@case
def losses_as_tuple(E):
    class M(LM):
        def forward(self, ids):
            x = self.body(self.emb(ids)); lo = self.head(x); return ce(lo, ids), x.square().mean(), (lo.logsumexp(-1) ** 2).mean()
    m = M(); e = E.engine(m)
    def loss(e, x): a, b, c = e(x); return a + 0.1 * b + 1e-3 * c
    run(E, e, 3, loss=loss); return e
@case
def separate_backwards_of_losses(E):
    class M(LM):
        def forward(self, ids):
            x = self.body(self.emb(ids)); lo = self.head(x); return ce(lo, ids), ce(self.head(x.detach()), ids)
    import torch._functorch.config as fc; fc.donated_buffer = False
    m = M(); e = E.engine(m)
    for s in range(3):
        a, b = e(E.x(s)); e.set_gradient_accumulation_boundary(False); e.backward(a, retain_graph=True); e.set_gradient_accumulation_boundary(True); e.backward(0.3 * b); e.step()
    fc.donated_buffer = True
    return e
@case
def compiled_submodule(E):
    m = LM(); m.body.layers[1].up = torch.compile(m.body.layers[1].up, backend="eager"); m.head.compile(backend="eager"); e = E.engine(m); run(E, e, 3); return e
@case
def compiled_function_inside(E):
    f = torch.compile(lambda x, w: F.gelu(x @ w), backend="aot_eager")
    class Bk(nn.Module):
        def __init__(self, d=32): super().__init__(); self.n = nn.LayerNorm(d); self.w = nn.Parameter(torch.randn(d, d) * .1)
        def forward(self, x): return x + f(self.n(x), self.w)
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
@case
def compiled_whole_by_user(E):
    m = LM(); e = E.engine(torch.compile(m, backend="eager")); run(E, e, 3); return {k.replace("_orig_mod.", ""): v for k, v in E.params(e).items()}
@torch.library.custom_op("probe::scale", mutates_args=())
def scale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor: return x * w.exp()
@scale.register_fake
def _(x, w): return torch.empty_like(x)
scale.register_autograd(lambda ctx, g: (g * ctx.saved_tensors[1].exp(), (g * ctx.saved_tensors[0] * ctx.saved_tensors[1].exp()).flatten(0, -2).sum(0)), setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
@case
def custom_op(E):
    class Bk(Block):
        def __init__(self, d=32): super().__init__(d); self.w = nn.Parameter(torch.zeros(d))
        def forward(self, x): return scale(super().forward(x), self.w)
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
@case
def tied_after_initialize(E):
    m = LM(); e = E.engine(m)
    if E.sharded:
        with E.whole(e): m.head.weight = m.emb.weight
    else: m.head.weight = m.emb.weight
    run(E, e, 3); return e
@case
def tied_after_first_steps(E):
    m = LM(); e = E.engine(m); run(E, e, 2)
    with E.whole(e): m.head.weight = m.emb.weight
    run(E, e, 3, 2); return e
@case
def shared_between_blocks(E):
    m = LM(n=4); m.body.layers[2].up = m.body.layers[0].up; m.body.layers[3].down.weight = m.body.layers[1].down.weight; e = E.engine(m); run(E, e, 3); return e
@case
def albert_like(E):
    class Bd(Body):
        def forward(self, x):
            for _ in range(4):
                for l in self.layers: x = l(x)
            return x
    m = LM(); m.body = Bd(1); e = E.engine(m); run(E, e, 3); return e
@case
def lstm_gru(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 16); self.l = nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True); self.g = nn.GRU(32, 16, batch_first=True); self.o = nn.Linear(16, 50)
        def forward(self, x): return self.o(self.g(self.l(self.emb(x))[0])[0])
    m = M(); e = E.engine(m); run(E, e, 3); return e
@case
def lstm_packed_states(E):
    class Bk(nn.Module):
        def __init__(self, d=32): super().__init__(); self.c = nn.LSTMCell(d, d); self.n = nn.LayerNorm(d)
        def forward(self, x):
            h_ = c = torch.zeros(x.shape[0], 32); o = []
            for t in range(x.shape[1]): h_, c = self.c(x[:, t], (h_, c)); o.append(h_)
            return self.n(x + torch.stack(o, 1))
    m = LM(n=2, block=Bk); e = E.engine(m); run(E, e, 2); return e
@case
def packed_sequence(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 16); self.l = nn.LSTM(16, 16, batch_first=True); self.o = nn.Linear(16, 50)
        def forward(self, x, n):
            p = nn.utils.rnn.pack_padded_sequence(self.emb(x), n, batch_first=True, enforce_sorted=False)
            o, _ = nn.utils.rnn.pad_packed_sequence(self.l(p)[0], batch_first=True, total_length=x.shape[1]); return self.o(o)
    m = M(); e = E.engine(m)
    for s in range(3): x = E.x(s); e.backward(ce(e(x, torch.tensor([8, 3 + s + E.rank])), x)); e.step()
    return e
@case
def conv1d_3d(E):
    class Bk(nn.Module):
        def __init__(self, c=16): super().__init__(); self.c = nn.Conv1d(c, c, 3, padding=1); self.n = nn.GroupNorm(2, c)
        def forward(self, x): return x + F.silu(self.n(self.c(x)))
    class M(nn.Module):
        def __init__(self): super().__init__(); self.v = nn.Conv3d(1, 16, (2, 3, 3), stride=(2, 2, 2)); self.t = nn.ConvTranspose1d(16, 16, 2); self.body = Body(2, 16, Bk); self.o = nn.Linear(16, 4)
        def forward(self, x): return self.o(self.body(self.t(self.v(x).flatten(2))).mean(-1))
    m = M(); e = E.engine(m)
    for s in range(3): e.backward(F.cross_entropy(e(E.f(s, shape=(2, 1, 4, 7, 7))), torch.tensor([0, 1]))); e.step()
    return e
@case
def vit_interpolated(E):
    class V(nn.Module):
        def __init__(self): super().__init__(); self.p = nn.Conv2d(3, 32, 4, 4); self.pos = nn.Parameter(torch.randn(1, 32, 4, 4)); self.cls = nn.Parameter(torch.zeros(1, 1, 32)); self.body = Body(3); self.o = nn.Linear(32, 5)
        def forward(self, x):
            x = self.p(x); x = x + F.interpolate(self.pos, size=x.shape[-2:], mode="bicubic", align_corners=False); x = x.flatten(2).transpose(1, 2)
            return self.o(self.body(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))[:, 0])
    m = V(); e = E.engine(m)
    for s in range(5): z = [16, 24, 16, 32, 20][s]; e.backward(F.cross_entropy(e(E.f(s, shape=(2, 3, z, z))), torch.tensor([0, 1]))); e.step()
    return e
class Attn(nn.Module):
    def __init__(self, d=32): super().__init__(); self.a = nn.MultiheadAttention(d, 4, batch_first=True)
    def forward(self, q, kv, **k): return self.a(q, kv, kv, need_weights=False, **k)[0]
class Enc(nn.Module):
    def __init__(self, d=32): super().__init__(); self.n = nn.LayerNorm(d); self.a = Attn(d); self.m = Block(d)
    def forward(self, x, bias): n = self.n(x); return self.m(x + self.a(n, n) + bias)
class Dec(nn.Module):
    def __init__(self, d=32): super().__init__(); self.n = nn.LayerNorm(d); self.a = Attn(d); self.c = Attn(d); self.m = Block(d)
    def forward(self, x, mem, mask): n = self.n(x); x = x + self.a(n, n, attn_mask=mask); return self.m(x + self.c(x, mem))
@case
def t5_like(E):
    class EncS(nn.Module):
        def __init__(self, emb): super().__init__(); self.emb = emb; self.rel = nn.Embedding(8, 32); self.block = nn.ModuleList(Enc() for _ in range(2))
        def forward(self, ids):
            x = self.emb(ids); b = self.rel(torch.arange(ids.shape[1]))[None]
            for l in self.block: x = l(x, b)
            return x
    class DecS(nn.Module):
        def __init__(self, emb): super().__init__(); self.emb = emb; self.block = nn.ModuleList(Dec() for _ in range(2))
        def forward(self, ids, mem):
            x = self.emb(ids); mask = torch.triu(torch.full((ids.shape[1],) * 2, float("-inf")), 1)
            for l in self.block: x = l(x, mem, mask)
            return x
    class T5(nn.Module):
        def __init__(self): super().__init__(); self.shared = nn.Embedding(50, 32); self.encoder = EncS(self.shared); self.decoder = DecS(self.shared); self.lm = nn.Linear(32, 50, bias=False); self.lm.weight = self.shared.weight
        def forward(self, ids, dec): return self.lm(self.decoder(dec, self.encoder(ids)) * 32 ** -.5)
    m = T5(); e = E.engine(m); run(E, e, 3, loss=lambda e, x: ce(e(x, x.flip(1)), x)); return e
@case
def whisper_like_frozen_encoder(E):
    class W(nn.Module):
        def __init__(self):
            super().__init__(); self.c1 = nn.Conv1d(8, 32, 3, padding=1); self.c2 = nn.Conv1d(32, 32, 3, stride=2, padding=1); self.register_buffer("pos", torch.randn(1, 8, 32))
            self.enc = nn.ModuleList(Block() for _ in range(2)); self.emb = nn.Embedding(50, 32); self.dec = nn.ModuleList(Dec() for _ in range(2))
        def forward(self, mel, ids):
            with torch.no_grad():
                x = F.gelu(self.c2(F.gelu(self.c1(mel)))).transpose(1, 2) + self.pos
                for l in self.enc: x = l(x)
            y = self.emb(ids); mask = torch.triu(torch.full((8, 8), float("-inf")), 1)
            for l in self.dec: y = l(y, x, mask)
            return y @ self.emb.weight.T
    m = W(); [p.requires_grad_(False) for q in (m.c1, m.c2, m.enc) for p in q.parameters()]
    e = E.engine(m)
    for s in range(3): x = E.x(s); e.backward(ce(e(E.f(s, shape=(2, 8, 16)), x), x)); e.step()
    return e
@case
def unet_like(E):
    class Res(nn.Module):
        def __init__(self, i, o): super().__init__(); self.n = nn.GroupNorm(4, i); self.c = nn.Conv2d(i, o, 3, padding=1); self.t = nn.Linear(16, o); self.s = nn.Conv2d(i, o, 1) if i != o else nn.Identity()
        def forward(self, x, t): return self.s(x) + self.c(F.silu(self.n(x))) + self.t(t)[..., None, None]
    class U(nn.Module):
        def __init__(self):
            super().__init__(); self.t = nn.Linear(1, 16); self.i = nn.Conv2d(3, 16, 3, padding=1); self.down = nn.ModuleList([Res(16, 16), Res(16, 32)]); self.ds = nn.ModuleList([nn.Conv2d(16, 16, 3, 2, 1), nn.Identity()]); self.mid = Res(32, 32); self.up = nn.ModuleList([Res(64, 16), Res(32, 16)]); self.o = nn.Conv2d(16, 3, 3, padding=1)
        def forward(self, x, t):
            t = F.silu(self.t(t)); x = self.i(x); skips = []
            for r, d in zip(self.down, self.ds): x = r(x, t); skips.append(x); x = d(x)
            x = self.mid(x, t)
            for i, r in enumerate(self.up):
                k = skips.pop()
                if x.shape[-1] != k.shape[-1]: x = F.interpolate(x, size=k.shape[-2:])
                x = r(torch.cat([x, k], 1), t)
            return self.o(x)
    m = U(); e = E.engine(m)
    for s in range(3):
        x = E.f(s, shape=(2, 3, 8, 8)); n = E.f(s, 1, shape=(2, 3, 8, 8)); e.backward(F.mse_loss(e(x + n, torch.rand(2, 1, generator=E.gen(s))), n)); e.step()
    return e
@case
def weight_norm_spectral(E):
    from torch.nn.utils import parametrizations as P
    class Bk(Block):
        def __init__(self, d=32): super().__init__(d); P.weight_norm(self.up); P.spectral_norm(self.down)
    m = LM(block=Bk); e = E.engine(m); run(E, e, 3); return e
@case
def vq_codebook(E):
    class VQ(nn.Module):
        def __init__(self): super().__init__(); self.enc = Vec(out=8); self.dec = Vec(d=8, out=32); self.register_buffer("book", torch.randn(16, 8)); self.register_buffer("size", torch.ones(16))
        def forward(self, x):
            z = self.enc(x); i = torch.cdist(z, self.book).argmin(-1); q = self.book[i]
            if self.training:
                with torch.no_grad():
                    o = F.one_hot(i, 16).float(); n, sm = o.sum(0), o.T @ z; dist.all_reduce(n); dist.all_reduce(sm)
                    self.size.mul_(0.9).add_(n, alpha=.1); self.book.lerp_(sm / n.clamp(min=1)[:, None], 0.1)
            return self.dec(z + (q - z).detach()), F.mse_loss(z, q.detach())
    m = VQ(); e = E.engine(m)
    for s in range(4): x = E.f(s, shape=(6, 32)); y, c = e(x); e.backward(F.mse_loss(y, x) + .25 * c); e.step()
    return e
@case
def teacher_ema_student(E):
    m = LM(); e = E.engine(m); t = copy.deepcopy(LM()); 
    with E.whole(e): t.load_state_dict(m.state_dict())
    for s in range(4):
        x = E.x(s); o = e(x)
        with torch.no_grad(): to = t(x)
        e.backward(ce(o, x) + F.kl_div(o.log_softmax(-1), to.softmax(-1), reduction="batchmean")); e.step()
        with torch.no_grad(), E.whole(e):
            for a, b in zip(t.parameters(), e.module.parameters()): a.lerp_(b, 0.1)
    return E.params(e) | {"t" + k: v for k, v in t.named_parameters()}
@case
def sam_optimizer(E):
    # sharpness-aware minimisation: perturb the parameters, backward again, restore
    m = LM(); e = E.engine(m)
    for s in range(3):
        x = E.x(s)
        with E.whole(e): old = [p.detach().clone() for p in m.parameters()]
        with torch.no_grad(), E.whole(e):
            for i, p in enumerate(m.parameters()): p.add_(torch.randn(p.shape, generator=E.gen(s, i)) * 0.01)
        l = ce(e(x), x); e.backward(l)
        with torch.no_grad(), E.whole(e):
            for p, o in zip(m.parameters(), old): p.copy_(o)
        e.step()
    return e
@case
def rl_buffer_many_forwards(E):
    # PPO: rollouts in eval/no_grad, several epochs with ratio
    m = LM(); e = E.engine(m)
    for it in range(2):
        x = E.x(it); e.eval()
        with torch.no_grad(): old = e(x).log_softmax(-1).gather(-1, x[..., None])
        e.train()
        for ep in range(3):
            lp = e(x).log_softmax(-1).gather(-1, x[..., None]); r = (lp - old).exp(); a = E.f(it, ep, shape=r.shape)
            e.backward(-torch.min(r * a, r.clamp(.8, 1.2) * a).mean()); e.step()
    return e
@case
def dpo_concat_two(E):
    m = LM(); ref = copy.deepcopy(m).eval(); e = E.engine(m)
    for s in range(3):
        w, l = E.x(s, 0), E.x(s, 1)
        def lp(mod, y): return mod(y)[:, :-1].log_softmax(-1).gather(-1, y[:, 1:, None]).sum((1, 2))
        with torch.no_grad(): rw, rl = lp(ref, w), lp(ref, l)
        e.backward(-F.logsigmoid(0.1 * ((lp(e, w) - rw) - (lp(e, l) - rl))).mean()); e.step()
    return e
@case
def recurrent_state_across_steps(E):
    # truncated BPTT, detached state
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 32); self.body = Body(2); self.mix = nn.Linear(64, 32); self.head = nn.Linear(32, 50)
        def forward(self, ids, st): x = self.emb(ids); x = self.mix(torch.cat([x, st.expand_as(x)], -1)); x = self.body(x); return self.head(x), x[:, -1:]
    m = M(); e = E.engine(m); st = torch.zeros(2, 1, 32)
    for s in range(4): x = E.x(s); lo, st = e(x, st.detach()); e.backward(ce(lo, x)); e.step()
    return e
@case
def bptt_two_chunks_one_backward(E):
    class M(nn.Module):
        def __init__(self): super().__init__(); self.emb = nn.Embedding(50, 32); self.body = Body(2); self.mix = nn.Linear(64, 32); self.head = nn.Linear(32, 50)
        def forward(self, ids, st): x = self.emb(ids); x = self.mix(torch.cat([x, st.expand_as(x)], -1)); x = self.body(x); return self.head(x), x[:, -1:]
    m = M(); e = E.engine(m)
    for s in range(3):
        st = torch.zeros(2, 1, 32); tot = 0
        for c in range(2): x = E.x(s, c); lo, st = e(x, st); tot = tot + ce(lo, x)
        e.backward(tot); e.step()
    return e
if __name__ == "__main__": main()

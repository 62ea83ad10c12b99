from h import *
import h, shutil
from typing import NamedTuple
import dataclasses
def run(E, e, steps, start=0, loss=None, acc=1, n=1):
    for s in range(start, start + steps):
        for i in range(acc):
            x = E.x(s, i); e.backward(loss(e, x) if loss else ce(e(x), x)); e.step()
def folder(E):
    d = f"/tmp/probes/ck/{E.name_}/{E.name}"
    if E.rank == 0: shutil.rmtree(d, ignore_errors=True)
    dist.barrier(); return d
E.name_ = str(os.getpid())
@case
def autocast_context(E):
    m = LM(); e = E.engine(m)
    for s in range(3):
        x = E.x(s)
        with torch.autocast("cpu", dtype=torch.bfloat16): l = ce(e(x).float(), x)
        e.backward(l); e.step()
    return e
@case
def autocast_section(E):
    m = LM(); e = E.engine(m, torch_autocast={"enabled": True, "dtype": "bfloat16"}); run(E, e, 3, loss=lambda e, x: ce(e(x).float(), x)); return e
@case
def fp16_overflow(E):
    m = LM().half(); e = E.engine(m, fp16={"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}); sc = []
    for s in range(9): run(E, e, 1, s, loss=lambda e, x: ce(e(x).float(), x)); sc.append(e.optimizer.cur_scale if hasattr(e.optimizer, "cur_scale") else e.optimizer.loss_scale)
    return {"scales": str(sc), "skipped": e.skipped_steps, "gs": e.global_steps}
@case
def clipping_changed(E):
    m = LM(); e = E.engine(m, gradient_clipping=1.0); norms = []
    for s, c in enumerate([1.0, 0.1, 0.0, 0.5, 0.01]):
        e.optimizer.clip_grad = c
        run(E, e, 1, s); norms.append(torch.as_tensor(float(e.get_global_grad_norm() or 0)))
    return E.params(e) | {"n": torch.stack(norms)}
@case
def oom_in_forward_retry(E):
    class Bk(Block):
        fail = False
        def forward(self, x):
            if Bk.fail: raise torch.OutOfMemoryError("fake")
            return super().forward(x)
    m = LM(block=Bk); e = E.engine(m, gradient_accumulation_steps=2)
    for s in range(5):
        for i in range(2):
            x = E.x(s, i)
            Bk.fail = s == 2 and i == 1
            try: o = e(x)
            except torch.OutOfMemoryError:
                Bk.fail = False; o = e(x)
            e.backward(ce(o, x)); e.step()
    return e
@case
def oom_in_forward_halved(E):
    class Body2(Body):
        fail = False
        def forward(self, x):
            for i, l in enumerate(self.layers):
                x = l(x)
                if Body2.fail and i == 1: raise torch.OutOfMemoryError("fake")
            return x
    m = LM(); m.body = Body2(3); e = E.engine(m)
    for s in range(5):
        x = E.x(s); Body2.fail = s == 2
        try: e.backward(ce(e(x), x))
        except torch.OutOfMemoryError:
            Body2.fail = False
            with torch.no_grad(): pass
            e.set_gradient_accumulation_boundary(False); y = x[:1]; e.backward(ce(e(y), y) / 2)
            e.set_gradient_accumulation_boundary(True); y = x[1:]; e.backward(ce(e(y), y) / 2)
        e.step()
    return e
class Boom(torch.autograd.Function):
    fail = False
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        if Boom.fail: raise Boom.kind("fake")
        return g
def boomer(kind):
    def f(E):
        class Body2(Body):
            def forward(self, x):
                for i, l in enumerate(self.layers):
                    x = l(x)
                    if i == 1: x = torch.compiler.disable(Boom.apply)(x)
                return x
        m = LM(); m.body = Body2(3); e = E.engine(m); Boom.kind = kind
        for s in range(5):
            x = E.x(s); Boom.fail = s == 2
            try: e.backward(ce(e(x), x)); e.step()
            except kind:
                Boom.fail = False
                e.optimizer.zero_grad(); e.module.zero_grad()
                if s == 2 and kind is KeyboardInterrupt: continue
                e.backward(ce(e(x), x)); e.step()
        return e
    return f
CASES["oom_in_backward_retry"] = (boomer(torch.OutOfMemoryError), {})
CASES["keyboard_interrupt_in_backward"] = (boomer(KeyboardInterrupt), {})
@case
def keyboard_interrupt_after_backward(E):
    m = LM(); e = E.engine(m)
    for s in range(5):
        x = E.x(s)
        try:
            l = ce(e(x), x)
            if s == 1: raise KeyboardInterrupt
            e.backward(l)
            if s == 3: raise KeyboardInterrupt
            e.step()
        except KeyboardInterrupt:
            e.zero_grad(); e.optimizer.zero_grad()
    return e
@case
def eval_and_save_mid_accumulation(E):
    d = folder(E); m = LM(); e = E.engine(m, gradient_accumulation_steps=3); out = {}
    for s in range(3):
        for i in range(3):
            x = E.x(s, i); e.backward(ce(e(x), x))
            if i == 1:
                e.eval()
                with torch.no_grad(): out[f"{s}"] = ce(e(E.x(9)), E.x(9))
                e.train()
                e.save_checkpoint(d, tag=f"t{s}")
            e.step()
    p = E.params(e)
    e.load_checkpoint(d, tag="t1")
    out["gs"] = e.global_steps
    e.optimizer.zero_grad()
    q = E.params(e)
    return p | {"q" + k: v for k, v in q.items()} | out
@case
def rollback(E):
    d = folder(E); m = LM(); e = E.engine(m, adam=True, lr=0.02); sch = None
    run(E, e, 2); e.save_checkpoint(d, tag="good"); out = {}
    for t in range(3):
        run(E, e, 2, 10 + 2 * t); out |= {f"{t}{k}": v for k, v in E.params(e).items()}
        e.load_checkpoint(d, tag="good"); out[f"gs{t}"] = e.global_steps
    run(E, e, 2, 30)
    return E.params(e) | out
@case
def rollback_in_accumulation(E):
    d = folder(E); m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    run(E, e, 2, acc=2); e.save_checkpoint(d, tag="good")
    x = E.x(77); e.backward(ce(e(x), x)); e.step()
    e.load_checkpoint(d, tag="good"); e.optimizer.zero_grad(); 
    run(E, e, 2, 5, acc=2)
    return E.params(e) | {"gs": e.global_steps, "ms": e.micro_steps}
@case
def load_other_optimizer(E):
    d = folder(E); m = LM(); e = E.engine(m, adam=True, lr=0.02); run(E, e, 2); e.save_checkpoint(d, tag="a"); e.destroy(); E.engines.clear()
    torch.manual_seed(3); m2 = LM(); e2 = E.engine(m2); run(E, e2, 1)
    e2.load_checkpoint(d, tag="a", load_optimizer_states=False, load_lr_scheduler_states=False)
    run(E, e2, 2, 4); return e2
@case
def load_module_only(E):
    d = folder(E); m = LM(); e = E.engine(m, adam=True, lr=0.02); run(E, e, 2); e.save_checkpoint(d, tag="a"); run(E, e, 2, 3)
    e.load_checkpoint(d, tag="a", load_module_only=True); run(E, e, 2, 5); return e
@case
def state_dict_rank0(E):
    m = LM(); e = E.engine(m); run(E, e, 2); out = {}
    if E.sharded:
        with E.whole(e):
            if E.rank == 0: out = {k: v.clone() for k, v in e.module.state_dict().items()}
    elif E.rank == 0: out = {k: v.clone() for k, v in e.module.state_dict().items()}
    run(E, e, 2, 2)
    return E.params(e) | {"s" + k: v for k, v in out.items()}
@case
def load_state_dict_between(E):
    m = LM(); e = E.engine(m); run(E, e, 1)
    with E.whole(e): sd = {k: v.clone() for k, v in e.module.state_dict().items()}
    run(E, e, 2, 1)
    e.module.load_state_dict(sd)
    e.optimizer.refresh_fp32_params() if hasattr(e.optimizer, "refresh_fp32_params") else None
    run(E, e, 2, 3); return e
class MyAdamW(torch.optim.AdamW):
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is not None: p.grad.clamp_(-0.05, 0.05)
        r = super().step(closure)
        for g in self.param_groups:
            for p in g["params"]: self.state[p]["mine"] = self.state[p].get("mine", 0) + 1
        return r
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), wd=0.0): super().__init__(params, dict(lr=lr, betas=betas, wd=wd))
    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None: continue
                st = self.state[p]
                if not st: st["m"] = torch.zeros_like(p)
                b1, b2 = g["betas"]; u = (st["m"] * b1 + p.grad * (1 - b1)); p.mul_(1 - g["lr"] * g["wd"]); p.add_(torch.tanh(u * 30), alpha=-g["lr"]); st["m"].mul_(b2).add_(p.grad, alpha=1 - b2)
def opt(name, make, **kw):
    def f(E):
        m = LM(); e = E.engine(m, optimizer=make([p for p in m.parameters()]), **kw); run(E, e, 3); return e
    f.__name__ = "opt_" + name; CASES["opt_" + name] = (f, {})
opt("adagrad", lambda ps: torch.optim.Adagrad(ps, lr=0.02, eps=0.1))
opt("lion", lambda ps: Lion(ps))
opt("adafactor", lambda ps: torch.optim.Adafactor(ps, lr=0.02))
opt("fused_adamw", lambda ps: torch.optim.AdamW(ps, lr=0.02, eps=0.1, fused=True))
opt("my_adamw", lambda ps: MyAdamW(ps, lr=0.02, eps=0.1))
opt("nadam", lambda ps: torch.optim.NAdam(ps, lr=0.02, eps=0.1))
opt("rmsprop_centered", lambda ps: torch.optim.RMSprop(ps, lr=0.002, eps=0.1, centered=True, momentum=0.9))
opt("asgd", lambda ps: torch.optim.ASGD(ps, lr=0.02))
opt("adamax_max", lambda ps: torch.optim.Adamax(ps, lr=0.02, eps=0.1, maximize=True))
opt("tensor_lr", lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.02), eps=0.1, foreach=False))
def sched(name, make, metric=False):
    def f(E):
        m = LM(); o = torch.optim.AdamW(m.parameters(), lr=0.02, eps=0.1); s_ = make(o); e = E.engine(m, optimizer=o, scheduler=None if metric else s_); lrs = []
        if metric:
            s_ = make(e.optimizer if metric == 2 else o)
        for s in range(6):
            run(E, e, 1, s); lrs.append(float(e.optimizer.param_groups[0]["lr"]))
            if metric: s_.step([3, 2, 2.5, 2.6, 2.7, 2.8][s])
        return E.params(e) | {"lrs": torch.tensor(lrs)}
    CASES["sched_" + name] = (f, {})
S = torch.optim.lr_scheduler
sched("onecycle", lambda o: S.OneCycleLR(o, 0.05, total_steps=10))
sched("sequential", lambda o: S.SequentialLR(o, [S.LinearLR(o, 0.1, total_iters=2), S.CosineAnnealingLR(o, 5)], [2]))
sched("plateau", lambda o: S.ReduceLROnPlateau(o, patience=0), metric=True)
sched("lambda", lambda o: S.LambdaLR(o, lambda i: 1 / (1 + i)))
if __name__ == "__main__": main()
@case
def rollback_ideal(E):
    d = folder(E); m = LM(); e = E.engine(m, gradient_accumulation_steps=2)
    run(E, e, 2, acc=2); e.save_checkpoint(d, tag="good")
    on = bool(getattr(e._config.compile_config, "deepcompile", False))
    if on:
        x = E.x(77); e.backward(ce(e(x), x)); e.step()
    e.load_checkpoint(d, tag="good"); e.optimizer.zero_grad()
    run(E, e, 2, 5, acc=2)
    return E.params(e) | {"gs": e.global_steps, "ms": e.micro_steps}

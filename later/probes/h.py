import os, sys, time, traceback, multiprocessing as mp, datetime, socket, random, gc, contextlib, copy, faulthandler, logging, warnings, io
os.environ.setdefault("DS_ACCELERATOR", "cpu"); os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/work/wt/probe/build/inductor"); os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
import torch._dynamo
BACKEND = os.environ.get("BACKEND", "eager")
MULT = int(os.environ.get("MULT", "16"))
CFGS = {
 "off1": dict(stage=1, compile={"deepcompile": False}),
 "s1": dict(stage=1, compile={"deepcompile": True}),
 "all1": dict(stage=1, compile={"deepcompile": True, "shard_parameters": "all"}),
 "off2": dict(stage=2, compile={"deepcompile": False}),
 "s2": dict(stage=2, compile={"deepcompile": True}),
 "all2": dict(stage=2, compile={"deepcompile": True, "shard_parameters": "all"}),
}
CASES = {}
def case(f=None, **kw):
    def d(f):
        CASES[f.__name__] = (f, kw); return f
    return d(f) if f else d

class E:
    def __init__(self, name, cfg, rank):
        self.name, self.cfg, self.rank, self.world = name, cfg, rank, 2
        self.stage = cfg["stage"]; self.sharded = "shard_parameters" in cfg["compile"]; self.on = cfg["compile"]["deepcompile"]
        self.engines = []
    def engine(self, model, optimizer=None, lr=0.1, momentum=0.5, params=None, scheduler=None, adam=False, **more):
        import deepspeed
        from deepspeed.runtime import torch_autocast
        torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
        compile = {**self.cfg["compile"], **(more.pop("compile", {}) if self.on else (more.pop("compile", {}), {})[1])}
        zero = {"stage": self.stage, **more.pop("zero", {})}
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "steps_per_print": 10**9,
                  "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "zero_optimization": zero, "compile": compile, **more}
        if optimizer is None and "optimizer" not in more:
            ps = params or [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(ps, lr=lr, eps=0.1) if adam else torch.optim.SGD(ps, lr=lr, momentum=momentum)
        if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer): optimizer = optimizer(model)
        out = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=scheduler,
            **({"model_parameters": [p for p in model.parameters() if p.requires_grad]} if optimizer is None else {}))
        engine = out[0]; engine.train(); self.engines.append(engine)
        return engine
    def gen(self, *key):
        seed = 17
        for k in key: seed = (seed * 1000003 + int(k)) % (2**31)
        return torch.Generator().manual_seed(seed)
    def x(self, *key, shape=(2, 8), vocab=50):
        return torch.randint(0, vocab, shape, generator=self.gen(*key, self.rank))
    def f(self, *key, shape=(2, 32)):
        return torch.randn(shape, generator=self.gen(*key, self.rank))
    @contextlib.contextmanager
    def whole(self, engine):
        if self.sharded:
            from deepspeed.compile.features.shard_parameters import unsharded_parameters
            with unsharded_parameters(engine): yield
        else: yield
    def params(self, engine):
        with self.whole(engine):
            return {n: p.detach().clone() for n, p in engine.module.named_parameters()} | {"B." + n: b.detach().clone() for n, b in engine.module.named_buffers()}

def rel(a, e):
    a, e = torch.as_tensor(a), torch.as_tensor(e)
    if a.is_complex(): a, e = torch.view_as_real(a), torch.view_as_real(e)
    a, e = a.double(), e.double()
    if a.shape != e.shape: return float("inf")
    if a.numel() == 0: return 0.0
    if not torch.isfinite(e).all(): return 0.0 if torch.equal(torch.nan_to_num(a), torch.nan_to_num(e)) else float("inf")
    d, n = (a - e).norm(), e.norm()
    r = float(d / n) if n > 0 else float(d)
    return r if r == r else float("inf")

def worker(rank, port, name, cfgs, q):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    log = open(f"/tmp/probes/log/{name}.{rank}", "a"); os.dup2(log.fileno(), 1); os.dup2(log.fileno(), 2)
    import deepspeed
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", timeout=datetime.timedelta(seconds=int(os.environ.get("PATIENCE", "45"))))
    if rank == 0: dist.barrier()
    else: dist.barrier()
    for f in __import__("glob").glob(f"/dev/shm/deepspeed_allreduce_buffer_*_{port}_*"):
        with contextlib.suppress(OSError): os.unlink(f)
    try:
        from deepspeed.compile.zero_1_and_2 import layout
        layout.SHARD_MULTIPLE = MULT
    except Exception: pass
    from deepspeed.accelerator import get_accelerator
    get_accelerator().set_compile_backend(BACKEND)
    get_accelerator().is_fp16_supported = lambda: True
    fn, kw = CASES[name]
    for c in cfgs:
        print(f"===== {name} {c}", flush=True)
        faulthandler.dump_traceback_later(int(os.environ.get("HANG", "100")), exit=True, file=log)
        torch._dynamo.reset(); torch.manual_seed(0); random.seed(0)
        e = E(c, CFGS[c], rank)
        try:
            out = fn(e)
            if out is None: out = {}
            if isinstance(out, torch.nn.Module) or hasattr(out, "module"): out = e.params(out)
            out = {k: (v.detach().clone().cpu() if torch.is_tensor(v) else v) for k, v in out.items()}
            counters = None
            if e.on and e.engines:
                from deepspeed.compile.zero_1_and_2 import gradient_counters
                try: counters = {k: v for k, v in gradient_counters(e.engines[-1]).items() if k in ("from_graphs", "from_autograd", "out_of_turn")}
                except Exception as x: counters = str(x)[:60]
            for g in e.engines: g.destroy()
            b = io.BytesIO(); torch.save(out, b)
            q.put((rank, c, True, b.getvalue(), counters))
        except BaseException as x:
            traceback.print_exc(); sys.stdout.flush(); sys.stderr.flush()
            q.put((rank, c, False, f"{type(x).__name__}: {str(x)[:600]}", None))
            time.sleep(0.5); break
        finally: faulthandler.cancel_dump_traceback_later()
        del e; gc.collect()
    q.close(); q.join_thread(); os._exit(0)

def port():
    while True:
        p = random.SystemRandom().randrange(21000, 31000)
        with socket.socket() as s:
            try: s.bind(("127.0.0.1", p)); return p
            except OSError: pass

def main():
    only = [a for a in sys.argv[1:] if not a.startswith("-")]
    os.makedirs("/tmp/probes/log", exist_ok=True)
    import deepspeed, torch._inductor.compile_fx, deepspeed.compile.init_z1_and_2
    import logging
    which = os.environ.get("CFG", ",".join(CFGS)).split(",")
    for name in (only or CASES):
        t0 = time.time(); todo = list(which); res = {}
        for r in (0, 1): open(f"/tmp/probes/log/{name}.{r}", "w").close()
        while todo:
            ctx = mp.get_context("fork"); q = ctx.Queue(); p0 = port()
            ps = [ctx.Process(target=worker, args=(r, p0, name, todo, q)) for r in (0, 1)]
            [p.start() for p in ps]
            got = 0
            while True:
                try: r, c, ok, out, cnt = q.get(timeout=1); res.setdefault(c, {})[r] = (ok, out, cnt); continue
                except Exception: pass
                if not any(p.is_alive() for p in ps): break
            with contextlib.suppress(Exception):
                while True:
                    r, c, ok, out, cnt = q.get(timeout=0.2); res.setdefault(c, {})[r] = (ok, out, cnt)
            [p.join() for p in ps]
            done = [c for c in todo if c in res]
            if len(done) == len(todo) : break
            if not done: res[todo[0]] = {}; done = [todo[0]]
            rest = [c for c in todo if c not in done]
            # a config that began but never reported = hang/crash: mark
            last = done[-1]
            if all(res[last].get(r, (False,))[0] for r in (0, 1)):
                res[rest[0]] = {0: (False, "CRASH/HANG exit " + str([p.exitcode for p in ps]), None)}; rest = rest[1:]
            todo = rest
        line = []
        for c in which:
            r = res.get(c, {})
            bad = {k: v[1] for k, v in r.items() if not v[0]}
            if bad or len(r) < 2:
                line.append(f"{c}: FAIL " + " | ".join(f"r{k} {v}" for k, v in sorted(bad.items()))[:500] + (f" only {list(r)} reported" if len(r) < 2 else "")); continue
            outs = {k: torch.load(io.BytesIO(v[1]), weights_only=False) for k, v in r.items()}
            ref = "off%d" % CFGS[c]["stage"]
            if c == ref:
                res[c]["outs"] = outs; line.append(f"{c}: ok n={len(outs[0])}"); continue
            refs = res.get(ref, {}).get("outs")
            if not refs: line.append(f"{c}: ok (no reference)"); continue
            worst, wk = -1.0, None
            for k in outs:
                if set(outs[k]) != set(refs[k]): worst, wk = float("inf"), f"keys {set(outs[k]) ^ set(refs[k])}"; break
                for n in outs[k]:
                    a, b = outs[k][n], refs[k][n]
                    e_ = (0.0 if a == b else float("inf")) if isinstance(a, (str, bool, type(None), list, tuple, dict)) else rel(a, b)
                    if e_ > worst: worst, wk = e_, f"r{k} {n}"
            line.append(f"{c}: {'agree' if worst < 1e-5 else 'DIFFER'} {worst:.1e}" + ("" if worst < 1e-5 else f" at {wk}") + f" {r[0][2]}")
        print(f"## {name} ({time.time()-t0:.0f} s)\n   " + "\n   ".join(line), flush=True)

class Block(nn.Module):
    def __init__(self, d=32, h=64):
        super().__init__(); self.norm = nn.LayerNorm(d); self.up = nn.Linear(d, h); self.down = nn.Linear(h, d)
    def forward(self, x): return x + self.down(F.gelu(self.up(self.norm(x))))
class Body(nn.Module):
    def __init__(self, n=3, d=32, block=Block):
        super().__init__(); self.layers = nn.ModuleList(block(d) for _ in range(n))
    def forward(self, x):
        for l in self.layers: x = l(x)
        return x
class LM(nn.Module):
    def __init__(self, vocab=50, d=32, n=3, block=Block):
        super().__init__(); self.emb = nn.Embedding(vocab, d); self.body = Body(n, d, block); self.head = nn.Linear(d, vocab, bias=False)
    def forward(self, ids): return self.head(self.body(self.emb(ids)))
class Vec(nn.Module):
    """features in, features out"""
    def __init__(self, d=32, n=3, block=Block, out=16):
        super().__init__(); self.inp = nn.Linear(d, d); self.body = Body(n, d, block); self.out = nn.Linear(d, out)
    def forward(self, x): return self.out(self.body(self.inp(x)))
def ce(logits, ids): return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))

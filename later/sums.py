import torch
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module
add = reducer_module().copy_engines.add_rows
def timed(f):
    for _ in range(3): f()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(20): f()
    b.record(); b.synchronize(); return a.elapsed_time(b) / 20
for world in (2, 4, 8):
    n = 2**26 // world // 2
    whole = torch.randn(world, n, device="cuda").bfloat16(); out = torch.empty(n, device="cuda").bfloat16()
    own, rest = whole[0], whole[1:]
    def three():
        s = torch.sum(rest, 0, dtype=torch.float32); s.add_(own); torch.mul(s, 1 / world, out=out)
    def pair():
        torch.add(torch.sum(rest, 0, dtype=torch.float32), own, out=out)
    one, old = timed(lambda: add(out, whole, 1 / world)), timed(three)
    print(f"world {world}: one kernel {one*1e3:.0f} us ({2*n*(world+1)/one/1e6:.0f} GB/s), three {old*1e3:.0f} us")

"""One H200, some seconds: what attention's backward takes beyond its inputs and its results, in units of the queries in
bf16, and which backend ran. Expected: 32 heads of keys 2.0156 units; 8 heads of keys 4.0156 units."""
import torch
from torch.nn.functional import scaled_dot_product_attention as attend
S, H, D = 32768, 32, 128
unit = S * H * D * 2
def heads(n): return torch.randn(1, S, n, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
print(torch.__version__, torch.backends.cudnn.version(), torch.cuda.get_device_name())
for kv in (32, 8):
    q, k, v = heads(H), heads(kv), heads(kv)
    o = attend(q, k, v, is_causal=True, enable_gqa=kv != H)
    g = torch.randn(1, S, H * D, device="cuda", dtype=torch.bfloat16).view(1, S, H, D).transpose(1, 2)
    for _ in range(2):  # the first builds cuDNN's plan
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(o, (q, k, v), g, retain_graph=True)
        torch.cuda.synchronize(); peak = torch.cuda.max_memory_allocated() - before
        more = peak - sum(x.numel() * x.element_size() for x in grads)
        del grads
    torch.cuda.memory._record_memory_history(max_entries=1000)
    grads = torch.autograd.grad(o, (q, k, v), g, retain_graph=True)
    events = [e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] == "alloc"]
    torch.cuda.memory._record_memory_history(enabled=None)
    print(f"{kv} heads of keys: {more / unit:.4f} units beyond the gradients; backward {o.grad_fn.name()};",
          "allocations in units", [round(e["size"] / unit, 4) for e in events])
    del q, k, v, o, g, grads

import os, sys, re
import triton, triton.language as tl
from triton.compiler import ASTSource, compile as tcompile
from triton.backends.compiler import GPUTarget
import importlib.util, torch
from deepspeed.compile.features.update import adam_kernel as k

fn = k._step
names = [p.name for p in fn.params]


def go(tag, master="*fp32", state="*fp32", bits=False, amsgrad=False):
    sig = {}
    const = {}
    for n in names:
        if n == "table":
            sig[n] = "*i64"
        elif n in ("count", "first"):
            sig[n] = "i32"
        elif n == "masters":
            sig[n] = master
        elif n in ("means", "means_sq"):
            sig[n] = "*u8" if bits else "*fp32"
        elif n == "mosts_sq":
            sig[n] = "constexpr"
            const[n] = None
        elif n in ("scales", "scales_sq", "values", "thresholds", "values_sq", "thresholds_sq"):
            if bits:
                sig[n] = "*fp32"
            else:
                sig[n] = "constexpr"
                const[n] = None
        elif n == "scalars":
            sig[n] = "*fp32"
        elif n in ("GRADIENT", "NEW"):
            sig[n] = "constexpr"
            const[n] = tl.bfloat16
        elif n == "BLOCKS":
            sig[n] = "constexpr"
            const[n] = 8 if bits else 4
    attrs = {
        (names.index(n),): [["tt.divisibility", 16]] for n in ("masters", "means", "means_sq", "table", "scalars")
    }
    src = ASTSource(fn, signature=sig, constexprs={(names.index(a),): b for a, b in const.items()}, attrs=attrs)
    c = tcompile(src, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    ptx = c.asm["ptx"]
    print(
        tag,
        "regs/spill",
        re.findall(r"\.reg .*", ptx)[:0],
        "ld.v4",
        len(re.findall(r"ld\.global[.\w:]*\.v4", ptx)),
        "ld.v2",
        len(re.findall(r"ld\.global[.\w:]*\.v2", ptx)),
        "ld all",
        len(re.findall(r"ld\.global", ptx)),
        "st.v4",
        len(re.findall(r"st\.global[.\w:]*\.v4", ptx)),
        "st all",
        len(re.findall(r"st\.global", ptx)),
        "shared",
        c.metadata.shared,
    )


go("fp32")
go("remainders", master="*i16")
go("8bit", bits=True)
go("8bit+rem", master="*i16", bits=True)

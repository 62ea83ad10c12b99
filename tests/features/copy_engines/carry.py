# Copyright (c) the authors of this fork of DeepSpeed.
# SPDX-License-Identifier: Apache-2.0
"""Carries gradients and parameters between ranks that share GPUs, and checks what arrives.

    torchrun --nproc_per_node 2 tests/features/copy_engines/carry.py

Prints a table on rank 0, and ends with an error if a line of it is wrong. Times mean something only if each rank has
a GPU of its own.
"""

import argparse
import os
import random
import sys
import time
from datetime import timedelta

# Ranks may share a GPU, which NCCL and symmetric memory refuse without these. Torch reads them when it needs them.
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

GPUS = torch.cuda.device_count()
if GPUS < WORLD:
    os.environ.update(
        NCCL_HOSTID=f"rank{RANK}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )

import deepspeed  # noqa: E402
from deepspeed.compile.features.copy_engines import carrier as carriers  # noqa: E402
from deepspeed.compile.zero_1_and_2.gradient.native import reducer_module  # noqa: E402

# Beside this file.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

MIB = 2**20
UNITS = 256  # a shard has a multiple of so many elements
TIMEOUT = 15.0
HANG_TIMEOUT = 4.0
ROWS = []
SHARED = False
BEGAN = time.perf_counter()


def note(name, is_right, text=""):
    """Adds a line to the table, right only if it is right on all ranks."""
    flag = torch.tensor([float(is_right)], device="cuda")
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    ROWS.append((name, bool(flag.item()), text))
    if RANK == 0:
        print(f"[{time.perf_counter() - BEGAN:5.1f} s] {name}: {'ok' if ROWS[-1][1] else 'WRONG'} {text}", flush=True)


def contribution(seed, rank, numel, dtype):
    """What a rank adds, which every rank can compute."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def wanted(seed, numel, dtype, divisor):
    """The average of this rank's shard in fp64, [numel / WORLD]."""
    parts = [contribution(seed, rank, numel, dtype).chunk(WORLD)[RANK].double() for rank in range(WORLD)]
    return torch.stack(parts).sum(0) / divisor, torch.stack(parts).abs().sum(0) / divisor


def is_right(got, seed, numel, dtype, divisor):
    """Whether a shard is the average, summed in fp32 and rounded once to its dtype."""
    mean, size = wanted(seed, numel, dtype, divisor)
    bound = size * 2.0**-22 + mean.abs() * torch.finfo(dtype).eps * 0.5001 + torch.finfo(dtype).tiny
    return bool(((got.double() - mean).abs() <= bound).all())


def reductions(carrier, sizes, dtypes, divisor, delays=False, delayed=None, busy=False):
    """Begins to reduce one bucket after the other, at most two at once, and returns how many shards are wrong.

    The host waits for nothing until all buckets are on their way. Gradients are dropped and overwritten at once.
    """
    results, in_flight = [], []
    product = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)

    def arrive():
        works, messages, seeds = in_flight.pop(0)
        for work in works:
            work.wait()
        for (sent, got), seed in zip(messages, seeds):
            results.append((got.clone(), seed, sent.numel(), sent.dtype))
            sent.fill_(float("nan"))

    for bucket, of_bucket in enumerate(sizes):
        messages, seeds = [], []
        for index, numel in enumerate(of_bucket):
            dtype, seed = dtypes[(bucket + index) % len(dtypes)], 100 * bucket + index
            sent = contribution(seed, RANK, numel, dtype)
            messages.append((sent, torch.full((numel // WORLD,), float("nan"), dtype=dtype, device="cuda")))
            seeds.append(seed)
        if delays and RANK == delayed:
            torch.cuda._sleep(random.Random(bucket).randrange(2_000_000))
            time.sleep(random.Random(bucket).random() * 0.003)
        if busy:
            product @ product
        in_flight.append((carrier.native.reduce(messages, divisor), messages, seeds))
        del messages, sent
        if len(in_flight) > 1:
            arrive()
    while in_flight:
        arrive()
    carrier.native.wait_for_signals()
    return sum(not is_right(*result, divisor) for result in results), len(results)


def check_reductions(make):
    small = make(MIB, 3)
    shards = [UNITS * count for count in (1, 3, 40, 700, 5000)]
    sizes = [[WORLD * shard for shard in shards]] * 3
    for divisor in (WORLD, 1, 3):
        wrong, count = reductions(small, sizes, [torch.bfloat16, torch.float16, torch.float32], divisor)
        note(f"reductions, divisor {divisor}", wrong == 0, f"{count} shards, {wrong} wrong")
    wrong, count = reductions(small, [[WORLD * UNITS * 40000], [WORLD * UNITS * 7]] * 2, [torch.bfloat16], WORLD)
    note("messages far larger than the staging", wrong == 0, f"{40000 * UNITS * 2 * WORLD / MIB:.0f} of 1 MiB")
    pick = random.Random(7)
    sizes = [[WORLD * UNITS * pick.randrange(1, 1500) for _ in range(pick.randrange(1, 5))] for _ in range(60)]
    for delayed in (0, WORLD - 1):
        wrong, count = reductions(small, sizes, [torch.bfloat16], WORLD, True, delayed, True)
        note(f"many buckets, rank {delayed} late", wrong == 0, f"{count} shards, {wrong} wrong")
    small.close()


def check_gathers(make):
    carrier = make(MIB, 3)
    wrong = 0
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        pick = random.Random(number)
        shards = [UNITS * pick.randrange(1, 3000) for _ in range(40)]
        flat = carrier.flat_tensor(sum(shards) * WORLD, torch.empty(0, dtype=dtype, device="cuda"))
        runs = list(flat.split([WORLD * shard for shard in shards]))
        seen = []
        for step in range(4):
            carrier.before_write()
            if RANK == step % WORLD:
                torch.cuda._sleep(20_000_000)
                time.sleep(0.01)
            for index, run in enumerate(runs):
                own = run.chunk(WORLD)[RANK]
                own.copy_(contribution(5000 + 100 * step + index, RANK, own.numel(), dtype))
            works = [carrier.native.gather(runs[first : first + 8]) for first in range(0, len(runs), 8)]
            for first, of_unit in zip(range(0, len(runs), 8), works):
                of_unit.wait()
                seen.append((step, first, [run.clone() for run in runs[first : first + 8]]))
        carrier.native.wait_for_signals()
        for step, first, copies in seen:
            for index, copy in enumerate(copies, first):
                for rank, shard in enumerate(copy.chunk(WORLD)):
                    value = contribution(5000 + 100 * step + index, rank, shard.numel(), dtype)
                    wrong += not torch.equal(shard, value)
        del flat, runs, seen
    note("gathers to the bit", wrong == 0, f"{wrong} shards wrong")
    carrier.close()


def check_sharded_gathers(make):
    """Shards lie in partitions, and runs in memory that is used again."""
    carrier, wrong = make(MIB, 3), 0
    pick = random.Random(3)
    shards = [UNITS * pick.randrange(0, 3000) for _ in range(24)]
    own = carrier.partition(sum(shards), LIKE)
    parts = own.split(shards)
    for step in range(3):
        carrier.before_write()
        for index, part in enumerate(parts):
            part.copy_(contribution(9000 + 100 * step + index, RANK, part.numel(), LIKE.dtype))
        seen = []
        for first in range(0, len(parts), 6):
            of_unit = parts[first : first + 6]
            ends = [WORLD * sum(part.numel() for part in of_unit[:count]) for count in range(len(of_unit))]
            memory = torch.empty(WORLD * sum(part.numel() for part in of_unit), dtype=LIKE.dtype, device="cuda")
            if RANK == step % WORLD:
                torch.cuda._sleep(5_000_000)
            runs = [(begin, WORLD * part.numel()) for begin, part in zip(ends, of_unit)]
            for work in carrier.gather(memory, runs, of_unit):
                work.wait()
            seen += [memory[begin : begin + numel].clone() for begin, numel in runs]
            memory.fill_(float("nan"))
        carrier.native.wait_for_signals()
        for index, copy in enumerate(seen):
            for rank in range(WORLD if copy.numel() else 0):
                shard = copy.chunk(WORLD)[rank]
                value = contribution(9000 + 100 * step + index, rank, shard.numel(), LIKE.dtype)
                wrong += not torch.equal(shard, value)
    note("gathers of sharded parameters", wrong == 0, f"{wrong} shards wrong")
    carrier.close()


def check_memory_and_time(make):
    free = torch.cuda.mem_get_info
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    dist.barrier()
    before = free()[0]
    carrier = make(carriers.STAGING_BYTES, carriers.SLOTS)
    torch.cuda.synchronize()
    dist.barrier()
    taken, stated = before - free()[0], carriers.device_bytes(WORLD)
    if GPUS < WORLD:
        taken /= WORLD // max(GPUS, 1)
    text = f"{taken / MIB:.0f} MiB a rank, stated {stated / MIB:.0f}"
    # The driver maps in units of 2 MiB, and loads a few kernels.
    note("memory on the device", SHARED or taken <= stated + 16 * MIB, text)

    numel = 2**25 // (16 * WORLD * UNITS) * UNITS * WORLD * 16
    messages = [(torch.randn(numel, device="cuda").bfloat16(), torch.empty(numel // WORLD, device="cuda").bfloat16())]
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    host, device = [], []
    for _ in range(12):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        works = carrier.native.reduce(messages, float(WORLD))
        host.append(time.perf_counter() - begun)
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        device.append(time.perf_counter() - begun)
    extra = torch.cuda.max_memory_allocated() - base
    note("memory of sums", extra <= MIB, f"{extra / MIB:.1f} MiB at most")
    host_ms, device_ms = (1e3 * sorted(times)[len(times) // 2] for times in (host, device))
    rate = numel * 2 * (WORLD - 1) / WORLD / device_ms / 1e6
    note("reduce() of 64 MiB", host_ms < 5, f"host {host_ms:.3f} ms, done {device_ms:.2f} ms ({rate:.0f} GB/s a rank)")
    # As in a backward: the device is busy, and the host does not wait.
    in_flight, times = [], []
    for _ in range(40):
        begun = time.perf_counter()
        in_flight.append(carrier.native.reduce(messages, float(WORLD)))
        times.append(time.perf_counter() - begun)
        for work in in_flight[-1]:
            work.wait()
    torch.cuda.synchronize()
    del in_flight
    # The first ones set events up.
    in_a_row = 1e3 * sorted(times[8:])[16]
    note("reduce() of 64 MiB, in a row", in_a_row < 5, f"host {in_a_row:.3f} ms")
    flat = carrier.flat_tensor(numel, LIKE)
    runs = [(first, numel // 16) for first in range(0, numel, numel // 16)]
    host, device = [], []
    for _ in range(12):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        works = carrier.gather(flat, runs)
        host.append(time.perf_counter() - begun)
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        device.append(time.perf_counter() - begun)
    host_ms, device_ms = (1e3 * sorted(times)[len(times) // 2] for times in (host, device))
    note("gather() of 64 MiB", host_ms < 5, f"16 runs, host {host_ms:.3f} ms, done {device_ms:.2f} ms")
    del works, runs, flat, messages
    carrier.close()
    del carrier
    torch.cuda.empty_cache()
    dist.barrier()
    torch.cuda.synchronize()
    left = (before - free()[0]) / MIB
    note("memory after close()", SHARED or abs(left) < 80, f"{left:.0f} MiB of all ranks")


def check_a_rank_that_hangs(make):
    """The last rank does not come while the others have queued more than the staging holds. All must raise."""
    carrier = make(MIB, 3, HANG_TIMEOUT)
    flat = carrier.flat_tensor(WORLD * UNITS * 100, LIKE)
    numel = WORLD * UNITS * 3000
    sent = torch.randn(numel, device="cuda").bfloat16()
    got = torch.empty(numel // WORLD, device="cuda", dtype=torch.bfloat16)
    for work in carrier.native.reduce([(sent, got)], 1.0):
        work.wait()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begun, synchronized, error = time.perf_counter(), float("nan"), None
    try:
        if RANK == WORLD - 1:
            time.sleep(HANG_TIMEOUT + 2)
        works = carrier.native.reduce([(sent, got)], 1.0) + carrier.gather(flat, [(0, flat.numel())])
        for work in works:
            work.wait()
        # The host waits for the device, as a step does, and only then asks.
        (got.float().sum() + flat.float().sum()).item()
        synchronized = time.perf_counter() - begun
        carrier.native.wait_for_signals()
    except Exception as raised:
        error = raised
    took = time.perf_counter() - begun
    said = f"{type(error).__name__}: {str(error).splitlines()[0]}" if error else "nothing"
    print(
        f"rank {RANK}: the device went on after {synchronized:.1f} s, the host after {took:.1f} s: {said}", flush=True
    )
    is_right = isinstance(error, dist.DistBackendError) and took < HANG_TIMEOUT + 4
    carrier.close()
    torch.cuda.synchronize()
    note("a rank hangs", is_right, f"rank 0 raised after {took:.1f} s, timeout {HANG_TIMEOUT:.0f} s")


def check_training(make):
    """An engine trains with copy engines as it does with NCCL, and to the same bits on two ranks."""
    import train

    blocks = {"regional_compilation": ["Block"], "overlap_param_gather": True}
    cases = {
        "stage 1": {},
        "stage 2, accumulating": {"stage": 2, "accumulation": 2},
        "gather overlapped": {**blocks, "stage": 1},
        "sharded": {"regional_compilation": ["Block"], "shard_parameters": "all"},
        "on the host": {"offload": True},
        "a checkpoint loaded": {"reloads": True},
        "on the host and back": {"moves": True},
        "fp16, overflows at first": {"dtype": "fp16"},
    }
    for name, arguments in cases.items():
        try:
            losses, values, carried = train.trained(True, **arguments)
            losses_before, values_before, _ = train.trained(False, **arguments)
        except Exception as error:
            if isinstance(error, dist.DistBackendError):
                raise
            note(f"training, {name}", False, f"{type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        apart = float((values - values_before).abs().max())
        # NCCL halves before it adds, which rounds the smallest numbers of fp16.
        bound = 0.0 if WORLD == 2 and "fp16" not in name else 2e-2
        text = f"loss {losses[-1]:.4f} and {losses_before[-1]:.4f}, parameters at most {apart:.1e} apart"
        note(f"training, {name}", carried and apart <= bound, text)


def check_death_in_training(make):
    """The last rank dies while an engine trains. The others must raise the sentence of a timeout."""
    import train

    engine = train.make(True)
    for carrier in vars(engine.optimizer)["carriers"].values():
        carrier._signals.set_timeout(TIMEOUT)
    train.run(engine, 2)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()

    def die(step):
        if step == 1 and RANK == WORLD - 1:
            print("the last rank dies", flush=True)
            os._exit(0)

    begun, error = time.perf_counter(), None
    try:
        train.run(engine, 4, before=die)
    except Exception as raised:
        error = raised
    took = time.perf_counter() - begun
    said = f"{type(error).__name__}: {error}" if error else "nothing"
    print(f"rank {RANK} after {took:.1f} s: {said.splitlines()[0]}", flush=True)
    is_right = isinstance(error, dist.DistBackendError) and "because another rank has died" in said
    is_right &= took < TIMEOUT + 6
    ROWS.append(("a rank dies in training", is_right, f"rank 0 raised after {took:.1f} s, timeout {TIMEOUT:.0f} s"))


def what_can_be_registered():
    """Says which host memory the driver takes, for a machine on which the carrier cannot be set up."""
    import mmap
    import tempfile

    found = {}
    for name in ("anonymous", "/dev/shm", "/tmp"):
        try:
            if name == "anonymous":
                memory = mmap.mmap(-1, 4096)
            else:
                file = tempfile.TemporaryFile(dir=name)
                file.truncate(4096)
                memory = mmap.mmap(file.fileno(), 4096)
            address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
            found[name] = int(torch.cuda.cudart().cudaHostRegister(address, 4096, 3))
        except Exception as error:
            found[name] = repr(error)
    return f"cudaHostRegister of host memory: {found}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="parts of names of checks, comma-separated")
    parser.add_argument("--shared", action="store_true", help="do not judge memory: other programs use the GPUs")
    options = parser.parse_args()
    global SHARED
    only, SHARED = options.only, options.shared
    device = torch.device("cuda", RANK % max(GPUS, 1))
    os.environ["LOCAL_RANK"] = str(device.index)
    # Built before the ranks wait for each other.
    reducer_module()
    torch.cuda.set_device(device)
    global LIKE
    LIKE = torch.empty(0, dtype=torch.bfloat16, device=device)
    dist.init_process_group("nccl", device_id=device, timeout=timedelta(seconds=40))
    deepspeed.init_distributed("nccl")

    def make(staging_bytes, slots, timeout=TIMEOUT):
        return carriers.CopyEngineCarrier(dist.group.WORLD, device, timeout, staging_bytes=staging_bytes, slots=slots)

    checks = (
        check_reductions,
        check_gathers,
        check_sharded_gathers,
        check_memory_and_time,
        check_a_rank_that_hangs,
        check_training,
        check_death_in_training,
    )
    for check in checks:
        if only and not any(part in check.__name__ for part in only.split(",")):
            continue
        try:
            check(make)
        except Exception as error:
            import traceback

            traceback.print_exc()
            print(f"rank {RANK}: {what_can_be_registered()}", flush=True)
            ROWS.append((check.__name__, False, f"{type(error).__name__}: {str(error).splitlines()[0]}"))
            if isinstance(error, dist.DistBackendError):
                break
    if RANK == 0:
        print(f"\n{WORLD} ranks on {GPUS} GPU(s), torch {torch.__version__}, {time.perf_counter() - BEGAN:.0f} s")
        for name, right, text in ROWS:
            print(f"{name:44}{'ok' if right else 'WRONG':8}{text}")
        sys.stdout.flush()
    # A process group whose rank has died cannot be torn down.
    os._exit(0 if all(right for _, right, _ in ROWS) else 1)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a worker's own kernels take, measured with torch on request.

Reads lines from standard input; answers each with one line of JSON, {case: median microseconds}. Ends with standard
input. Started by tests/gpu/tax.rs, beside ranks whose resident kernel is parked or armed.
"""
import json
import statistics
import sys

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}", flush=True)
    sys.exit(0)

torch.manual_seed(0)


def gemm(m, n, k):
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)


def copy(mib):
    a = torch.empty(mib << 20, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return lambda: b.copy_(a)


# name, work, calls in one sample
CASES = [
    ("gemm 8192x8192x8192", gemm(8192, 8192, 8192), 1),
    ("gemm 2048x7168x2048", gemm(2048, 7168, 2048), 8),
    ("gemm 8x18432x7168 (decode)", gemm(8, 18432, 7168), 16),
    ("gemm 64x18432x7168 (decode)", gemm(64, 18432, 7168), 16),
    ("copy 256 MiB", copy(256), 4),
]


def measure(work, calls, samples=25):
    # As an engine does: inside a graph, so that the processor is not what is measured.
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(samples):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps({name: measure(work, calls) for name, work, calls in CASES}), flush=True)

#!/usr/bin/env python3
"""NCCL's all_reduce inside a replayed CUDA graph: the peer of `bench --graph` on machines with several GPUs.

    tests/gpu/nccl.py --world-size 2 --bytes 1024,43008 [--dtype bf16]

One process a GPU, torch.distributed over loopback; 122 reductions a graph, 3 replays not timed, 21 timed by events, the slowest
rank's counts. Prints rows like bench's: backend lane N bytes dtype algorithm p50 p99. Says "skipped: why" where it cannot run.
"""
import argparse
import os
import statistics
import sys

REDUCTIONS, WARM_UP, REPLAYS = 122, 3, 21


def rank_main(rank, args, port):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=args.world_size, device_id=torch.device("cuda", rank))
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[args.dtype]
    for size in args.bytes:
        tensor = torch.ones(size // dtype.itemsize, dtype=dtype, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        if tensor[0].item() != args.world_size:
            raise SystemExit(f"NCCL: wrong sum {tensor[0].item()}")
        tensor.zero_()
        count = REDUCTIONS if size <= 16 << 20 else 8
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                dist.all_reduce(tensor)
        for _ in range(WARM_UP):
            graph.replay()
        torch.cuda.synchronize()
        dist.barrier()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        for mark in marks[:-1]:
            mark.record()
            graph.replay()
        marks[-1].record()
        torch.cuda.synchronize()
        times = torch.tensor([a.elapsed_time(b) * 1000 / count for a, b in zip(marks, marks[1:])], device="cuda")
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        times = sorted(times.tolist())
        if rank == 0:
            p50, p99 = statistics.median(times), times[-1]
            print(f"{'cuda':<8} {'nccl':<10} {args.world_size:>2} {size:>9} {args.dtype:<5} {'all_reduce':<20} {p50:>10.2f} {p99:>10.2f}", flush=True)
        del graph
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--bytes", type=lambda text: [int(part) for part in text.split(",")], required=True)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"])
    args = parser.parse_args()
    try:
        import torch
        import torch.multiprocessing as processes
    except ImportError as error:
        print(f"skipped: {error}")
        return 0
    if torch.cuda.device_count() < args.world_size:
        print(f"skipped: NCCL needs a GPU for each of {args.world_size} ranks, here are {torch.cuda.device_count()}")
        return 0
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, torch {torch.__version__}")
    processes.spawn(rank_main, args=(args, port), nprocs=args.world_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())

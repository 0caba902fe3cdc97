"""The case `dp` of `consort bench train` in PyTorch: DistributedDataParallel over gloo, one thread for each rank.

torchrun --standalone --nproc-per-node 2 benches/peer_ddp.py [--seconds 2] [--batch 64]

A step is forward, backward and gradient descent, of 50 blocks x + relu(x a) b of width 128. Prints the median of a step on
the slowest rank, as one line of JSON.
"""
import argparse
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BLOCKS, WIDTH, RATE = 50, 128, 1e-4


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(2 * BLOCKS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1))
        self.w = torch.nn.ParameterList(w.clone() for w in weight * WIDTH**-0.5)

    def forward(self, x):
        for i in range(0, len(self.w), 2):
            x = x + torch.relu(x @ self.w[i]) @ self.w[i + 1]
        return x


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(Stack())
    x = torch.randn(args.batch, WIDTH, generator=torch.Generator().manual_seed(2 + rank))

    def step():
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        with torch.no_grad():
            params = list(model.parameters())
            torch._foreach_add_(params, [param.grad for param in params], alpha=-RATE)

    def sample(steps):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) / steps

    def slowest(seconds):
        seconds = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    sample(3)
    steps = max(1, round(0.02 / slowest(sample(3))))  # Samples of 20 ms, as those of consort.
    times, end = [], time.perf_counter() + args.seconds
    while slowest(end - time.perf_counter()) > 0 or len(times) < 5:
        times.append(slowest(sample(steps)))
    if rank == 0:
        ms = round(1e3 * statistics.median(times), 3)
        print(json.dumps({"mode": "ddp", "ranks": ranks, "ms": ms, "samples": len(times)}), flush=True)
    dist.barrier()
    os._exit(0)  # The end of the interpreter aborts now and then, in threads of PyTorch: "terminate called".


if __name__ == "__main__":
    main()

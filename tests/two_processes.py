"""A few training steps on one process, or split over two by FSDP2: run by test_distributed.py.

    torchrun --nproc-per-node 1|2 -m tests.two_processes FILE

accelerate shards on GPUs only, so this calls torch's fully_shard itself, on the wrapped model that
`moesaic finetune` trains, with its optimizer groups and its balance.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moesaic
from moesaic.finetune.balance import Balancer, measure_loads
from moesaic.finetune.lora import parameter_groups, routers_of, wrap
from moesaic.finetune.masked import masked
from tests.families import CONTEXT, tiny_model, tokens

STEPS, BATCH = 6, 8


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, _ = moesaic.convert(tiny_model("qwen3"), "moesaic", "S2A3E8", tokens(8, CONTEXT, seed=1))
    centre = [router.selection_bias.clone() for router in routers_of(model)]
    loads: Any = measure_loads(model, tokens(8, CONTEXT, seed=2))
    model.config.use_cache = False
    wrapped = wrap(model, 4, 16, freeze_router=False)
    balancer = Balancer(wrapped, 0.02, centre, loads.spread_L)
    sharded = 0
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for layer in wrapped.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(wrapped, mesh=mesh)
        sharded = sum(p.to_local().numel() < p.numel() for p in wrapped.parameters())
    optimizer = torch.optim.Adam(parameter_groups(wrapped, 1e-2, 1e-2), betas=(0.9, 0.95))
    losses = []
    with masked(wrapped):
        for ids in tokens(STEPS * BATCH, CONTEXT, seed=3).split(BATCH):
            own = ids.chunk(world)[rank]
            with balancer.forward():
                loss = wrapped(input_ids=own, labels=own).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            balancer.step()
            mean = loss.detach() / world
            dist.all_reduce(mean)
            losses.append(float(mean))
    if rank == 0:
        bias = [router.selection_bias.tolist() for router in routers_of(wrapped)]
        found = {"losses": losses, "bias": bias, "sharded": sharded}
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Conformance check of the whole script: arguments, initialize, its data loader, the loop, a checkpoint, a second run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from conformance import require_close
from test_incumbent_loop import Net, Points, config, net
from torch import nn

import infinity as deepspeed
from infinity import utils
from infinity.engine.loader import RankSampler


def tutorial(nvme: str, *, stage: int, optim: str, params: str) -> None:
    """Two epochs over everybody's samples, one with the engine's backward and step, one with torch's: torch's masters.

    A second engine loads what the first has saved, and has every bit of it.
    """
    engine_config = config(Path(nvme), accumulation=2)
    engine_config["zero_optimization"] = {
        "stage": stage,
        "offload_optimizer": {"device": optim, "nvme_path": nvme},
        "offload_param": {"device": params, "nvme_path": nvme},
    }
    given = ["--deepspeed", "--deepspeed_config", written(nvme, engine_config)]
    args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(given)
    deepspeed.init_distributed()
    model = net()
    engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Points(32)
    )
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for inputs, labels in loader:
            loss = nn.CrossEntropyLoss()(engine(inputs.to(engine.device)), labels.to(engine.device))
            if epoch:
                loss.backward()
                optimizer.step()
            else:
                engine.backward(loss)
                engine.step()
    assert (engine.global_steps, engine.global_samples, engine.skipped_steps) == (64 // engine.train_batch_size(), 64, 0)
    expected = plain_masters(engine)
    found = {name: utils.safe_get_full_fp32_param(one) for name, one in engine.module.named_parameters()}
    for name, value in expected.items():
        require_close(found[name], value, name, 1e-4, 1e-5)
    directory = Path(nvme).parent / f"saved-{stage}-{engine.world_size}"
    engine.save_checkpoint(str(directory), tag="last", client_state={"epoch": 2})
    engine.close()
    again, *_ = deepspeed.initialize(args=args, model=Net())
    with again:
        _, client_state = again.load_checkpoint(str(directory), tag="last")
        assert client_state == {"epoch": 2}
        for name, parameter in again.module.named_parameters():
            master, before = utils.safe_get_full_fp32_param(parameter), found[name]
            assert master is not None
            assert before is not None
            assert torch.equal(master, before), name


def written(nvme: str, engine_config: dict[str, object]) -> str:
    """Return the path of a file with the configuration, the same on every rank."""
    path = Path(nvme).parent / "ds_config.json"
    path.write_text(json.dumps(engine_config))
    return str(path)


def plain_masters(engine: deepspeed.Engine) -> dict[str, torch.Tensor]:
    """Return what plain torch makes of all ranks' samples, in the loader's order."""
    batch = engine.config.batch(engine.world_size)
    model, data = net(), Points(32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=3e-7, foreach=False)
    for epoch in range(2):
        of_ranks = []
        for rank in range(engine.world_size):
            sampler = RankSampler(len(data), batch, rank, seed=engine.config.seed, drop_last=False)
            sampler.set_epoch(epoch)
            of_ranks.append(list(sampler))
        own = batch.micro_batch_size * batch.num_micro_batches
        for first in range(0, len(of_ranks[0]), own):
            for indices in of_ranks:
                for begin in range(first, first + own, batch.micro_batch_size):
                    taken = [data[index] for index in indices[begin : begin + batch.micro_batch_size]]
                    points, classes = zip(*taken, strict=True)
                    loss = nn.CrossEntropyLoss()(model(torch.stack(points)), torch.stack(classes))
                    (loss / (batch.num_micro_batches * engine.world_size)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}

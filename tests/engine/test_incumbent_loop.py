"""The loop of a ZeRO tutorial, literally, with one changed line: the import."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import require_same_state
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import infinity as deepspeed
from infinity.errors import ConfigError, ModelError


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of the plane and the class that they belong to."""

    def __init__(self, num_points: int = 24) -> None:
        generator = torch.Generator().manual_seed(7)
        self.points = torch.randn(num_points, 2, generator=generator)
        self.classes = (self.points[:, 0] > self.points[:, 1]).long()

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.points[index], self.classes[index]


class Net(nn.Module):
    """What a tutorial trains."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return out


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net()


def config(nvme: Path, *, device: str = "nvme", accumulation: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": device, "nvme_path": str(nvme)},
            "offload_param": {"device": device, "nvme_path": str(nvme)},
        },
        "infinity": {"cpu_memory": "256MiB"},
    }


def plain(num_epochs: int, sampler: Any, accumulation: int = 1) -> dict[str, torch.Tensor]:
    """The same in plain PyTorch."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.999), weight_decay=3e-7, foreach=False)
    loader = torch.utils.data.DataLoader(Points(), batch_size=4, sampler=sampler)
    for _ in range(num_epochs):
        for number, (inputs, labels) in enumerate(loader):
            (nn.CrossEntropyLoss()(model(inputs), labels) / accumulation).backward()
            if (number + 1) % accumulation == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("device", ["nvme", "cpu"])
def test_the_tutorial_runs_and_gives_the_weights_of_torch(device: str, nvme: Path, tmp_path: Path) -> None:
    """Arguments, initialize, data loader, forward, backward, step, checkpoint; the weights are those of plain PyTorch."""
    (tmp_path / "ds_config.json").write_text(json.dumps(config(nvme, device=device)))
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")])
    deepspeed.init_distributed()
    model = net()
    parameters = filter(lambda p: p.requires_grad, model.parameters())

    model_engine, optimizer, trainloader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=parameters, training_data=Points()
    )
    criterion = nn.CrossEntropyLoss()
    assert (model_engine.global_rank, model_engine.local_rank, model_engine.world_size) == (0, 0, 1)
    for _ in range(2):
        for data in trainloader:
            inputs, labels = data[0].to(model_engine.device), data[1].to(model_engine.device)
            outputs = model_engine(inputs)
            loss = criterion(outputs, labels)
            model_engine.backward(loss)
            model_engine.step()
    assert (model_engine.global_steps, model_engine.micro_steps, model_engine.skipped_steps) == (12, 12, 0)
    assert optimizer.param_groups[0]["lr"] == model_engine.get_lr()[0] == 0.01
    state = model_engine.state_dict()
    model_engine.save_checkpoint(str(tmp_path / "ckpt"), client_state={"epoch": 2})
    model_engine.close()
    for name, value in plain(2, trainloader.sampler).items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)

    again, *_ = deepspeed.initialize(args=args, model=Net(), config=None)
    _, client_state = again.load_checkpoint(str(tmp_path / "ckpt"))
    assert client_state == {"epoch": 2}
    require_same_state(again.state_dict(), state)
    again.close()


def test_batch_sizes_are_those_of_the_configuration(nvme: Path) -> None:
    """The triple and the counters as users ask for them, while a step of two micro-batches is taken."""
    engine, _, loader, _ = deepspeed.initialize(
        model=net(), training_data=Points(), config_params=config(nvme, accumulation=2)
    )
    with engine:
        assert (
            engine.train_batch_size(),
            engine.train_micro_batch_size_per_gpu(),
            engine.gradient_accumulation_steps(),
        ) == (
            8,
            4,
            2,
        )
        seen = []
        for inputs, labels in loader:
            engine.backward(F.cross_entropy(engine(inputs), labels))
            seen.append((engine.is_gradient_accumulation_boundary(), engine.micro_steps))
            engine.step()
            seen[-1] += (engine.was_step_applied(), engine.global_steps)
        assert seen[:3] == [(False, 1, False, 0), (True, 2, True, 1), (False, 3, False, 1)]
        state = engine.state_dict()
    for name, value in plain(1, loader.sampler, accumulation=2).items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5)


def test_plain_backward_and_the_optimizers_step(nvme: Path) -> None:
    """loss.backward() with engine.optimizer.step() and zero_grad(), PyTorch's own order, is the same bit for bit."""
    states = []
    for plainly in (False, True):
        engine, optimizer, _, _ = deepspeed.initialize(model=net(), config=config(nvme))
        with engine:
            for inputs, labels in torch.utils.data.DataLoader(Points(), batch_size=4):
                if plainly:
                    optimizer.zero_grad()
                loss = F.cross_entropy(engine(inputs), labels)
                loss.backward() if plainly else engine.backward(loss)
                optimizer.step() if plainly else engine.step()
            assert engine.global_steps == 6
            states.append(engine.state_dict())
    require_same_state(states[1], states[0])


def test_a_configuration_is_given_once(nvme: Path, tmp_path: Path) -> None:
    """Two places, no model, or what only several ranks could do: an error that says so."""
    given = config(nvme)
    with pytest.raises(ConfigError, match=r"config and as args.deepspeed_config"):
        deepspeed.initialize(args=argparse.Namespace(deepspeed_config="x.json"), model=net(), config=given)
    with pytest.raises(ModelError, match="model is a NoneType"):
        deepspeed.initialize(config=given)
    with pytest.raises(ConfigError, match="model parallelism"):
        deepspeed.initialize(model=net(), config=given, mpu=object())  # type: ignore[arg-type]


def test_a_rank_that_cannot_find_the_others_says_what_is_missing(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks were promised, but not where they meet: an error, and not two models that drift apart."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK is missing"):
        deepspeed.initialize(model=net(), config=config(nvme))
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is missing"):
        deepspeed.initialize(model=net(), config=config(nvme))
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'many'"):
        deepspeed.initialize(model=net(), config=config(nvme))

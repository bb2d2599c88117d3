"""A model on fake tensors is planned for as the real one is, to the byte, whatever its size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_recompute.fake_model import on_fake_tensors
from lightning_recompute.gpt import GPT
from lightning_recompute.planning import profile_batch
from lightning_recompute.policy import RecomputePolicy

POLICIES = {
    "none": RecomputePolicy(granularity=None),
    "full": RecomputePolicy(),
    "pairs": RecomputePolicy(num_layers=2),
    "core_attn": RecomputePolicy(granularity="selective"),
    "norm+act": RecomputePolicy(granularity="selective", modules=["norm", "act"]),
}


def small(attention: str) -> Callable[[], GPT]:
    return lambda: GPT(
        vocab_size=128, num_layers=4, num_heads=4, hidden_size=64, max_length=32, dropout=0.1, attention=attention
    )


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equal_to_the_real_model(attention: str) -> None:
    real = small(attention)()
    batch = torch.randint(128, (2, 33))
    due = profile_batch(real, batch, optimizers=[torch.optim.AdamW(real.parameters())], exact=False)
    peaks = {name: due.peak_bytes(policy.plan([4])) for name, policy in POLICIES.items()}
    with on_fake_tensors(small(attention)) as model:
        optimizers = [torch.optim.AdamW(model.parameters())]
        found = profile_batch(model, torch.zeros(2, 33, dtype=torch.long), optimizers=optimizers, exact=False)
        assert found.statics == due.statics
        assert {name: found.peak_bytes(policy.plan([4])) for name, policy in POLICIES.items()} == peaks


def test_takes_no_memory() -> None:
    def make() -> GPT:
        return GPT(vocab_size=51200, num_layers=2, num_heads=96, hidden_size=12288, max_length=2048)

    with on_fake_tensors(make, dtype=torch.bfloat16) as model:
        sizes = [parameter.nbytes for parameter in model.parameters()]
        assert all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(sizes) > 8 * 2**30


def test_ties_and_small_tensors_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.norm = nn.BatchNorm1d(4)
            self.table = torch.ones(3)

    with on_fake_tensors(Tied) as model:
        assert model.head.weight is model.embed.weight
        assert not isinstance(model.norm.running_mean, FakeTensor)
        assert model.table.device.type == "cpu"

"""Known models as stages under Lightning, and the reports of such fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from distributed import world_size
from grouped_modules import Plain, seeded
from piped_modules import WIDTH, Net, fit, trainer_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from vit import VisionTransformer

from lightning_recompute.callbacks import MemoryReport, ThroughputReport
from lightning_recompute.strategy import RecomputeStrategy
from lightning_recompute.vocabulary import cross_entropy

VOCABULARY, LENGTH = 32, 9
PEAK = 1e9


class Tokens(Dataset[Any]):
    """Sequences as Hugging Face models take them."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


class Images(Dataset[Any]):
    """Images and their classes."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        image = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(row), dtype=torch.float64)
        return {"pixel_values": image, "labels": torch.tensor(row % 5)}


class Wrapped(pl.LightningModule):
    """What most users write."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, eps=1e-2)


class Classifier(Wrapped):
    """Images."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch["pixel_values"]), batch["labels"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        hits = self.model(batch["pixel_values"]).argmax(-1) == batch["labels"]
        self.log("accuracy", hits.double().mean())


class Own(Plain):
    """Our GPT, its head tied."""

    def __init__(self, **options: Any) -> None:
        super().__init__(num_layers=4, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.seen.update(len(batch["input_ids"]))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def loss(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return cross_entropy(self.divided_logits(ids[:, :-1]), ids[:, 1:])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts nothing."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def llama() -> Wrapped:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    return Wrapped(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)))


def gpt2() -> Wrapped:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 1}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return Wrapped(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **none)))  # type: ignore[arg-type]


def vit() -> Wrapped:
    return Classifier(VisionTransformer(drop_rate=0.0, drop_path_rate=0.0))


MODELS = {
    # what makes it, the data, the strategy's options
    "llama": (llama, Tokens, {}),
    "gpt2": (gpt2, Tokens, {"virtual_pipeline_size": 2, "granularity": "selective"}),
    "vit": (vit, Images, {"schedule": "zbv-zero-bubble"}),
    "own": (Own, Tokens, {"split": [1, 3], "granularity": None}),
}


def models(folder: Path) -> dict[str, Any]:
    """A fit of each, clipped by the norm."""
    found = {}
    for name, (make, data, words) in MODELS.items():
        strategy: Any = "auto"
        if world_size() > 1:
            strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=4, **words)  # type: ignore[arg-type]

        def batches(data: Any = data) -> Any:
            return DataLoader(data(), 8)

        options = {"data": batches, "val": batches, "gradient_clip_val": 0.1}
        found[name] = fit(make, folder, strategy, **options)
    return found


# ---- reports


class Wide(Net):
    """Blocks that are most of the model, beside an embedding that only the first stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(WIDTH, 4096), nn.Linear(4096, WIDTH))  # type: ignore[assignment]


def reports(folder: Path) -> dict[str, Any]:
    """What both callbacks say of a fit; batches of ten rows are microbatches of different sizes."""
    found = {}
    for name, words in {"none": {"granularity": None}, "full": {}}.items():
        memory, speed = MemoryReport(print_table=False), ThroughputReport(PEAK, warmup_steps=1, print_table=False)
        strategy: Any = RecomputeStrategy(**words)  # type: ignore[arg-type]
        if world_size() > 1:
            strategy = RecomputeStrategy(pipeline_parallel_size=2, num_microbatches=4, **words)  # type: ignore[arg-type]
        module = seeded(Wide)
        trainer = trainer_of(folder / name, strategy, callbacks=[memory, speed], max_epochs=2)
        x = torch.randn(40, WIDTH)
        trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), 10))
        found[name] = {
            "parameters": sum(parameter.numel() * 8 for parameter in module.parameters()),
            "memory": memory.rows,
            "speed": [row | {"flops": row["mfu"] * 40 / row["samples_per_second"]} for row in speed.rows],
            "done": [row["hfu"] * 40 / row["samples_per_second"] for row in speed.rows],
        }
    return found

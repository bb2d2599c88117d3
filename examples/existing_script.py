"""An existing Lightning script, and the lines that make it train in less memory (marked with +).

Run it: `python examples/existing_script.py`. Nothing else of the script changes: not the model, not the data, not the
Trainer's other arguments. The losses are the same to the bit.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_recompute import MemoryReport, Recompute  # +


class Classifier(L.LightningModule):
    """A plain transformer classifier, as many projects have one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 5)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        logits = self.head(self.encoder(self.embedding(tokens)).mean(dim=1))
        loss = F.cross_entropy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    L.seed_everything(0)
    data = TensorDataset(torch.randint(100, (64, 32)), torch.randint(5, (64,)))
    trainer = L.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Recompute(granularity="full"), MemoryReport()],  # +
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()

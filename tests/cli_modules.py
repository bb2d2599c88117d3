"""Modules of a user's project, for the command line: they live in a folder that is only the current one there."""

MODULES = '''
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader


class Net(LightningModule):
    """A user's module.

    Args:
        width: Features.
        fault: Where it goes wrong.
    """

    def __init__(self, width: int = 8, fault: str | None = None) -> None:
        super().__init__()
        if fault == "refuses":
            raise ValueError(f"width={width} is too small; 16 is due")
        if fault == "constructor":
            self.nothing.there
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(3))
        self.width, self.fault = width, fault

    def training_step(self, batch, batch_idx):
        if self.fault == "step":
            raise ValueError("a mistake in the user's own step")
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_score", float(batch_idx), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(4, self.width), 2)

    val_dataloader = train_dataloader
'''

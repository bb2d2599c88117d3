"""Fine-tune a Hugging Face model under full recompute. The model is unmodified; the strategy is the only new argument.

Run it: `python examples/hf_finetune.py`. The weights are random and tiny, so that nothing is downloaded; put
`AutoModelForCausalLM.from_pretrained(...)` in their place.
"""

from __future__ import annotations

import lightning as L
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_recompute import MemoryReport, RecomputeStrategy, TextDataModule, ThroughputReport


class CausalLM(L.LightningModule):
    """Any causal language model of transformers, trained on windows of token ids.

    Args:
        hidden_size: Width of the model.
        num_layers: Number of its blocks.
        vocab_size: Number of tokens; 256 for bytes.
        learning_rate: Of AdamW.
    """

    def __init__(
        self, hidden_size: int = 64, num_layers: int = 4, vocab_size: int = 256, learning_rate: float = 1e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=4 * hidden_size,
                num_hidden_layers=num_layers,
                num_attention_heads=4,
                num_key_value_heads=2,
                pad_token_id=0,
            )
        )
        self.learning_rate = learning_rate

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, tokens: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=tokens, labels=tokens).loss, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def main() -> None:
    L.seed_everything(0)
    trainer = L.Trainer(
        max_steps=20,
        limit_val_batches=2,
        accelerator="cpu",
        strategy=RecomputeStrategy(granularity="full"),
        callbacks=[MemoryReport(), ThroughputReport()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(CausalLM(), TextDataModule(length=64, batch_size=4, max_bytes=200_000))


if __name__ == "__main__":
    main()

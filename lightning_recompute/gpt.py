"""GPT as a LightningModule: the reference model of this package, and a small language model in its own right.

Shapes: b batch, s sequence length, h hidden size, V vocabulary. A batch is one integer tensor of token ids (b, s + 1):
the first s ids of a row are the input, the last s, one step on, are the targets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.text import Perplexity

from lightning_recompute.transformer import (
    Activation,
    AttentionKernel,
    BlockConfig,
    Dropout,
    EndOfBranch,
    Norm,
    TransformerBlock,
    check_positive,
    check_word,
    make_norm,
    rotary_tables,
    tensor_parallel_plan,
)
from lightning_recompute.vocabulary import cross_entropy, full_precision, whole

Positions = Literal["learned", "rotary"]
SizeName = Literal["gpt2", "gpt3-175b", "22b", "530b", "1t"]

# What a size names besides its numbers: GPT-2's architecture (Radford et al. 2019).
GPT2_WORDS = {"positions": "learned", "activation": "gelu", "norm": "layernorm", "bias": True, "tied_head": True}
DEFAULT_SHAPE = {"vocab_size": 256, "num_layers": 4, "num_heads": 4, "hidden_size": 128, "max_length": 256}
TOKEN_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GPT(LightningModule):
    """Decoder-only transformer with its training, evaluation and text generation.

    `GPT()` is a tiny model over bytes, `GPT(size="gpt2")` a known one. Building under `torch.device("meta")` takes no
    memory; `to_empty(device=...)` and then `init_weights()` make such a model real.

    Args:
        size: a named architecture (`GPT.sizes`), with learned positions, GELU, LayerNorm, biases and a tied head;
            every argument up to `tied_head` that says otherwise beside it is refused. None: the arguments decide.
            gpt2 is the 124M model; the others are those of Korthikanti et al. 2022 (arXiv 2205.05198, table 3).
        vocab_size: number of token ids V. None: the size's, else 256 (bytes).
        num_layers: number of transformer blocks. None: the size's, else 4.
        num_heads: query heads of a block; divides hidden_size. None: the size's, else 4.
        num_kv_heads: key and value heads, fewer than num_heads for grouped-query attention; divides num_heads.
            None: num_heads.
        hidden_size: width h of the residual stream. None: the size's, else 128.
        ffn_hidden_size: inner width of the MLP. None: 4h with gelu, 8h/3 rounded up to a multiple of 64 with swiglu.
        max_length: longest sequence s in tokens. None: the size's, else 256.
        positions: learned table of max_length positions, or rotary (RoPE).
        activation: gelu (tanh form, as GPT-2), or swiglu with its third linear.
        norm: layernorm or rmsnorm, before attention, before the MLP and before the head.
        bias: whether linears and LayerNorms have biases; the head never has.
        tied_head: whether the head shares the token embedding's weight. None: yes for a named size, else no.
        dropout: rate after the embedding, attention and MLP.
        attention_dropout: rate on attention probabilities. None: the same as dropout.
        attention: eager (matmul, softmax, dropout, matmul) or sdpa (torch's fused kernel; on a CPU torch fuses it only
            where attention_dropout is 0).
        learning_rate: peak of AdamW's learning rate.
        min_learning_rate: where the cosine ends.
        weight_decay: of the linears' weights; norms, biases and embeddings (a tied head with them) have none.
        betas: AdamW's decay rates of the two moments.
        warmup_steps: optimizer steps of linear warm-up. None: a twentieth of decay_steps.
        decay_steps: optimizer step at which the cosine ends. None: the Trainer's number of steps.

    Raises:
        ValueError: an argument out of its range, or one that contradicts `size`.
    """

    sizes: ClassVar[Mapping[SizeName, Mapping[str, int]]] = {
        "gpt2": {"vocab_size": 50257, "num_layers": 12, "num_heads": 12, "hidden_size": 768, "max_length": 1024},
        "22b": {"vocab_size": 51200, "num_layers": 48, "num_heads": 64, "hidden_size": 6144, "max_length": 2048},
        "gpt3-175b": {"vocab_size": 51200, "num_layers": 96, "num_heads": 96, "hidden_size": 12288, "max_length": 2048},
        "530b": {"vocab_size": 51200, "num_layers": 105, "num_heads": 128, "hidden_size": 20480, "max_length": 2048},
        "1t": {"vocab_size": 51200, "num_layers": 128, "num_heads": 160, "hidden_size": 25600, "max_length": 2048},
    }

    def __init__(
        self,
        *,
        size: SizeName | None = None,
        vocab_size: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        hidden_size: int | None = None,
        ffn_hidden_size: int | None = None,
        max_length: int | None = None,
        positions: Positions = "learned",
        activation: Activation = "gelu",
        norm: Norm = "layernorm",
        bias: bool = True,
        tied_head: bool | None = None,
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        attention: AttentionKernel = "sdpa",
        learning_rate: float = 6e-4,
        min_learning_rate: float = 0.0,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int | None = None,
        decay_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        given = {
            "vocab_size": vocab_size,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "hidden_size": hidden_size,
            "ffn_hidden_size": ffn_hidden_size,
            "max_length": max_length,
        }
        words = {"positions": positions, "activation": activation, "norm": norm, "bias": bias, "tied_head": tied_head}
        check_word("positions", positions, get_args(Positions))
        shape = resolve_shape(size, given, words)
        config = BlockConfig(
            hidden_size=shape["hidden_size"],
            num_heads=shape["num_heads"],
            num_kv_heads=shape["num_kv_heads"],
            ffn_hidden_size=shape["ffn_hidden_size"],
            activation=activation,
            norm=norm,
            bias=bias,
            dropout=dropout,
            attention_dropout=dropout if attention_dropout is None else attention_dropout,
            attention=attention,
        )
        if positions == "rotary" and config.head_size % 2:
            raise ValueError(
                f"rotary positions turn pairs of channels, so hidden_size / num_heads={config.head_size} must be even"
            )
        if not 0 <= min_learning_rate <= learning_rate or learning_rate == 0:
            raise ValueError(
                f"{learning_rate=}, {min_learning_rate=}: 0 <= min_learning_rate <= learning_rate > 0 is due"
            )
        if decay_steps is not None:
            check_positive("decay_steps", decay_steps)
        if warmup_steps is not None and warmup_steps < 0:
            raise ValueError(f"{warmup_steps=}: at least 0 is due")

        self.config = config
        self.max_length = shape["max_length"]
        self.tied_head = size is not None if tied_head is None else tied_head
        self.learning_rate, self.min_learning_rate = learning_rate, min_learning_rate
        self.weight_decay, self.betas = weight_decay, betas
        self.warmup_steps, self.decay_steps = warmup_steps, decay_steps

        h, vocab = config.hidden_size, shape["vocab_size"]
        self.token_embedding = nn.Embedding(vocab, h)
        self.position_embedding = nn.Embedding(self.max_length, h) if positions == "learned" else None
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(shape["num_layers"]))
        self.final_norm = make_norm(config)
        self.head = nn.Linear(h, vocab, bias=False)
        self.init_weights()

    # -- the network

    def init_weights(self) -> None:
        """Set every weight as GPT-2 does: normal(0, 0.02), on the way back to the residual stream 0.02 / √(2L).

        It also makes a model real that was built on the meta device, after `to_empty`, which breaks the head's tie.
        """
        if self.tied_head:
            self.head.weight = self.token_embedding.weight
        for module in self.modules():
            self._init_weights(module)
        weight = self.token_embedding.weight
        with torch.device("cpu") if weight.is_meta else weight.device:
            self.val_perplexity, self.test_perplexity = Perplexity(), Perplexity()

    def _init_weights(self, module: nn.Module) -> None:
        """Set one module's own weights; found by this name, as Hugging Face's is."""
        if isinstance(module, nn.Linear | nn.Embedding):
            shrink = math.sqrt(2 * len(self.blocks)) if isinstance(module, EndOfBranch) else 1
            nn.init.normal_(module.weight, std=0.02 / shrink)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: integer token ids (b, s), s at most max_length.

        Returns:
            Logits (b, s, V).

        Raises:
            TypeError: not an integer tensor.
            ValueError: not two-dimensional, empty, or longer than max_length.
        """
        return whole(self.divided_logits(tokens))

    def divided_logits(self, tokens: Tensor) -> Tensor:
        """As forward; where ranks share the head, a DTensor (b, s, V) with their parts of V."""
        check_tokens(tokens, "(b, s)")
        s = tokens.shape[1]
        if not 1 <= s <= self.max_length:
            raise ValueError(
                f"found {s} tokens in a row, 1 to max_length={self.max_length} are due; "
                "shorten the windows of the data or raise max_length"
            )
        x = self.token_embedding(tokens.long())  # (b, s, h)
        rotary = None
        if self.position_embedding is None:
            rotary = rotary_tables(s, self.config.head_size, tokens.device)
        else:
            x = x + self.position_embedding(torch.arange(s, device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, rotary)
        logits: Tensor = self.head(self.final_norm(x))
        return logits

    def tensor_parallel_plan(self) -> dict[str, str]:
        """How the network is divided over tensor-parallel ranks; see `lightning_recompute.tensor_plan.STYLES`."""
        of_blocks = {f"blocks.*.{name}": style for name, style in tensor_parallel_plan(self.config).items()}
        positions = {} if self.position_embedding is None else {"position_embedding": "replicate_split_output"}
        ends = {"token_embedding": "embedding_rowwise_split", "dropout": "dropout", "head": "colwise_vocabulary"}
        return ends | positions | of_blocks | {"final_norm": "sequence_parallel"}

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, num_tokens: int, *, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Continue `tokens` by sampling; in training mode dropout is on, so call `eval()` first.

        Args:
            tokens: the prompt, token ids (b, s); the last max_length of a row are seen.
            num_tokens: how many to append.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: sample among the k likeliest only. None: among all.

        Returns:
            Prompt and continuation (b, s + num_tokens), int64.

        Raises:
            ValueError: a negative temperature, or top_k below 1.
        """
        if temperature < 0:
            raise ValueError(f"{temperature=}: at least 0 is due")
        if top_k is not None:
            check_positive("top_k", top_k)
        tokens = tokens.long()
        for _ in range(num_tokens):
            logits = full_precision(self(tokens[:, -self.max_length :])[:, -1])  # (b, V)
            if temperature == 0:
                following = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits.shape[-1]:
                    weakest = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < weakest, -torch.inf)
                following = torch.multinomial((logits / temperature).softmax(-1), 1)
            tokens = torch.cat((tokens, following), dim=1)
        return tokens

    # -- Lightning

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean cross-entropy in nats a token; logs `train_loss`."""
        inputs, targets = split_batch(batch)
        # No name for the logits: only what the loss itself keeps may outlive this line.
        loss = cross_entropy(self.divided_logits(inputs), targets)
        self.log("train_loss", loss, prog_bar=True, batch_size=len(batch))
        return loss

    # Perplexity sums begin anew at each epoch's start, in float32: bf16-true would keep them in 16 bit, and `validate`
    # leaves tensors of inference mode, which a later `fit` may not change.
    def on_validation_epoch_start(self) -> None:
        """Clear `val_perplexity`."""
        self.val_perplexity.set_dtype(torch.float32).reset()

    def on_test_epoch_start(self) -> None:
        """Clear `test_perplexity`."""
        self.test_perplexity.set_dtype(torch.float32).reset()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log `val_loss` and `val_perplexity` of the epoch."""
        self._evaluate(batch, "val", self.val_perplexity)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log `test_loss` and `test_perplexity` of the epoch."""
        self._evaluate(batch, "test", self.test_perplexity)

    def _evaluate(self, batch: Tensor, split: str, perplexity: Perplexity) -> None:
        inputs, targets = split_batch(batch)
        logits = full_precision(self(inputs))
        perplexity.update(logits, targets)
        self.log(f"{split}_loss", cross_entropy(logits, targets), sync_dist=True, batch_size=len(batch))
        self.log(f"{split}_perplexity", perplexity, prog_bar=True, batch_size=len(batch))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The likeliest id for each target of a batch (b, s + 1): ids (b, s), to be compared with `batch[:, 1:]`."""
        inputs, _ = split_batch(batch)
        ids: Tensor = self(inputs).argmax(-1)
        return ids

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW, decaying only the linears' weights, with linear warm-up and cosine decay per optimizer step.

        Raises:
            ValueError: the Trainer runs without end and decay_steps is not given.
        """
        linears = {id(module.weight) for module in self.modules() if isinstance(module, nn.Linear)}
        linears.discard(id(self.token_embedding.weight))  # a tied head is an embedding
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if id(p) in linears], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if id(p) not in linears], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas)

        total = self.trainer.estimated_stepping_batches if self.decay_steps is None else self.decay_steps
        if math.isinf(total):
            raise ValueError("the Trainer has no last step, so the cosine has no end; give GPT decay_steps=<steps>")
        total = int(total)
        warmup = total // 20 if self.warmup_steps is None else self.warmup_steps
        floor = self.min_learning_rate / self.learning_rate
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, warmup, total, floor))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def resolve_shape(
    size: SizeName | None, given: Mapping[str, int | None], words: Mapping[str, object]
) -> dict[str, int]:
    """The numbers of a GPT: those `given` (not None), else those of the named size, else the defaults.

    Raises:
        ValueError: an unknown size, numbers or other `words` that contradict it, or a number below 1.
    """
    shape: dict[str, int] = {}
    if size is not None:
        check_word("size", size, get_args(SizeName))
        shape = dict(GPT.sizes[size])
        due = shape | {"num_kv_heads": shape["num_heads"], "ffn_hidden_size": 4 * shape["hidden_size"]} | GPT2_WORDS
        found = {name: value for name, value in {**given, **words}.items() if value not in (None, due[name])}
        if found:
            raise ValueError(
                f"size={size!r} is an architecture with {spell({name: due[name] for name in found})}, but found "
                f"{spell(found)}; leave that out, or leave size out and write beside it {spell(shape)}, tied_head=True"
            )
    shape = DEFAULT_SHAPE | shape | {name: number for name, number in given.items() if number is not None}
    h = shape["hidden_size"]
    shape.setdefault("num_kv_heads", shape["num_heads"])
    shape.setdefault("ffn_hidden_size", 64 * math.ceil(8 * h / 3 / 64) if words["activation"] == "swiglu" else 4 * h)
    for name, number in shape.items():
        check_positive(name, number)
    return shape


def spell(words: Mapping[str, object]) -> str:
    """Arguments as a person writes them: `a=1, b='x'`."""
    return ", ".join(f"{name}={value!r}" for name, value in words.items())


def check_tokens(tokens: object, shape: str) -> None:
    """Raise TypeError or ValueError unless `tokens` is a two-dimensional integer tensor."""
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"found a {type(tokens).__name__}; GPT takes one integer tensor of token ids {shape}: "
            "let the dataset yield such rows, as TextDataModule does"
        )
    if tokens.dtype not in TOKEN_DTYPES:
        raise TypeError(f"found token ids of {tokens.dtype}; integers are due: convert them with .long()")
    if tokens.ndim != 2:
        raise ValueError(f"found token ids of shape {tuple(tokens.shape)}; {shape} is due: one row per sequence")


def split_batch(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Cut token ids (b, s + 1) into inputs (b, s) and int64 targets (b, s), one step on."""
    check_tokens(batch, "(b, s + 1)")
    if batch.shape[1] < 2:
        raise ValueError(f"found a batch of shape {tuple(batch.shape)}; (b, s + 1) is due: at least two tokens a row")
    return batch[:, :-1], batch[:, 1:].long()


def warmup_cosine(step: int, warmup: int, total: int, floor: float) -> float:
    """Factor of the learning rate at optimizer step 0, 1, ...: linear up to 1, then a cosine down to floor."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

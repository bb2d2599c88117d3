"""Tiny Hugging Face models under tensor parallelism with the plans they carry, each beside one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from group_cases import difference, join_processes, step_alone, step_in_groups
from plans import PLANS
from torch import Tensor, nn

from lightning_recompute.blocks import find_blocks
from lightning_recompute.groups import ParallelGroups
from lightning_recompute.parallel import ParallelModule, ParallelSettings

VOCABULARY = 64
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FEW_HEADS = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)),
    "llama, eager, tied, biases": lambda: hf.LlamaForCausalLM(
        hf.LlamaConfig(
            **SMALL, tie_word_embeddings=True, attn_implementation="eager", attention_bias=True, mlp_bias=True
        )
    ),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SMALL)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL, head_dim=8)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, head_dim=8)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**SMALL)),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**FEW_HEADS)),
    # heads with a latent of their own and a part that all share
    "deepseek_v2": lambda: hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**FEW_HEADS, **LATENT)),
    # plans that leave attention whole
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, **EXPERTS, head_dim=8)),
    "mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**SMALL, **EXPERTS)),
}
SINGLE = ("mixtral", "gemma2", "deepseek_v2", "gpt_oss")
"""Experts' kernels have no float64; Gemma computes its norms in float32 whatever it is given."""


class Trained(nn.Module):
    """Holds a model as a LightningModule does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.net(input_ids=ids, labels=ids).loss
        return loss


def make(name: str) -> Trained:
    torch.manual_seed(0)
    model = Trained(MODELS[name]()).train()
    return model if name in SINGLE else model.double()


def ids() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))


def parity() -> dict[str, float]:
    found = {}
    for name in MODELS:
        alone = make(name)
        due = step_alone(alone, functools.partial(alone.loss, ids()))
        for layout in ("tp2", "tp2 sp"):
            for plan in (None, "uniform-1"):
                model = make(name)
                blocks = [block for blocks in find_blocks(model) for block in blocks.blocks]
                recompute = None if plan is None else PLANS[plan]([len(blocks)])
                step = step_in_groups(model, model.loss, ids(), layout, recompute, blocks)
                found[f"{name} | {layout} | {plan}"] = difference(step, due)
    return found


def generated() -> dict[str, bool]:
    """Text generation, whose single tokens no ranks can divide, gives what one process gives."""
    found = {}
    for sequence in (False, True):
        alone, model = make("llama").eval(), make("llama").eval()
        due = alone.net.generate(ids(), max_new_tokens=5, do_sample=False)
        groups = ParallelGroups.build("cpu", tensor=2)
        parallel = ParallelModule(model, groups, ParallelSettings(tensor=2, sequence=sequence))
        parallel.divide()
        ours = model.net.generate(ids(), max_new_tokens=5, do_sample=False)
        training = parallel.run(model.train().loss, ids())
        found[f"sequence={sequence}"] = torch.equal(due, ours) and bool(training > 0)
        parallel.remove()
    return found


def check_all(folder: Path) -> dict[str, Any]:
    join_processes()
    hf.logging.set_verbosity_error()
    return {"parity": parity(), "generated": generated()}

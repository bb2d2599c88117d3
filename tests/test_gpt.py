import copy
import inspect
import math
import pickle
import re
import weakref

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_recompute.data import TextDataModule
from lightning_recompute.gpt import GPT, warmup_cosine

TINY = {"vocab_size": 97, "num_layers": 2, "num_heads": 4, "hidden_size": 32, "max_length": 24}
MODERN = {
    "positions": "rotary",
    "activation": "swiglu",
    "norm": "rmsnorm",
    "bias": False,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
}


def tiny(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(**{**TINY, **options})


def tokens(b: int = 2, s: int = 25) -> torch.Tensor:
    return torch.randint(97, (b, s), generator=torch.Generator().manual_seed(1))


def rows(n: int) -> DataLoader:
    return DataLoader(tokens(n), batch_size=2)


def loss_and_gradients(model: GPT, step=None) -> list[torch.Tensor]:
    """One training step outside a Trainer, where nothing can be logged."""
    model.log = lambda *args, **kwargs: None
    model.zero_grad()
    torch.manual_seed(2)
    loss = (step or model.training_step)(tokens(), 0)
    loss.backward()
    del model.log
    return [loss.detach(), *(p.grad for p in model.parameters())]


def quiet_trainer(**options) -> L.Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **silent, **options})


# -- the network


def test_logits_equal_hugging_face_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_layer=2, n_head=4, n_embd=32, n_positions=24)).eval()
    theirs = reference.state_dict()
    model = tiny(tied_head=True).eval()
    weights = {
        "token_embedding.weight": theirs["transformer.wte.weight"],
        "position_embedding.weight": theirs["transformer.wpe.weight"],
        "head.weight": theirs["transformer.wte.weight"],
    }
    for kind in ("weight", "bias"):
        weights[f"final_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for i in range(2):
            block = f"transformer.h.{i}"
            q, k, v = theirs[f"{block}.attn.c_attn.{kind}"].chunk(3, dim=-1)  # Conv1D keeps its weights transposed
            linears = {"attn.q_proj": q, "attn.k_proj": k, "attn.v_proj": v}
            linears["attn.o_proj"] = theirs[f"{block}.attn.c_proj.{kind}"]
            linears["mlp.up_proj"] = theirs[f"{block}.mlp.c_fc.{kind}"]
            linears["mlp.down_proj"] = theirs[f"{block}.mlp.c_proj.{kind}"]
            weights |= {f"blocks.{i}.{name}.{kind}": weight.t() for name, weight in linears.items()}
            weights[f"blocks.{i}.attn_norm.{kind}"] = theirs[f"{block}.ln_1.{kind}"]
            weights[f"blocks.{i}.mlp_norm.{kind}"] = theirs[f"{block}.ln_2.{kind}"]
    model.load_state_dict(weights)
    ids = tokens(s=24)
    torch.testing.assert_close(model(ids), reference(ids).logits)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_equal_hugging_face_llama(attention):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 24}
    reference = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes, **options)).eval()
    ours = {
        "model.embed_tokens": "token_embedding",
        "model.norm": "final_norm",
        "lm_head": "head",
        "model.layers": "blocks",
        "self_attn": "attn",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    weights = {}
    for name, weight in reference.state_dict().items():
        for their_name, our_name in ours.items():
            name = name.replace(their_name, our_name)
        weights[name] = weight
    model = tiny(**MODERN, attention=attention).eval()
    model.load_state_dict(weights)
    ids = tokens(s=24)
    torch.testing.assert_close(model(ids), reference(ids).logits)


@pytest.mark.parametrize(
    ("size", "billions"), [("gpt2", 0.124439808), ("22b", 22.1), ("gpt3-175b", 174.6), ("530b", 529.6), ("1t", 1008.0)]
)
def test_named_sizes_have_the_published_number_of_parameters(size, billions):
    with torch.device("meta"):
        model = GPT(size=size)
    found = sum(p.numel() for p in model.parameters())
    assert found == pytest.approx(billions * 1e9, rel=0 if size == "gpt2" else 0.002)
    v, layers, heads, h, s = (
        GPT.sizes[size][k] for k in ("vocab_size", "num_layers", "num_heads", "hidden_size", "max_length")
    )
    assert found == layers * (12 * h * h + 13 * h) + (v + s) * h + 2 * h
    assert model.config.num_heads == heads


def test_size_refuses_what_contradicts_it():
    with torch.device("meta"):
        assert GPT(size="gpt2", num_layers=12, positions="learned", tied_head=True).max_length == 1024
        for clash in (
            {"num_layers": 2},
            {"num_kv_heads": 4},
            {"ffn_hidden_size": 1},
            {"positions": "rotary"},
            {"activation": "swiglu"},
            {"norm": "rmsnorm"},
            {"bias": False},
            {"tied_head": False},
            {"max_length": 2048},
            {"vocab_size": 256},
        ):
            ((name, value),) = clash.items()
            with pytest.raises(ValueError, match=f"size='gpt2' .*found {name}={value!r}; leave that out, or"):
                GPT(size="gpt2", **clash)
    with pytest.raises(ValueError, match="size='gpt5' is unknown; choose one of 'gpt2', 'gpt3-175b'"):
        GPT(size="gpt5")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: at least 1"),
        ({"vocab_size": -1}, "vocab_size=-1: at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0: at least 1"),
        ({"positions": "sinus"}, "choose one of 'learned', 'rotary'"),
        ({"positions": "rotary", "hidden_size": 12}, "must be even"),
        ({"learning_rate": 1e-4, "min_learning_rate": 1e-3}, "min_learning_rate"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"decay_steps": 0}, "decay_steps=0"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tiny(**options)


def test_initial_weights():
    torch.manual_seed(0)
    model = GPT(num_layers=8, hidden_size=128)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.eq(0).all(), name
        elif "norm" in name:
            assert parameter.eq(1).all(), name
        else:
            residual = "o_proj" in name or "down_proj" in name
            assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name
    assert model(tokens()).std() < 1  # so that the first loss is near ln V
    assert GPT(activation="swiglu").config.ffn_hidden_size == 384  # 8/3 of 128, to a multiple of 64


@pytest.mark.parametrize("tied_head", [True, False])
def test_built_on_meta_then_made_real(tied_head):
    model = tiny(tied_head=tied_head)
    with torch.device("meta"):
        empty = GPT(**TINY, tied_head=tied_head)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    empty.to_empty(device="cpu")
    for each in (model, empty):
        torch.manual_seed(3)
        each.init_weights()
    assert (empty.head.weight is empty.token_embedding.weight) == tied_head
    torch.testing.assert_close(empty.state_dict(), model.state_dict(), rtol=0, atol=0)
    results = quiet_trainer().validate(empty, rows(4), verbose=False)
    assert results[0]["val_perplexity"] == pytest.approx(math.exp(results[0]["val_loss"]), rel=1e-4)


def test_tied_head_is_one_weight_with_the_sum_of_both_gradients():
    tied, untied = tiny(tied_head=True), tiny(tied_head=False)
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1
    untied.load_state_dict(tied.state_dict())
    loss_and_gradients(tied)
    loss_and_gradients(untied)
    torch.testing.assert_close(
        tied.token_embedding.weight.grad, untied.token_embedding.weight.grad + untied.head.weight.grad
    )


@pytest.mark.parametrize("options", [{"tied_head": True, "dropout": 0.1}, {**MODERN, "dropout": 0.1}])
def test_copies_are_equal_and_apart(options):
    model = tiny(**options)
    before = loss_and_gradients(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(torch.equal, before, loss_and_gradients(clone)))
        assert (clone.head.weight is clone.token_embedding.weight) == (
            model.head.weight is model.token_embedding.weight
        )
        nn.init.zeros_(clone.head.weight)
    assert all(map(torch.equal, before, loss_and_gradients(model)))


def test_compiled_without_graph_breaks():
    model = tiny(**MODERN, attention="eager", dropout=0.1, num_layers=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(2)
    eager = model(tokens()[:, :-1])
    torch.manual_seed(2)
    torch.testing.assert_close(compiled(tokens()[:, :-1]), eager)


def test_nothing_but_the_loss_outlives_the_forward():
    model, outputs = tiny(), []
    model.log = lambda *args, **kwargs: None
    model.head.register_forward_hook(lambda module, args, logits: outputs.append(weakref.ref(logits)))
    loss = model.training_step(tokens(), 0)
    assert loss.requires_grad
    assert [output() for output in outputs] == [None]


def test_tokens_of_any_integer_type():
    model = tiny()
    for dtype in (torch.uint8, torch.int32):
        assert torch.equal(model(tokens()[:, 1:].to(dtype)), model(tokens()[:, 1:]))


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ({"input_ids": tokens()}, TypeError, r"found a dict; GPT takes one integer tensor of token ids \(b, s \+ 1\)"),
        ((tokens(), tokens()), TypeError, "found a tuple"),
        (tokens().float(), TypeError, r"found token ids of torch.float32; integers are due"),
        (tokens().bool(), TypeError, "found token ids of torch.bool"),
        (tokens()[0], ValueError, r"found token ids of shape \(25,\); \(b, s \+ 1\) is due"),
        (tokens()[:, :1], ValueError, "at least two tokens a row"),
        (tokens(s=26), ValueError, "found 25 tokens in a row, 1 to max_length=24 are due"),
    ],
)
def test_wrong_batches_are_refused(batch, error, message):
    for step in ("training_step", "validation_step", "predict_step"):
        with pytest.raises(error, match=message):
            getattr(tiny(), step)(batch, 0)


def test_generate():
    model = tiny().eval()
    nn.init.normal_(model.head.weight)
    prompt = tokens(s=20)
    greedy = model.generate(prompt, 10, temperature=0)
    assert greedy.shape == (2, 30)
    assert torch.equal(greedy[:, :20], prompt)
    assert torch.equal(greedy[:, 20], model(prompt)[:, -1].argmax(-1))
    assert torch.equal(greedy[:, 29], model(greedy[:, 5:29])[:, -1].argmax(-1))  # sees its last 24 tokens
    assert torch.equal(model.generate(prompt, 10, top_k=1), greedy)
    likeliest = model(prompt)[:, -1].topk(3).indices
    sampled = torch.cat([model.generate(prompt, 1, top_k=3, temperature=5.0)[:, 20:] for _ in range(60)], dim=1)
    for row, allowed in zip(sampled, likeliest, strict=True):
        assert set(row.tolist()) == set(allowed.tolist())
    with pytest.raises(ValueError, match="temperature"):
        model.generate(prompt, 1, temperature=-1.0)
    with pytest.raises(ValueError, match="top_k=0"):
        model.generate(prompt, 1, top_k=0)


# -- training


@pytest.mark.parametrize("tied_head", [True, False])
def test_only_the_weights_of_linears_decay(tied_head):
    model = tiny(tied_head=tied_head, decay_steps=10)
    model.blocks[0].attn.q_proj.weight.requires_grad_(False)
    decay, no_decay = model.configure_optimizers()["optimizer"].param_groups
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in (decay, no_decay))
    projections = {n for n in names.values() if "proj.weight" in n} - {"blocks.0.attn.q_proj.weight"}
    assert decayed == projections | (set() if tied_head else {"head.weight"})
    assert kept == {n for n in names.values() if "norm" in n or "bias" in n or "embedding" in n}


def test_learning_rate_warms_up_and_follows_a_cosine():
    rates = [warmup_cosine(step, warmup=10, total=110, floor=0.1) for step in range(130)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110:] == pytest.approx([0.1] * 20)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert warmup_cosine(0, warmup=0, total=1, floor=0.0) == 1


class Rates(L.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_the_schedule_spans_the_trainer_steps_and_counts_optimizer_steps():
    model = tiny(learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2)
    seen = Rates()
    quiet_trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[seen]).fit(model, rows(20))
    assert seen.rates == pytest.approx([warmup_cosine(batch // 2, 2, 10, 0.1) for batch in range(20)])
    with pytest.raises(ValueError, match="give GPT decay_steps"):
        quiet_trainer(max_epochs=-1).fit(tiny(), rows(2))


def test_learns_real_text(tmp_path):
    L.seed_everything(0, verbose=False)
    data = TextDataModule(length=64, batch_size=16, max_bytes=300_000, max_eval_samples=32)
    model = GPT(num_layers=2, hidden_size=64, max_length=64, learning_rate=4e-3, dropout=0.05)
    first = quiet_trainer().validate(model, data, verbose=False)[0]
    assert first["val_loss"] == pytest.approx(math.log(256), abs=0.1)
    saver = ModelCheckpoint(tmp_path, save_weights_only=True)
    trainer = quiet_trainer(max_steps=30, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(model, data)
    assert trainer.callback_metrics["train_loss"] < 3.6
    (val,) = trainer.validate(model, data, verbose=False)
    assert val["val_loss"] < 3.6
    assert val["val_perplexity"] == pytest.approx(math.exp(val["val_loss"]), rel=1e-3)
    (test,) = trainer.test(model, data, verbose=False)
    assert test["test_perplexity"] == pytest.approx(math.exp(test["test_loss"]), rel=1e-3)
    predictions = trainer.predict(model, data)
    targets = next(iter(data.predict_dataloader()))[:, 1:]
    assert predictions[0].shape == targets.shape
    assert (predictions[0] == targets).float().mean() > 0.1  # better than any constant guess is by far

    loaded = GPT.load_from_checkpoint(saver.best_model_path, weights_only=True)
    assert trainer.validate(loaded, data, verbose=False) == [val]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("options", [{"attention": "eager", "dropout": 0.1}, MODERN])
def test_trains_in_16_bit(precision, dtype, options):
    model = tiny(**options)
    trainer = quiet_trainer(max_steps=2, precision=precision)
    trainer.fit(model, rows(4), rows(2))
    assert {p.dtype for p in model.parameters()} == {dtype}
    val = trainer.callback_metrics
    assert val["val_perplexity"].item() == pytest.approx(math.exp(val["val_loss"]), rel=1e-4)
    assert trainer.callback_metrics["train_loss"].item() == pytest.approx(math.log(97), abs=0.3)


# -- the command line


def test_every_argument_has_help_and_a_checked_type(monkeypatch):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(GPT, "model")
    monkeypatch.setenv("COLUMNS", "1000")
    helped = re.findall(r"^  --model\.(\w+) .*?\s{2,}(\w.{15,}) \(type: .*\)$", parser.format_help(), re.MULTILINE)
    assert {name for name, _ in helped} == set(inspect.signature(GPT).parameters)
    for wrong in ("positions=rotery", "size=gpt9", "attention=flash", "num_layers=two", "hiden_size=3"):
        with pytest.raises(ArgumentError, match=wrong.split("=")[0]):
            parser.parse_args([f"--model.{wrong}"])
    config = parser.parse_args(["--model.num_layers=3", "--model.positions=rotary", "--model.betas=[0.9, 0.99]"])
    model = parser.instantiate_classes(config).model
    assert (len(model.blocks), model.position_embedding, model.betas) == (3, None, (0.9, 0.99))

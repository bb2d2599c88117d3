"""Arguments and outputs of any kind: positional, keyword-only, nested, None, numbers, objects, in-place edges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from parity import FULL, PAIRS, assert_parity, never_silent
from torch import Tensor, nn
from toys import WIDTH, Block, Stack, rows, step

from lightning_recompute.policy import RecomputePolicy
from lightning_recompute.recompute import RecomputeError, apply_recompute

BOTH = pytest.mark.parametrize("policy", [FULL, PAIRS], ids=["single", "pairs"])


@dataclasses.dataclass
class DataOut:
    h: Tensor
    aux: Tensor


class NamedOut(NamedTuple):
    h: Tensor
    aux: Tensor


def model_output(h: Tensor, aux: Tensor) -> Any:
    from transformers.utils import ModelOutput

    @dataclasses.dataclass
    class Out(ModelOutput):
        h: Tensor | None = None
        aux: Tensor | None = None

    return Out(h=h, aux=aux)


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda h, aux: {"h": h, "aux": aux},
    "dataclass": DataOut,
    "NamedTuple": NamedOut,
    "tuple": lambda h, aux: (h, aux),
    "list in dict": lambda h, aux: {"all": [h, {"aux": aux}], "count": 3, "none": None},
    "ModelOutput": model_output,
}


def parts(output: Any) -> tuple[Tensor, Tensor]:
    """Hidden state and auxiliary value of any of these outputs, by the access its type offers."""
    if isinstance(output, tuple) and not hasattr(output, "h"):
        return output
    if isinstance(output, dict) and "all" in output:
        assert output["count"] == 3
        assert output["none"] is None
        return output["all"][0], output["all"][1]["aux"]
    if type(output) is dict:
        return output["h"], output["aux"]
    return output.h, output.aux


class KeywordOnly(Block):
    """Takes keywords only and returns a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *, hidden: Tensor, scale: float | None = None) -> Any:
        h = hidden + self.inner(hidden) * (1.0 if scale is None else scale)
        return OUTPUTS[self.kind](h, h.square().mean())


class PassesKeywords(Stack):
    def forward(self, x: Tensor) -> Tensor:
        hidden, total = self.embed(x), torch.zeros(())
        for index, block in enumerate(self.blocks):
            output = block(hidden=hidden, scale=None if index % 2 else 0.5)
            hidden, aux = parts(output)
            total = total + aux
        return self.head(hidden) + total


@BOTH
@pytest.mark.parametrize("kind", OUTPUTS)
def test_keywords_in_and_structures_out(policy: RecomputePolicy, kind: str) -> None:
    assert_parity(lambda: PassesKeywords(KeywordOnly(kind) for _ in range(4)), step, policy)


KEYWORDS = ["debug", "preserve_rng_state", "context_fn", "use_reentrant", "original", "unit", "index", "frame", "args"]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_a_block_keeps_its_own_keywords(keyword: str) -> None:
    """No name that an engine might use for itself is taken from the block."""

    class Reads(Block):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            assert list(options) == [keyword]
            return x + self.inner(x) * options[keyword]

    class Gives(Stack):
        def hidden(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, **{keyword: 0.5})
            return x

    assert_parity(lambda: Gives(Reads() for _ in range(2)), step)


class Mask:
    """An argument that is no tensor but holds one."""

    def __init__(self, keep: Tensor, lengths: list[int]) -> None:
        self.keep = keep
        self.lengths = lengths


class TakesAnything(Block):
    def forward(
        self, number: int, x: Tensor, mask: Any, nothing: None, *more: Any, table: Any = None, flag: bool = True
    ) -> Tensor:
        assert nothing is None
        assert flag is True
        keep = mask.keep * len(mask.lengths) if isinstance(mask, Mask) else mask * mask.scale
        y = self.inner(x) * keep * number
        for value in more:
            y = y + value
        return x + y * table["deep"][0]["weight"]


class GivesAnything(Stack):
    """Positional int, mask object or tensor with an attribute, None, a variable number of tensors, a nested dict."""

    def __init__(self, kind: str) -> None:
        super().__init__(TakesAnything() for _ in range(4))
        self.kind = kind
        self.gate = nn.Linear(WIDTH, WIDTH)

    def mask(self) -> Any:
        keep = (torch.arange(WIDTH) % 3 > 0).float()
        if self.kind == "object":
            return Mask(keep, [1, 2])
        keep.scale = 2.0
        return keep

    def hidden(self, x: Tensor) -> Tensor:
        mask, gate = self.mask(), self.gate(x).sigmoid()
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(index + 1, x, mask, None, gate, 0.5, table={"deep": [{"weight": gate, "unused": None}]})
        return x


@BOTH
@pytest.mark.parametrize("kind", ["tensor with attribute", "object"])
def test_arguments_of_any_kind(policy: RecomputePolicy, kind: str) -> None:
    assert_parity(lambda: GivesAnything(kind), step, policy)


class Consumes(Block):
    """Takes its options out of a dict and leaves its auxiliary loss in a list and on itself."""

    def forward(self, x: Tensor, options: dict[str, Any], losses: list[Tensor]) -> Tensor:
        y = self.inner(x) * options.pop("scale")
        losses.append(y.square().mean())
        self.aux_loss = y.abs().mean()
        return x + y


class Collects(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, losses = self.embed(x), []
        for block in self.blocks:
            options = {"scale": x.mean()}
            x = block(x, options, losses)
            assert options == {}
        total = torch.stack([*losses, *(block.aux_loss for block in self.blocks)])
        assert len(total) == 8
        return self.head(x) + total.sum()


@BOTH
def test_containers_that_a_block_changes(policy: RecomputePolicy) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        loss = step(model)
        return [loss, *(block.aux_loss for block in model.blocks)]

    assert_parity(lambda: Collects(Consumes() for _ in range(4)), run, policy, num_steps=2)


class TwoStreams(Stack):
    """Each block returns (hidden, skip); later blocks read the skip of earlier ones, also across units."""

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        skips: list[Tensor] = []
        for block in self.blocks:
            x, skip = block(x, skips[-1] if skips else None, first=skips[0] if skips else None)
            skips.append(skip)
        return x + sum(skips)


class Skips(Block):
    def forward(self, x: Tensor, skip: Tensor | None = None, *, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        for other in (skip, first):
            if other is not None:
                y = y * other.sigmoid()
        return x + y, y.tanh()


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_outputs_of_earlier_blocks_as_arguments(num_layers: int) -> None:
    assert_parity(lambda: TwoStreams(Skips() for _ in range(4)), step, RecomputePolicy(num_layers=num_layers))


class DerivedArgument(Stack):
    """The second argument is made outside the blocks from what the block before returned."""

    def __init__(self, with_grad: bool) -> None:
        super().__init__(Skips() for _ in range(4))
        self.with_grad = with_grad

    def hidden(self, x: Tensor) -> Tensor:
        x, skip = self.embed(x), None
        for block in self.blocks:
            x, _ = block(x, skip)
            skip = self.head(x) if self.with_grad else x.detach() * 2
        return x


@pytest.mark.parametrize("num_layers", [1, 2, 4])
@pytest.mark.parametrize("with_grad", [True, False])
def test_arguments_made_of_outputs_of_earlier_blocks(num_layers: int, with_grad: bool) -> None:
    assert_parity(lambda: DerivedArgument(with_grad), step, RecomputePolicy(num_layers=num_layers))


class InPlace(Stack):
    """What case 17 does at the edges of a block."""

    def __init__(self, block: type[nn.Module], write_after: bool = False) -> None:
        super().__init__(block() for _ in range(4))
        self.write_after = write_after

    def hidden(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            y = block(x)
            if self.write_after:
                x.add_(1)
            x = y
        return x


class EndsInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down.bias
        y[:].relu_()
        return y


class StartsInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return x + self.inner(x)


class StartsInPlaceOnAView(Block):
    def forward(self, x: Tensor) -> Tensor:
        x[:, :2].mul_(0.5)
        return x + self.inner(x)


class AddsFirst(Block):
    """Keeps nothing of its input, so its caller may overwrite it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        return y + self.inner(y)


@BOTH
@pytest.mark.parametrize("block", [EndsInPlace, StartsInPlace, StartsInPlaceOnAView])
def test_a_block_that_writes_in_place_at_its_edge(policy: RecomputePolicy, block: type[nn.Module]) -> None:
    assert_parity(lambda: InPlace(block), step, policy, num_steps=2)


@pytest.mark.parametrize("keyword", [False, True])
def test_a_block_that_writes_to_a_leaf_raises_as_without_recompute(keyword: bool) -> None:
    model = Stack([StartsInPlace(), StartsInPlace()])
    args, kwargs = ((), {"x": rows(requires_grad=True)}) if keyword else ((rows(requires_grad=True),), {})
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        model.blocks[0](*args, **kwargs)
    with apply_recompute(model, FULL):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            model.blocks[0](*args, **kwargs)
        step(model)


@BOTH
def test_a_caller_that_overwrites_a_needed_input_gets_an_error(policy: RecomputePolicy) -> None:
    """Without recompute autograd refuses it too, since LayerNorm keeps its input."""
    with pytest.raises(RuntimeError, match="inplace operation"):
        step(InPlace(Block, write_after=True))
    model = InPlace(Block, write_after=True)
    with apply_recompute(model, policy), pytest.raises(RuntimeError, match=r"in place|inplace"):
        step(model)


@BOTH
def test_a_caller_that_overwrites_an_unneeded_input_is_never_silently_wrong(policy: RecomputePolicy) -> None:
    never_silent(lambda: InPlace(AddsFirst, write_after=True), step, policy, RecomputeError)


@BOTH
@pytest.mark.parametrize("how", ["positional", "keyword", "nested"])
def test_a_further_argument_overwritten_after_the_call(policy: RecomputePolicy, how: str) -> None:
    """A scratch tensor that the caller fills anew for each block; legal, since a sum keeps none of its parts."""

    class Scales(Block):
        def forward(self, x: Tensor, scale: Any = None) -> Tensor:
            scale = scale[0]["scale"] if isinstance(scale, list) else scale
            return x + self.inner(x).detach() + self.down.bias + scale

    class Scratch(Stack):
        def hidden(self, x: Tensor) -> Tensor:
            scratch = torch.zeros(WIDTH)
            for index, block in enumerate(self.blocks):
                scratch.fill_(index)
                if how == "nested":
                    x = block(x, [{"scale": scratch}])
                else:
                    x = block(x, scratch) if how == "positional" else block(x, scale=scratch)
            return x

    never_silent(lambda: Scratch(Scales() for _ in range(4)), step, policy, RecomputeError)

"""What is taken from inside torch's pipelining; a new torch that changes it fails here."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining import _backward as backward
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from lightning_recompute.lazy_stage import Chunk, LazyStage, plain_errors

OVERRIDDEN = (
    "_setup_forward_recv_info",
    "_create_grad_recv_info",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_maybe_with_nosync",
)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_torch_has_what_is_overridden(name: str) -> None:
    former, new = getattr(PipelineStage, name), getattr(LazyStage, name)
    assert former is not new
    given = list(inspect.signature(former).parameters)
    taken = list(inspect.signature(new).parameters)
    if "args" not in taken:
        assert len(given) == len(taken), (given, taken)
    assert f"{name}(" in inspect.getsource(torch_stage) + inspect.getsource(torch_schedules)


def test_buffers_are_made_nowhere_else() -> None:
    """Torch makes receive buffers in the two methods, and in its own inference of shapes, which is not used."""
    source = inspect.getsource(PipelineStage)
    makers = [name for name, part in vars(PipelineStage).items() if "buffer=_make_tensor" in _source(part)]
    assert sorted(makers) == ["_create_grad_recv_info", "_setup_forward_recv_info"]
    assert source.count("buffer=_make_tensor") == 2
    assert list(inspect.signature(torch_stage._RecvInfo.__init__).parameters)[1:5] == [
        "input_name",
        "source",
        "buffer",
        "tensor_meta",
    ]


def test_parts_of_backward_are_what_is_known() -> None:
    assert "retain_graph" in inspect.signature(backward.stage_backward_weight).parameters
    assert '"params": {param}' in inspect.getsource(backward.get_param_groups)
    assert "batch_isend_irecv" in inspect.getsource(torch_schedules._batch_p2p)
    assert "send_ops.append(_batch_p2p(stage.get_bwd_send_ops" in inspect.getsource(
        torch_schedules._PipelineScheduleRuntime
    )
    assert issubclass(ScheduleInterleaved1F1B, torch_schedules._PipelineScheduleRuntime)


def _source(part: Any) -> str:
    return inspect.getsource(part) if inspect.isfunction(part) else ""


def test_a_chunk_is_told_numbers() -> None:
    calls = []

    def run(received: torch.Tensor | None, microbatch: int) -> torch.Tensor:
        calls.append((received, microbatch))
        return torch.zeros(1)

    parameter = torch.nn.Parameter(torch.zeros(2))
    first, later = Chunk(run, [parameter], True), Chunk(run, [parameter], False)
    hidden = torch.ones(2)
    first(torch.tensor([3]), microbatch=torch.tensor([3]))
    later(hidden, microbatch=torch.tensor([4]))
    assert calls == [(None, 3), (hidden, 4)]
    assert list(first.parameters()) == [parameter]
    assert first.state_dict() == {}


def fail(message: str) -> None:
    logging.getLogger("torch.distributed.pipelining.schedules").error("Full Schedule: ...")
    try:
        raise KeyError("mine")
    except KeyError as error:
        raise RuntimeError(message) from error


def test_errors_leave_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyError, match="mine"), plain_errors():
        fail("[Stage 0] failed to run forward: ...")
    with pytest.raises(RuntimeError, match="user's own") as caught, plain_errors():
        fail("the user's own")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match="of torch"), plain_errors():
        raise RuntimeError("of torch")
    assert "Full Schedule" not in caplog.text
    assert not logging.getLogger("torch.distributed.pipelining.schedules").disabled

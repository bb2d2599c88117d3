"""Patching one module's forward, so that nothing else of the module changes.

An instance attribute `forward` calls the patching function with the original. State-dict keys, parameter and
module names, classes, deepcopy (a copy runs on its own weights) and pickle stay as they were.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.eval_frame import skip_code

logger = logging.getLogger(__name__)


class Original:
    """A module's forward as it was, where it is not simply the class's method.

    Args:
        module: The module.
        forward: What its `forward` was: another patch, or a function put on the instance.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.__self__ = module
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""
        return self.forward(*args, **kwargs)


class CompiledOriginal(Original):
    """A forward that runs compiled inside the patch: around it, dynamo would compile the forward but not the replay.

    As with torch's own `module.compile()`, a copy and what was pickled run uncompiled.

    Args:
        module: The module.
        forward: Its forward.
        compiled: The same, compiled.
    """

    def __init__(self, module: nn.Module, forward: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        super().__init__(module, forward)
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it compiled."""
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[type[Original], tuple[nn.Module, Callable[..., Any]]]:
        return Original, (self.__self__, self.forward)


def _compiler_of(compiled: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The compiler, with its options, that made a compiled function: torch keeps it in the function's closure."""
    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, torch._dynamo.eval_frame.OptimizeContext):
            return cell.cell_contents
    return torch.compile


def without_dynamo(*functions: Callable[..., Any]) -> None:
    """Have dynamo leave functions alone that run inside of compiled code, and those defined in them.

    Unlike `torch.compiler.disable` this costs nothing when they are called.
    """
    for function in functions:
        codes = [function.__code__]
        codes += [constant for constant in codes[0].co_consts if isinstance(constant, CodeType)]
        for code in codes:
            skip_code(code)


class Patch:
    """One patched forward; `remove` restores what was there.

    Args:
        module: The module to patch.
        function: Called as `function(original, *arguments, *args, **kwargs)`; a module-level function, so that
            the module can still be pickled.
        arguments: Bound before the call's own.
        attribute: The method to patch, where it is not the forward.
    """

    def __init__(
        self, module: nn.Module, function: Callable[..., Any], *arguments: Any, attribute: str = "forward"
    ) -> None:
        self.module = module
        self._attribute = attribute
        self._had_attribute = attribute in module.__dict__
        self._former = getattr(module, attribute)
        is_forward = attribute == "forward"
        self._compiled_call = getattr(module, "_compiled_call_impl", None) if is_forward else None
        original: Any = self._former
        if self._compiled_call is not None:
            original = CompiledOriginal(module, self._former, _compiler_of(self._compiled_call)(self._former))
            module._compiled_call_impl = None
        elif is_forward and isinstance(module, torch._dynamo.OptimizedModule):
            original = CompiledOriginal(module, self._former, self._former)
        elif getattr(original, "__self__", None) is not module:
            original = Original(module, self._former)
        self._installed = functools.partial(function, original, *arguments)
        setattr(module, attribute, self._installed)

    def remove(self) -> None:
        """Put the former forward back; under somebody else's later patch only this one is switched off."""
        if self.module.__dict__.get(self._attribute) is not self._installed:
            logger.warning(
                "the %s of a %s was replaced after recompute was applied; it is left as it is and the "
                "recompute below it is switched off",
                self._attribute,
                type(self.module).__name__,
            )
            # the later patch may hold on to what was installed: from now on that calls the original and nothing else
            self._installed.__setstate__((self._installed.args[0], (), {}, {}))  # type: ignore[attr-defined]
            return
        if self._had_attribute:
            setattr(self.module, self._attribute, self._former)
        else:
            delattr(self.module, self._attribute)
        if self._compiled_call is not None:
            self.module._compiled_call_impl = self._compiled_call

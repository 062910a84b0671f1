"""Parameters whose weights are away, readable for the time of a block; what is written there becomes their master."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from infinity.errors import IllegalTransition, ModelError
from infinity.zero.absent import AbsentParameter
from infinity.zero.access import find_states, states_of

_BITS = {2: torch.int16, 4: torch.int32}  # what parameters are compared as, by the size of an element


class GatheredParameters:
    """`with GatheredParameters(params):` lets absent parameters be used as tensors, with their whole compute weights.

    With `modifier_rank` what that rank writes becomes their value on every rank: of a split or full fp32 master, too; what
    other ranks write is lost. Without it a write to an absent parameter is an error at the end of the block, on every rank,
    and lost. Parameters that stay in memory, and those of no engine, are what they are all the time; with `modifier_rank`
    also what is written through `.data` becomes the master of the former. After an exception nothing is kept of absent ones.
    Over several ranks every rank runs the block, with the same parameters in the same order. `fwd_module` changes nothing.

    Raises IllegalTransition for a parameter that is gathered already and, where something was written, between a forward and
    its backward; ModelError for another shape or dtype at the end, or a rank that there is not; OverBudget.
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._params = params
        self._modifier_rank = modifier_rank
        self._enabled = enabled
        self._gathered: list[AbsentParameter] = []
        self._resident: list[tuple[nn.Parameter, torch.Tensor]] = []  # with the weights at the beginning

    def __enter__(self) -> GatheredParameters:
        given = [self._params] if isinstance(self._params, nn.Parameter) else list(self._params)
        try:
            for parameter in {id(one): one for one in given}.values() if self._enabled else ():
                states = find_states(parameter)
                if isinstance(parameter, AbsentParameter):
                    self._gather(parameter)
                elif states is not None and self._modifier_rank is not None:
                    self._resident.append((parameter, states.hold_weight()))
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._keep_edits()
        finally:
            self._let_go()

    def _gather(self, parameter: AbsentParameter) -> None:
        if parameter.gathered is not None:
            raise IllegalTransition(
                f"Parameter {parameter.parameter_name} is gathered already.",
                remedy="Do not nest GatheredParameters over the same parameter.",
            )
        parameter.gathered = states_of(parameter).hold_weight()
        self._gathered.append(parameter)

    def _keep_edits(self) -> None:
        modifier = self._modifier_rank
        if modifier is None:
            self._refuse_edits()
            return
        kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        for parameter in self._gathered:
            if _edits(parameter, _was_edited(parameter), modifier)[modifier]:
                kept.append((parameter, _values(parameter)))
        for resident, before in self._resident:
            values = resident.detach()
            if any(_edits(resident, not _same_bits(values, before), modifier)):
                kept.append((resident, before.copy_(values)))
        for edited, values in kept:
            states_of(edited).take_from(modifier, values)
        for edited, values in kept:  # not before: a master of one may renew what is in memory of others
            states_of(edited).set("fp32", values.float(), local=False)

    def _refuse_edits(self) -> None:
        edited = []
        for parameter in self._gathered:
            if any(states_of(parameter).on_every_rank(_was_edited(parameter))):
                edited.append(parameter.parameter_name)
        if edited:
            raise IllegalTransition(
                f"{', '.join(edited)} was written inside GatheredParameters without a modifier_rank: the write is lost.",
                remedy="Give GatheredParameters(..., modifier_rank=0) to keep what rank 0 writes.",
            )

    def _let_go(self) -> None:
        for parameter in self._gathered:
            parameter.gathered = None
        for held in (*self._gathered, *(resident for resident, _ in self._resident)):
            states = find_states(held)
            if states is not None:  # the engine was not closed inside the block
                states.let_go()
        self._gathered.clear()
        self._resident.clear()


def _edits(parameter: nn.Parameter, was_edited: bool, modifier: int) -> list[bool]:
    """Return which ranks have written to the parameter. Raises ModelError where there is no rank `modifier`."""
    edits = states_of(parameter).on_every_rank(was_edited)
    if modifier not in range(len(edits)):
        raise ModelError(
            f"GatheredParameters was given modifier_rank={modifier}, but the ranks are 0 to {len(edits) - 1}.",
            remedy="Name the rank whose writes are kept.",
        )
    return edits


def _values(parameter: AbsentParameter) -> torch.Tensor:
    values = parameter.gathered
    if values is None or values.shape != parameter.shape or values.dtype is not parameter.dtype:
        got = "nothing" if values is None else f"{tuple(values.shape)} of {values.dtype}"
        raise ModelError(
            f"Parameter {parameter.parameter_name} was given {got} inside GatheredParameters; it is "
            f"{tuple(parameter.shape)} of {parameter.dtype}.",
            remedy="Write values into it in place; shapes and dtypes are fixed by infinity.initialize.",
        )
    return values.detach()


def _was_edited(parameter: AbsentParameter) -> bool:
    """Return whether a bit differs from the weights that the tiers have."""
    states, values = states_of(parameter), _values(parameter)
    before = states.hold_weight()
    try:
        return not _same_bits(values, before)
    finally:
        states.let_go()


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))

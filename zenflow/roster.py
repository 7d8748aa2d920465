"""The parameters of an optimizer's groups: their names and numbers, and which of them have been laid out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.nn import Parameter

from zenflow.checks import check_parameters, has_gradient
from zenflow.layout import lay_out
from zenflow.matrices import Newcomer
from zenflow.pipeline import Pipeline

Groups = Sequence[dict[str, Any]]  # torch's `param_groups`


def params_of(groups: Groups) -> Iterator[Parameter]:
    """All parameters in their order."""
    return (param for group in groups for param in group["params"])


def indices_of(groups: Groups) -> dict[int, int]:
    """Torch's index of each parameter, by `id(param)`."""
    return {id(param): index for index, param in enumerate(params_of(groups))}


def numbers_of(groups: Groups) -> list[list[int]]:
    """The same indices, by group, as `state_dict()` has them."""
    indices = indices_of(groups)
    return [[indices[id(param)] for param in group["params"]] for group in groups]


def newcomers_of(groups: Groups, wanted: Callable[[Parameter], bool] = lambda param: True) -> list[Newcomer]:
    """The wanted parameters, each once, with what messages call them."""
    found, seen = [], set()
    for number, group in enumerate(groups):
        unnamed = [f"parameter {place} of group {number}" for place in range(len(group["params"]))]
        names = group.get("param_names") or unnamed
        for param, name in zip(group["params"], names, strict=True):
            if id(param) not in seen and wanted(param):
                found.append(Newcomer(param, number, name, len(seen)))
            seen.add(id(param))
    return found


def by_index(groups: Groups) -> dict[int, Newcomer]:
    """All parameters, each once, by torch's index, which skips the places of one that is given more than once."""
    indices = indices_of(groups)
    return {indices[id(newcomer.param)]: newcomer for newcomer in newcomers_of(groups)}


class Roster:
    """Which parameters one pipeline has laid out."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known: set[int] = set()  # ids of the parameters that have been laid out
        self._unknown: list[Parameter] = []  # the others
        self._checked: list[list[int]] = []  # ids of the parameters, when the groups were last looked through

    def lay_out(self, groups: Groups, newcomers: Sequence[Newcomer], cohorts: Mapping[int, int] | None = None) -> None:
        """Give those of them that have no place theirs; cohorts: see `layout.lay_out`. ValueError names a bad one."""
        newcomers = [newcomer for newcomer in newcomers if id(newcomer.param) not in self._known]
        if newcomers:
            check_parameters(newcomers, self._pipeline.device, self._pipeline.config)
            lay_out(self._pipeline, newcomers, len(groups), cohorts)
            self._known |= {id(newcomer.param) for newcomer in newcomers}
            self._checked = []
            self._pipeline.prepare_backward()

    def welcome(self, groups: Groups) -> None:
        """Lay out the parameters that have their first gradient now.

        ValueError names one that has changed its group: slots, tables and states are by the group in which it was laid
        out.
        """
        ids = [[id(param) for param in group["params"]] for group in groups]
        if ids != self._checked:
            self._check(ids)
            self._checked = ids
            self._unknown = [param for param in params_of(groups) if id(param) not in self._known]
        if any(has_gradient(param) for param in self._unknown):
            self.lay_out(groups, newcomers_of(groups, has_gradient))

    def enter(self, state: dict[Parameter, Any]) -> None:
        """Fill torch's `state` of an optimizer that has made a step: what it holds is ours, but it must not be empty.

        With one that is, `torch.distributed.checkpoint` makes a step of its own, to have something to save.
        """
        if not state and self._pipeline.clock.state.step:
            state.update((record.param, {}) for record in self._pipeline.records)

    def _check(self, ids: Sequence[Sequence[int]]) -> None:
        numbers = {param: number for number, group in enumerate(ids) for param in group}
        for record in self._pipeline.records:
            if numbers.get(id(record.param)) != record.group:
                raise ValueError(
                    f"{record.name} was laid out in param group {record.group} and is now in "
                    f"{numbers.get(id(record.param), 'none')}; build a new optimizer to regroup parameters"
                )

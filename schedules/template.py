"""Templates: a config, and a schedule that makes a kernel of it; and their registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, NamedTuple, TypeVar

from sparsetir.schedules.operators.problems import Arranged, in_csr
from sparsetir.sparse_ir.errors import ScheduleError
from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.origins import note_origin

T = TypeVar("T")
# {"template": "RowTile", "RowTile.tile": 64, ...}
Point = dict[str, Any]
BRANCH = "template"


@dataclass(frozen=True)
class Branch:
    """The configs of one template.

    name : the template's name
    choices : the possible values of each parameter
    make : a config of one value per parameter, by name; None if they are incompatible
    """

    name: str
    choices: Mapping[str, tuple[Any, ...]]
    make: Callable[..., Any]

    def points(self) -> Iterator[tuple[Point, Any]]:
        """All points that are a config, with it."""
        for values in product(*self.choices.values()):
            chosen = dict(zip(self.choices, values, strict=True))
            config = self.config(chosen)
            if config is not None:
                point = {f"{self.name}.{name}": value for name, value in chosen.items()}
                yield {BRANCH: self.name, **point}, config

    def one_by_one(self) -> list[Any]:
        """The config of the first values, and those that differ from it in one parameter."""
        first = {name: values[0] for name, values in self.choices.items()}
        others = ((name, value) for name, values in self.choices.items() for value in values[1:])
        configs = [self.config(first), *(self.config({**first, name: x}) for name, x in others)]
        return [config for config in configs if config is not None]

    def config(self, chosen: Mapping[str, Any]) -> Any | None:
        """The config of some values; None if there is none."""
        try:
            return self.make(**chosen)
        except (ValueError, ScheduleError):
            return None


class SearchInput(NamedTuple):
    """The problem and target for which configs are searched.

    pattern : a CsrPattern
    given : its :class:`sparsetir.schedules.search.choose.Statistics`
    known : the configs of all templates that sizes alone suggest, the default first
    """

    problem: Any
    pattern: Any
    given: Any
    target: Any
    known: Sequence[Any]

    def own(self, kind: type[T]) -> list[T]:
        """The known configs of one class."""
        return [config for config in self.known if isinstance(config, kind)]


# The values that a search tries, by parameter, and the constructor of a config of one of each.
Tried = tuple[dict[str, tuple[Any, ...]], Callable[..., Any]]


def around(configs: Sequence[Any], **tried: Iterable[Any]) -> Tried:
    """Choices of the values of some configs, those in `tried`, and those that fields declare.

    A config of them is the first one with its values replaced.
    """
    choices = {}
    for field in fields(configs[0]):
        tries = field.metadata.get("tries", ())
        if tries or field.name in tried:
            values_here = (getattr(config, field.name) for config in configs)
            values = {*values_here, *tries, *tried.get(field.name, ())}
            choices[field.name] = tuple(sorted(values, key=lambda x: (x is not None, x)))
    return choices, lambda **chosen: replace(configs[0], **chosen)


class Choices(Mapping[str, Any]):
    """The config of a schedule that a user wrote, or that was derived from a program.

    A value for each name of a space; reads like a dict, equal by names and values.

    Values are None, booleans, numbers and strings. Without names it stands for the default
    schedule, none of the search's.

    >>> Choices({"tile": 2, "order": "rows"})["tile"]
    2
    """

    def __init__(self, values: Mapping[str, Any] = {}) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Choices({self._values!r})"

    @property
    def compiled(self) -> Choices:
        """The whole config: see :class:`Template`."""
        return self

    def tiles(self, feat: int) -> int:
        """The number of tiles, 1: plans check sizes that are compiled in."""
        del feat
        return 1


@dataclass(frozen=True)
class Template:
    """A schedule with parameters for problems of one kind, and its arguments for a pattern.

    config : the class of configs: frozen data, whose `compiled` is the part that a kernel depends
        on. For plans `tiles(feat)` is the argument of that name, which raises ScheduleError for
        unsupported feature sizes
    problem : the class of problems
    program : (problem, config) -> stage-I function
    apply : (Schedule of that function, config), which schedules it by primitives, in both stages
    arrange : (CsrPattern, problem, config) -> Arranged; by default for kernels that take CSR. For
        relations it takes a Pattern of three axes, or a RelationPattern
    gpu : whether it is for GPUs; None: for CPUs and GPUs
    candidates : (problem, Statistics, target) -> configs worth measuring, the default first; for
        operators none of whose other templates has any
    choices : SearchInput -> Tried of a search; returns None for unsupported problems
    configs : (problem, CsrPattern, Statistics, target) -> the configs of a search one by one,
        instead of choices. For relations as for `arrange`, and an object with the numbers of
        features
    engine : (problem, CsrPattern, Statistics, target, Format or None) -> configs for a matrix
        engine that multiplies blocks of a format; None stands for the formats that fill its tiles.
        Tensor cores need no pattern, and do not support None
    turn : the position in a search among the templates for a problem, ascending
    """

    config: type
    problem: type
    program: Callable[..., SparseFunc]
    apply: Callable[..., Any]
    arrange: Callable[..., Arranged] = in_csr
    gpu: bool | None = False
    candidates: Callable[..., Sequence[Any]] | None = None
    choices: Callable[[SearchInput], Tried | None] | None = None
    configs: Callable[..., Sequence[Any]] | None = None
    engine: Callable[..., Sequence[Any]] | None = None
    turn: int = 9

    def fits(self, problem: Any, gpu: bool) -> bool:
        """Whether it is for a problem's operator, and for GPUs or CPUs."""
        return self.problem is type(problem) and self.gpu in (None, gpu)

    def branch(self, search: SearchInput) -> Branch | None:
        """The branch that a search tries, or None."""
        if self.choices is not None:
            choices = self.choices(search)
        else:
            each = tuple(self.configs(*search[:4])) if self.configs is not None else ()
            numbers = {"config": tuple(range(len(each)))}
            choices = (numbers, lambda config: each[config]) if each else None
        return None if choices is None else Branch(self.config.__name__, *choices)


# By the classes of config and problem; :mod:`sparsetir.schedules.templates.registry` imports all.
TEMPLATES: dict[tuple[type, type], Template] = {}


def register(template: Template) -> Template:
    """Register a template for plans, searches and records of tuning."""
    note_origin(template.config)
    TEMPLATES[template.config, template.problem] = template
    return template

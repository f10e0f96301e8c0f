"""Docstrings of what the reference shows (docs/api): numpydoc's sections, and names that exist."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "Examples"]
DIRECTIVE = re.compile(r"^\.\. (automodule|autoclass|autofunction|currentmodule|module):: (\S+)$")
ENTRY = re.compile(r"^((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*)(?: : (.+))?$")
ROLE = re.compile(r":(\w+):`~?([^`]+)`")


def lookup(name):
    """The object of a dotted name that begins with a package; AttributeError if there is none."""
    first, *rest = name.split(".")
    if not first:
        raise AttributeError(name)
    try:
        thing = importlib.import_module(first)
        for n, part in enumerate(rest, start=1):
            if not hasattr(thing, part):
                importlib.import_module(".".join([first, *rest[:n]]))
            thing = getattr(thing, part)
    except ImportError:
        raise AttributeError(name) from None
    return thing


def documented():
    """(name, function, class or method) of the reference, each once."""
    things = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        module = "sparsetir"
        for line in page.read_text().splitlines():
            directive = DIRECTIVE.match(line)
            if directive is None:
                continue
            kind, name = directive.groups()
            if kind in ("module", "currentmodule"):
                module = name
            elif kind == "automodule":
                names = [f"{name}.{public}" for public in lookup(name).__all__]
                things |= {public: lookup(public) for public in names if callable(lookup(public))}
            else:
                full = name if name.startswith("sparsetir.") else f"{module}.{name}"
                things[full] = lookup(full)
    for name, thing in list(things.items()):
        if inspect.isclass(thing):
            things |= {f"{name}.{k}": v for k, v in methods(thing)}
    distinct = {id(thing): (name, thing) for name, thing in things.items()}
    return [pair for pair in distinct.values() if pair[1].__doc__]


def methods(cls):
    """Functions of ours that the class has, those it inherits too; no properties."""
    for name in dir(cls):
        if name.startswith("_") and name != "__call__":
            continue
        member = inspect.getattr_static(cls, name)
        member = getattr(member, "__func__", member)
        if inspect.isfunction(member) and member.__module__.startswith("sparsetir"):
            yield name, inspect.unwrap(member)


DOCUMENTED = documented()


def sections(text):
    """Lines of each section by heading; "" has what stands before the first."""
    lines = inspect.cleandoc(text).splitlines()
    out, current = {"": []}, ""
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if re.fullmatch(r"-{3,}", below) and line and not line.startswith(" "):
            assert len(below) == len(line), f"{line}: underline it with {len(line)} dashes"
            assert line not in out, f"{line}: twice"
            current, out[line] = line, []
        elif not re.fullmatch(r"-{3,}", line):
            out[current].append(line)
    return out


def entries(lines):
    """Names that a section of parameters describes."""
    names = []
    for line in lines:
        if line and not line.startswith(" "):
            entry = ENTRY.match(line)
            assert entry, f"no line of names and a type: {line}"
            names += [name.lstrip("*") for name in entry[1].split(", ")]
    return names


def given(thing):
    """The parameters of a call, and whether it gives something."""
    signature = inspect.signature(thing)
    names = [k for k in signature.parameters if k not in ("self", "cls") and k[0] != "_"]
    return names, signature.return_annotation not in (None, "None", inspect.Signature.empty)


def complaints(text, thing):
    """Complaints about a docstring."""
    parts = sections(text)
    out = [f"{heading}: no section of numpydoc" for heading in parts if heading not in ["", *ORDER]]
    if [heading for heading in ORDER if heading in parts] != list(parts)[1:]:
        out.append(f"order of sections: {[*parts][1:]}")
    loose = [line for line in parts[""] if line in ORDER or re.match(r"^\*{0,2}\w+ : ", line)]
    out += [f"not in a section: {line}" for line in loose]
    described = entries(parts.get("Parameters", []))
    if inspect.isclass(thing):
        if issubclass(thing, BaseException) or not described and "Attributes" in parts:
            return out
        names = given(thing)[0]
    else:
        names, gives = given(thing)
        if names and gives and not {"Returns", "Yields"} & {*parts}:
            out.append("no section Returns")
    out += [f"not described: {name}" for name in names if name not in described]
    return out + [f"no parameter: {name}" for name in described if name not in names]


@pytest.mark.parametrize("name, thing", DOCUMENTED, ids=[name for name, _ in DOCUMENTED])
def test_docstring_has_sections(name, thing):
    assert complaints(thing.__doc__, thing) == []


@pytest.mark.parametrize("name, thing", DOCUMENTED, ids=[name for name, _ in DOCUMENTED])
def test_names_in_docstring_exist(name, thing):
    home = name.rpartition(".")[0]
    homes = [name, home, home.rpartition(".")[0], "sparsetir", thing.__module__]
    for _, target in ROLE.findall(thing.__doc__):
        for place in [target, *(f"{above}.{target}" for above in homes)]:
            try:
                lookup(place)
                break
            except AttributeError:
                pass
        else:
            raise AssertionError(f"{target} is nowhere")


def test_reference_is_walked():
    names = {name for name, _ in DOCUMENTED}
    assert {"sparsetir.build", "sparsetir.ops.spmm", "sparsetir.Schedule.divide"} <= names
    assert len(names) > 200

"""Who may import whom. The layers of the rooms themselves are contracts in pyproject.toml."""

import sys

import grimp
import pytest

import sparsetir

# The outside packages each room may import, beside the standard library.
ROOMS = {
    "sparsetir.sparse_ir": {"tvm", "tvm_ffi", "numpy"},
    "sparsetir.formats": {"tvm", "tvm_ffi", "numpy", "scipy"},
    "sparsetir.schedules": {"tvm", "tvm_ffi", "numpy", "scipy"},
}


@pytest.fixture(scope="module")
def graph():
    return grimp.build_graph("sparsetir", include_external_packages=True, cache_dir=None)


def imports(graph, room):
    """Every import made in a room, as (importer, imported)."""
    modules = {room} | graph.find_descendants(room)
    return {(m, n) for m in modules for n in graph.find_modules_directly_imported_by(m)}


def within(module, package):
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("room", ROOMS)
def test_room_does_not_import_the_roof(graph, room):
    """The roof is whatever is in the package and in no room: a new module of it is covered too."""
    roof = {
        (importer, imported)
        for importer, imported in imports(graph, room)
        if within(imported, "sparsetir") and not any(within(imported, r) for r in ROOMS)
    }
    assert not roof


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_only_what_it_may(graph, room):
    outside = {
        (importer, imported)
        for importer, imported in imports(graph, room)
        if not within(imported, "sparsetir")
        and imported.split(".")[0] not in sys.stdlib_module_names | ROOMS[room]
    }
    assert not outside


def test_graph_holds_the_rooms(graph):
    """The checks above see the rooms, which are symbolic links in a source tree."""
    assert set(ROOMS) <= graph.modules
    assert sparsetir.__name__ in graph.modules

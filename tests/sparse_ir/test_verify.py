"""Every rule of stage I has a message, and a test of it."""

import re

import pytest
import tvm
from tvm import tirx
from tvm.error import DiagnosticError

from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.errors import IllFormedError, ScheduleError
from sparsetir.sparse_ir.nodes import (
    AttachedAxis,
    Axis,
    FusedAxis,
    SparseBuffer,
    SparseIteration,
    buffer_var,
    make_func,
)
from sparsetir.sparse_ir.schedule import Schedule
from sparsetir.sparse_ir.schedule.loops import replaced
from sparsetir.sparse_ir.script import from_source
from sparsetir.sparse_ir.verify import verify

HEAD = """@T.prim_func
def f(a: T.handle, b: T.handle, c: T.handle, p: T.handle, q: T.handle, p2: T.handle, q2: T.handle,
      m: T.int32, n: T.int32, nnz: T.int32, x: T.float32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q))
    K = T.dense_fixed(n)
    L = T.sparse_variable(J, (n, nnz), (p2, q2))
"""
BUFFERS = """    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (I,), "int32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
"""


def source(body: str, buffers: str = BUFFERS) -> str:
    return HEAD + buffers + "".join(f"    {line}\n" for line in body.splitlines())


def refused(text: str) -> tuple[str, int]:
    """The message that a script is refused with, and the line it names."""
    with pytest.raises(DiagnosticError) as err:
        from_source(text)
    head, _, place = str(err.value).partition("\n --> ")
    assert str(err.value).count("\n") <= 5, "a message shows one line of the script"
    return head.removeprefix("error: "), int(place.split(":")[1])


SCRIPTS = [  # (body, line of it that the message points at, message)
    (
        'with T.sp_iter([J], "S", "it") as [j]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': expected axis 'I', its parent, before 'J' in [J] or around it, "
        "but 'I' is not iterated",
    ),
    (
        'with T.sp_iter([J, I], "SS", "it") as [j, i]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': expected axis 'I', its parent, before 'J' in [J, I] or around it, "
        "but 'I' comes after it",
    ),
    (
        'with T.sp_iter([I, I], "SS", "it") as [i, j]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': axis 'I' is iterated twice",
    ),
    (
        'with T.sp_iter([I], "S", "out") as [i]:\n'
        '    with T.sp_iter([I], "S", "in") as [j]:\n        B[i] = 0',
        2,
        "sp_iter 'in': axis 'I' is iterated here and in an enclosing iteration",
    ),
    (
        'with T.sp_iter([T.fuse(I, K, J)], "SSS", "it") as [i, k, j]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': fuse('I', 'K', 'J'): expected 'J' right after its parent 'I', "
        "got it after 'K'",
    ),
    (
        'with T.sp_iter([I, T.attach(J, K), K], "SSS", "it") as [i, j, k]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': attach('J', 'K'): expected 'I', the parent of 'J', to be as long as 'K' "
        "(n), got m",
    ),
    (
        'with T.sp_iter([I, T.attach(L, K)], "SS", "it") as [i, l]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': attach('L', 'K'): expected 'L' under a dense_fixed axis, "
        "got parent 'J' (sparse_variable)",
    ),
    (
        'with T.sp_iter([I, T.attach(K, I)], "SS", "it") as [i, k]:\n    T.evaluate(0)',
        1,
        "sp_iter 'it': attach('K', 'I'): expected 'K' under a dense_fixed axis, got no parent",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n    C[i, j] = x',
        2,
        "sp_iter 'it': buffer 'C' is written at an index that depends on the reduction "
        "variable 'j'",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n    C[i, B[j]] = x',
        2,
        "sp_iter 'it': buffer 'C' is written at an index that depends on the reduction "
        "variable 'j'",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        '    with T.sp_iter([K], "S", "in") as [k]:\n        C[j, k] = x',
        3,
        "sp_iter 'it': buffer 'C' is written at an index that depends on the reduction "
        "variable 'j'",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        "    e: T.let[T.int32] = B[j] + 1\n    C[i, e] = x",
        3,
        "sp_iter 'it': buffer 'C' is written at an index that depends on the reduction "
        "variable 'j'",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        "    with T.init():\n        C[i, 0] = C[i, 0]\n    C[i, 0] = x",
        3,
        "sp_iter 'it': its init reads buffer 'C', which it writes",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        "    with T.init():\n        B[i] = 0\n        C[i, B[i]] = x\n    C[i, 0] = x",
        4,
        "sp_iter 'it': its init reads buffer 'B', which it writes",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        "    with T.init():\n        C[i, j] = 0.0\n    C[i, 0] = x",
        3,
        "sp_iter 'it': its init uses the reduction variable 'j'; an init runs once for every "
        "point of the spatial axes",
    ),
    (
        'with T.sp_iter([I, J], "SR", "it") as [i, j]:\n'
        "    with T.init():\n        C[i, 0] = A[i, j]\n    C[i, 0] = x",
        3,
        "sp_iter 'it': its init uses the reduction variable 'j'; an init runs once for every "
        "point of the spatial axes",
    ),
    (
        'with T.sp_iter([I], "S", "it") as [i]:\n'
        "    with T.init():\n        T.evaluate(0)\n    C[i, 0] = x",
        1,
        "sp_iter 'it': its init stores nothing",
    ),
    (
        'with T.sp_iter([I], "S", "it") as [i]:\n    C[i, x] = x',
        2,
        "buffer 'C': expected an integer as index 1, got float32",
    ),
    (
        'with T.sp_iter([I], "S", "it") as [i]:\n    C[i, 0] = x + C[i, x]',
        2,
        "buffer 'C': expected an integer as index 1, got float32",
    ),
    (
        'with T.sp_iter([I], "S", "it") as [i]:\n    B[i] = 0\n'
        'with T.sp_iter([I], "S", "it") as [i]:\n    B[i] = 0',
        3,
        "two sparse iterations are named 'it'; schedules find them by name",
    ),
    (
        'for t in T.thread_binding(4, thread="threadIdx.x"):\n    B[t] = 0',
        1,
        "loop 't' is bound to 'threadIdx.x'; stage I has no threads",
    ),
    (
        'with T.sblock("x"):\n    B[0] = 0',
        1,
        "a statement of type SBlockRealize cannot occur in stage I",
    ),
]


@pytest.mark.parametrize(("body", "line", "message"), SCRIPTS)
def test_scripts(body, line, message):
    start = source("").count("\n")
    got, place = refused(source(body))
    assert got == f"<str>:{start + line}: in function 'f': {message}"
    assert place == start + line


DECLARATIONS = [  # (declarations, line of them that the message points at, message)
    (
        '    A = T.match_sparse_buffer(a, (J,), "float32")\n',
        1,
        "buffer 'A': expected axis 'I', the parent of 'J', before it, got [J]",
    ),
    (
        '    A = T.match_sparse_buffer(a, (J, I), "float32")\n',
        1,
        "buffer 'A': expected axis 'I', the parent of 'J', before it, got [J, I]",
    ),
    (
        '    A = T.match_sparse_buffer(a, (I, I), "float32")\n',
        1,
        "buffer 'A': axis 'I' occurs twice in [I, I]",
    ),
    (
        "    M = T.sparse_fixed(I, (n, 4), q2)\n"
        '    A = T.match_sparse_buffer(a, (I, J, M), "float32")\n',
        2,
        "buffer 'A': axes 'J' and 'M' are both children of 'I', so its elements have no storage "
        "order",
    ),
    (
        '    A = T.match_sparse_buffer(a, (I,), "float32")\n'
        '    B = T.match_sparse_buffer(a, (I,), "float32")\n',
        2,
        "handle 'a' is bound twice: to buffer 'A' and to buffer 'B'",
    ),
    (
        '    A = T.match_buffer(p, (n,), "int32")\n',
        1,
        "handle 'p' is bound twice: to the indptr of axis 'J' and to buffer 'A'",
    ),
    (
        "    M = T.sparse_variable(K, (n, nnz), (p, a))\n",
        1,
        "axes 'J' and 'M' share the indptr 'p', but their parents differ: 'I' and 'K'",
    ),
    (
        '    M = T.sparse_variable(I, (n, nnz), (p, a), idtype="int64")\n',
        1,
        "axes 'J' and 'M' share the indptr 'p', but their idtypes differ: int32 and int64",
    ),
]


@pytest.mark.parametrize(("declarations", "line", "message"), DECLARATIONS)
def test_declarations(declarations, line, message):
    start = HEAD.count("\n")
    got, place = refused(source("T.evaluate(0)", declarations))
    assert got == f"<str>:{start + line}: in function 'f': {message}"
    assert place == start + line


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("C[i, 0, i] = x", "buffer 'C' has 2 axes, got 3 indices"),
        ("C[i] = x", "buffer 'C' has 2 axes, got 1 indices"),
        ("C[i, 0] = x + C[i]", "buffer 'C' has 2 axes, got 1 indices"),
        ("C[i, 0] = x + A[i, 0, 0]", "buffer 'A' has 2 axes, got 3 indices"),
        ("C[i, 0] += C[i]", "buffer 'C' has 2 axes, got 1 indices"),
        ("if C[i] < x:\n        B[i] = 0", "buffer 'C' has 2 axes, got 1 indices"),
        ("for s in range(B[i, i]):\n        B[i] = 0", "buffer 'B' has 1 axes, got 2 indices"),
        ("C[i, 0] = T.evaluate(0)", "expected a value to store, got None"),
    ],
)
def test_index_count(body, message):
    got, line = refused(source(f'with T.sp_iter([I], "S", "it") as [i]:\n    {body}'))
    assert got == message
    assert line == source("").count("\n") + 2


def test_what_is_allowed():
    for body in [
        'with T.sp_iter([I, K], "SS", "it") as [i, k]:\n'
        "    with T.init():\n        C[i, k] = 0.0\n    C[i, k] = x",  # init without reduction
        'with T.sp_iter([T.fuse(I, J), K], "SRS", "it") as [i, j, k]:\n'
        "    C[i, k] = C[i, k] + A[i, j]",
        'with T.sp_iter([I], "S", "it") as [i]:\n'
        '    with T.sp_iter([J], "S", "in") as [j]:\n        C[i, j] = A[i, j]',
        'with T.sp_iter([I], "S", "a") as [i]:\n    B[i] = 0\n'
        'with T.sp_iter([I], "S", "b") as [i]:\n    B[i] = 0',
    ]:
        from_source(source(body))
    shared = "    M = T.sparse_variable(I, (n, nnz), (p, a))\n"  # same parent, other indices
    from_source(source("T.evaluate(0)", shared))


def test_check_can_be_left_out():
    text = source('with T.sp_iter([J], "S", "it") as [j]:\n    T.evaluate(0)')
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    with pytest.raises(IllFormedError, match=r"^<str>:\d+: in function 'f': sp_iter 'it'"):
        verify(func)


def test_iterations_that_are_known_are_not_looked_at_again():
    """Schedules name those that they leave alone; all others are checked, and names of all."""
    bad = 'with T.sp_iter([J], "S", "{}") as [j]:\n    T.evaluate(0)\n'
    text = source(bad.format("one") + bad.format("two"))
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    one, two = func.body.seq
    verify(func, [one, two])
    with pytest.raises(IllFormedError, match="sp_iter 'two'"):
        verify(func, [one])
    text = text.replace('"two"', '"one"')
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    with pytest.raises(IllFormedError, match="two sparse iterations are named 'one'"):
        verify(func, list(func.body.seq))


def test_what_changed_beside_a_replaced_iteration_is_looked_at_again():
    """Primitives that change more than one iteration say so."""
    good, bad = (
        f'with T.sp_iter([{axis}], "S", "{name}") as [i]:\n    T.evaluate(0)\n'
        for axis, name in (("I", "one"), ("J", "two"))
    )
    text = source(good + bad).replace("@T.prim_func", "@T.prim_func(check_well_formed=False)")
    func = from_source(text)
    one, _ = func.body.seq
    replaced("somebody", func, one, one)
    with pytest.raises(ScheduleError, match="somebody: .*sp_iter 'two'"):
        replaced("somebody", func, one, one, trusted=False)


def test_what_is_nested_beside_a_replaced_iteration_is_known():
    """And what is around it, or in it, is not."""
    bad = '    with T.sp_iter([L], "S", "bad") as [l]:\n        T.evaluate(0)\n'
    good = '    with T.sp_iter([K], "S", "good") as [k]:\n        T.evaluate(0)\n'
    text = source(f'with T.sp_iter([I], "S", "outer") as [i]:\n{good}{bad}')
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    outer = func.body
    one, two = outer.body.seq
    replaced("somebody", func, one, one)
    for changed in (outer, two):
        with pytest.raises(ScheduleError, match="somebody: .*expected axis 'J', its parent"):
            replaced("somebody", func, changed, changed)


def test_declarations_that_are_known_are_not_looked_at_again():
    func = from_source(source("T.evaluate(0)"))
    (m,) = (p for p in func.params if p.name == "m")
    axis = Axis(name="Z", kind="dense_fixed", length=m, idtype="int16")
    more = func.replace(axes=[*func.axes, axis])
    verify(more, before=more)
    with pytest.raises(IllFormedError, match="axis 'Z': expected idtype"):
        verify(more, before=func)


def test_a_schedule_verifies_its_function_before_the_first_primitive():
    body = 'with T.sp_iter([I], "S", "one") as [i]:\n    T.evaluate(0)\n'
    text = source(body + body.replace("I]", "J]").replace("one", "two"))
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    sch = Schedule(func)
    (i,) = sch.get_sp_iters(sch.get_sparse_iteration("one"))
    with pytest.raises(IllFormedError, match="sp_iter 'two'"):
        sch.split(i, [None, 4])


def test_decorated_function_names_this_file():
    with pytest.raises(DiagnosticError) as err:

        @T.prim_func
        def f(a: T.handle, m: T.int32):
            I = T.dense_fixed(m)
            A = T.match_sparse_buffer(a, (I,), "float32")
            with T.sp_iter([I], "R", "it") as [i]:
                A[i] = 0.0  # here

    with open(__file__) as file:
        line = 1 + file.read().splitlines().index("                A[i] = 0.0  # here")
    assert f"{__file__}:{line}: in function 'f': sp_iter 'it': buffer 'A' " in str(err.value)
    assert f" --> {__file__}:{line}:17\n" in str(err.value)


def test_axis_of_another_function():
    @T.prim_func
    def f(a: T.handle, m: T.int32):
        I = T.dense_fixed(m)
        T.evaluate(0)

    g = make_func("g", [], f.axes, [], f.body)
    with pytest.raises(IllFormedError) as err:
        verify(g)
    assert str(err.value).endswith(
        "in function 'g': axis 'I' belongs to another function or its 'length' is not a parameter "
        "of 'g': 'm' is none"
    )


# Functions built by hand: no spans, so no file and line


class Hand:
    """The pieces of a small function, to be broken one at a time."""

    def __init__(self):
        self.handles = [tirx.Var(n, T.handle().ty) for n in ("a", "p", "q")]
        self.m, self.n, self.nnz = (tirx.Var(n, "int32") for n in ("m", "n", "nnz"))
        self.params = [*self.handles, self.m, self.n, self.nnz]
        a, p, q = self.handles
        self.i_axis = Axis(name="I", kind="dense_fixed", length=self.m)
        self.j_axis = self.child()
        self.buffer = self.over([self.i_axis, self.j_axis])
        self.i, self.j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
        self.body = tirx.BufferStore(self.buffer.var, tirx.const(0.0, "float32"), [self.i, self.j])

    def child(self, **changes):
        fields = {
            "name": "J",
            "kind": "sparse_variable",
            "length": self.n,
            "parent": self.i_axis,
            "nnz": self.nnz,
            "indptr": self.handles[1],
            "indices": self.handles[2],
        }
        return Axis(**{**fields, **changes})

    def over(self, axes, name="A", handle=True):
        var = buffer_var([a.length for a in axes], "float32", name)
        handle = self.handles[0] if handle is True else handle
        return SparseBuffer(var=var, axes=axes, handle=handle)

    def iteration(self, **changes):
        fields = {
            "span": None,
            "axes": [self.i_axis, self.j_axis],
            "kinds": "SS",
            "name": "it",
            "vars": [self.i, self.j],
            "init": None,
            "body": self.body,
            "annotations": {},
        }
        return SparseIteration(**{**fields, **changes})

    def func(self, **changes):
        fields = {
            "name": "f",
            "params": self.params,
            "axes": [self.i_axis, self.j_axis],
            "buffers": [self.buffer],
            "body": self.iteration(),
        }
        return make_func(**{**fields, **changes})


def by_hand(func, message):
    with pytest.raises(IllFormedError, match=f"^{re.escape(message)}$"):
        verify(func)


def test_the_unbroken_function():
    verify(Hand().func())
    assert verify(Hand().func()) is None


def test_kinds():
    h = Hand()
    for kinds in ("S", "SX", "SSS"):
        by_hand(
            h.func(body=h.iteration(kinds=kinds)),
            "in function 'f': sp_iter 'it': expected 2 kinds S or R, one for each of [I, J], "
            f"got '{kinds}'",
        )


def test_coordinate_variables():
    h = Hand()
    label = "in function 'f': sp_iter 'it': "
    by_hand(
        h.func(body=h.iteration(vars=[h.i])),
        f"{label}expected 2 coordinate variables, one for each of [I, J], got 1",
    )
    by_hand(
        h.func(body=h.iteration(vars=[h.i, tirx.Var("j", "int64")])),
        f"{label}expected variable 'j' of type int32, the idtype of axis 'J', got int64",
    )
    by_hand(h.func(body=h.iteration(vars=[h.i, h.i])), f"{label}variable 'i' is bound twice")
    loop = tirx.For(h.i, 0, 4, tirx.ForKind.SERIAL, h.body)
    by_hand(h.func(body=h.iteration(body=loop)), "in function 'f': variable 'i' is bound twice")


def test_axes_of_an_iteration():
    h = Hand()
    other = Axis(name="K", kind="dense_fixed", length=h.m)
    by_hand(
        h.func(body=h.iteration(axes=[h.i_axis, other])),
        "in function 'f': sp_iter 'it': 'K' is not an axis of 'f'",
    )
    twin = h.child(length=h.m)
    by_hand(
        h.func(body=h.iteration(axes=[h.i_axis, twin])),
        "in function 'f': sp_iter 'it': its axis 'J' differs from the axis of that name in 'f'",
    )
    by_hand(
        h.func(body=h.iteration(axes=[h.i_axis, AttachedAxis(axis=h.j_axis, to=other)])),
        "in function 'f': sp_iter 'it': 'K' is not an axis of 'f'",
    )
    fused = FusedAxis(axes=[h.j_axis, h.i_axis])
    by_hand(
        h.func(body=h.iteration(axes=[fused])),
        "in function 'f': sp_iter 'it': expected axis 'I', its parent, before 'J' in [J, I] or "
        "around it, but 'I' comes after it",
    )


def test_attached_after_its_target():
    h = Hand()
    v = Axis(name="V", kind="dense_fixed", length=h.m)
    attached = AttachedAxis(axis=h.j_axis, to=v)
    by_hand(
        h.func(axes=[h.i_axis, h.j_axis, v], body=h.iteration(axes=[attached, v])),
        "in function 'f': sp_iter 'it': expected axis 'V', which it is attached to, before 'J' in "
        "[J, V] or around it, but 'V' comes after it",
    )


def test_axis_fields():
    h = Hand()
    for changes, message in [
        ({"kind": "dense"}, "expected a kind among dense_fixed, dense_variable, sparse_fixed, "
                            "sparse_variable, got 'dense'"),
        ({"idtype": "int8"}, "expected idtype 'int32' or 'int64', got 'int8'"),
        ({"nnz": None}, "a sparse_variable axis needs a value for 'nnz'"),
        ({"parent": None}, "a sparse_variable axis needs a value for 'parent'"),
        ({"nnz_cols": tirx.const(4)}, "a sparse_variable axis has no 'nnz_cols'"),
        ({"kind": "dense_variable"}, "a dense_variable axis has no 'indices'"),
        ({"nnz": tirx.const(1.0)}, "expected 'nnz' of type int32 or int64, got float32"),
        ({"length": tirx.const(1, "int8")}, "expected 'length' of type int32 or int64, got int8"),
        ({"indptr": h.n}, "expected a T.handle parameter for 'indptr', got int32"),
        ({"indptr": tirx.Var("r", T.handle().ty)},
         "belongs to another function or its 'indptr' is not a parameter of 'f': 'r' is none"),
        ({"nnz": h.nnz + tirx.Var("r", "int32")},
         "belongs to another function or its 'nnz' is not a parameter of 'f': 'r' is none"),
    ]:  # fmt: skip
        colon = "" if message.startswith("belongs") else ":"
        by_hand(
            h.func(axes=[h.i_axis, h.child(**changes)]),
            f"in function 'f': axis 'J'{colon} {message}",
        )


def test_axis_parents():
    h = Hand()
    by_hand(
        h.func(axes=[h.j_axis, h.i_axis]),
        "in function 'f': axis 'J': its parent 'I' is not an axis of 'f' listed before it",
    )
    other = Axis(name="I", kind="dense_fixed", length=h.n)
    by_hand(
        h.func(axes=[other, h.j_axis]),
        "in function 'f': axis 'J': its parent differs from the axis 'I'",
    )


def test_names():
    h = Hand()
    by_hand(
        h.func(params=[*h.params, tirx.Var("m", "int32")]),
        "in function 'f': two parameters are named 'm'",
    )
    by_hand(
        h.func(axes=[h.i_axis, h.j_axis, h.i_axis]),
        "in function 'f': two axes are named 'I'; axes are told apart by name",
    )
    by_hand(
        h.func(buffers=[h.buffer, h.over([h.i_axis], handle=None)]),
        "in function 'f': two buffers are named 'A'",
    )


def test_buffers():
    h = Hand()
    stranger = tirx.Var("s", T.handle().ty)
    other = Axis(name="K", kind="dense_fixed", length=h.m)
    prefix = "in function 'f': buffer 'A'"
    for buffer, message in [
        (h.over([h.i_axis], handle=stranger), ": its handle 's' is not a parameter of 'f'"),
        (h.over([h.i_axis], handle=h.m), ": expected a T.handle parameter, got 'm' of type int32"),
        (SparseBuffer(var=h.buffer.var, axes=None, handle=None), " has neither axes nor a handle"),
        (h.over([other]), ": 'K' is not an axis of 'f'"),
        (
            h.over([h.i_axis, h.child(length=h.m)]),
            ": its axis 'J' differs from the axis of that name in 'f'",
        ),
        (
            SparseBuffer(
                var=buffer_var([h.n], "float32", "A"), axes=[h.i_axis], handle=h.handles[0]
            ),
            ": expected the shape [m] of its axes, got [n]",
        ),
        (
            SparseBuffer(
                var=buffer_var([tirx.Var("r", "int32")], "float32", "A"),
                axes=None,
                handle=h.handles[0],
            ),
            ": 'r' in its shape is not a parameter of 'f'",
        ),
    ]:
        by_hand(h.func(buffers=[buffer]), prefix + message)


def test_undefined():
    h = Hand()
    stray = tirx.Var("stray", "int32")
    zero = tirx.const(0.0, "float32")
    by_hand(
        h.func(body=h.iteration(body=tirx.BufferStore(h.buffer.var, zero, [h.i, stray]))),
        "in function 'f': variable 'stray' is used but not defined: it is no parameter, coordinate "
        "or loop variable here",
    )
    other = buffer_var([h.m], "float32", "X")
    by_hand(
        h.func(body=h.iteration(body=tirx.BufferStore(other, zero, [h.i]))),
        "in function 'f': buffer 'X' is used but not declared",
    )
    late = tirx.SeqStmt([h.iteration(), tirx.Evaluate(h.i)])
    by_hand(
        h.func(body=late),
        "in function 'f': variable 'i' is used but not defined: it is no parameter, coordinate "
        "or loop variable here",
    )


def test_tvm_checks_stored_types():
    h = Hand()
    with pytest.raises(TypeError, match="dtype mismatch on BufferStore"):
        tirx.BufferStore(h.buffer.var, tirx.const(0, "int32"), [h.i, h.j])


@pytest.mark.parametrize(
    "node",
    [
        tirx.AttrStmt(tirx.const(0), "key", tirx.const(0), tirx.Evaluate(0)),
        tirx.stmt.Return(tirx.const(0)),
    ],
    ids=lambda n: type(n).__name__,
)
def test_statement_kinds(node):
    by_hand(
        Hand().func(body=node),
        f"in function 'f': a statement of type {type(node).__name__} cannot occur in stage I",
    )


def test_errors_are_value_errors():
    assert issubclass(IllFormedError, ValueError)
    assert tvm.error.DiagnosticError is DiagnosticError


def test_source_that_nobody_keeps():
    text = "@T.prim_func\ndef lost(a: T.handle, m: T.int32):\n    I = T.dense_fixed(m)\n"
    with pytest.raises(OSError) as error:
        exec(text, {"T": T})
    assert str(error.value) == (
        "prim_func: the source of 'lost' is not known, which a program is parsed from: write it in "
        "a file or a notebook, not at Python's own prompt or in `exec`, or give its text to "
        "`sparsetir.from_source`"
    )

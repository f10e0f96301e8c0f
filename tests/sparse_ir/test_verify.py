"""Every rule of stage I has a message, and a test of it."""

import importlib.util
import re
from textwrap import indent

import pytest
from tvm import tirx
from tvm.error import DiagnosticError

from refusals import refusals
from sparsetir.sparse_ir import script as T
from sparsetir.sparse_ir.errors import IllFormedError
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


# Scripts, with the words of the message at the line that it names.
SCRIPTS = """
with T.sp_iter([J], "S", "it") as [j]:  #! expected axis 'I', its parent, .. 'I' is not iterated
    T.evaluate(0)

with T.sp_iter([J, I], "SS", "it") as [j, i]:  #! 'it': expected axis 'I', .. 'I' comes after it
    T.evaluate(0)

with T.sp_iter([I, I], "SS", "it") as [i, j]:  #! sp_iter 'it': axis 'I' is iterated twice
    T.evaluate(0)

with T.sp_iter([I], "S", "out") as [i]:
    with T.sp_iter([I], "S", "in") as [j]:  #! 'I' is iterated here and in an enclosing iteration
        B[i] = 0

with T.sp_iter([T.fuse(I, K, J)], "SSS", "it") as [i, k, j]:  #! 'J' right after its parent 'I'
    T.evaluate(0)

with T.sp_iter([I, T.attach(J, K), K], "SSS", "it") as [i, j, k]:  #! as long as 'K' (n), got m
    T.evaluate(0)

with T.sp_iter([I, T.attach(L, K)], "SS", "it") as [i, l]:  #! expected 'L' under a dense_fixed axis
    T.evaluate(0)

with T.sp_iter([I, T.attach(K, I)], "SS", "it") as [i, k]:  #! dense_fixed axis, got no parent
    T.evaluate(0)

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    C[i, j] = x  #! buffer 'C' is written at an index that depends on the reduction variable 'j'

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    C[i, B[j]] = x  #! written at an index that depends on the reduction variable 'j'

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    with T.sp_iter([K], "S", "in") as [k]:
        C[j, k] = x  #! written at an index that depends on the reduction variable 'j'

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    e: T.let[T.int32] = B[j] + 1
    C[i, e] = x  #! written at an index that depends on the reduction variable 'j'

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    with T.init():
        C[i, 0] = C[i, 0]  #! sp_iter 'it': its init reads buffer 'C', which it writes
    C[i, 0] = x

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    with T.init():
        B[i] = 0
        C[i, B[i]] = x  #! its init reads buffer 'B', which it writes
    C[i, 0] = x

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    with T.init():
        C[i, j] = 0.0  #! its init uses the reduction variable 'j'; an init runs once for every
    C[i, 0] = x

with T.sp_iter([I, J], "SR", "it") as [i, j]:
    with T.init():
        C[i, 0] = A[i, j]  #! its init uses the reduction variable 'j'
    C[i, 0] = x

with T.sp_iter([I], "S", "it") as [i]:  #! sp_iter 'it': its init stores nothing
    with T.init():
        T.evaluate(0)
    C[i, 0] = x

with T.sp_iter([I], "S", "it") as [i]:
    C[i, x] = x  #! buffer 'C': expected an integer as index 1, got float32

with T.sp_iter([I], "S", "it") as [i]:
    C[i, 0] = x + C[i, x]  #! buffer 'C': expected an integer as index 1, got float32

with T.sp_iter([I], "S", "it") as [i]:
    B[i] = 0
with T.sp_iter([I], "S", "it") as [i]:  #! two sparse iterations are named 'it'; schedules find
    B[i] = 0

with T.sp_iter([I], "S", "it") as [i]:
    C[i, 0] = T.cast(T.cast(x, "float31"), "float32")  #! unknown dtype 'float31'

with T.sp_iter([I], "S", "it") as [i]:
    B[i] = T.exp(i)  #! T.exp: expected a float, such as T.cast(.., "float32"), got int32: T.exp(i)

with T.sp_iter([I], "S", "it") as [i]:
    C[i, 0] = T.nextafter(T.cast(x, "float16"), T.float16(1))  #! T.nextafter: expected float32 or

with T.sp_iter([I], "S", "it") as [i]:
    B[i] = T.dp4a(i, i, i)  #! T.dp4a is no operation of the language

for t in T.thread_binding(4, thread="threadIdx.x"):  #! loop 't' is bound to 'threadIdx.x'; stage I
    B[t] = 0

for t in range(0, 6, 0):  #! loop 't': expected a step other than 0
    B[t] = 0

with T.sblock("x"):  #! a statement of type SBlockRealize cannot occur in stage I
    B[0] = 0
"""
DECLARATIONS = """
A = T.match_sparse_buffer(a, (J,), "float32")  #! expected axis 'I', the parent of 'J', before

A = T.match_sparse_buffer(a, (J, I), "float32")  #! the parent of 'J', before it, got [J, I]

A = T.match_sparse_buffer(a, (I, I), "float32")  #! buffer 'A': axis 'I' occurs twice in [I, I]

M = T.sparse_fixed(I, (n, 4), q2)
A = T.match_sparse_buffer(a, (I, J, M), "float32")  #! are both children of 'I', so its elements

A = T.match_sparse_buffer(a, (I,), "float32")
B = T.match_sparse_buffer(a, (I,), "float32")  #! handle 'a' is bound twice: to buffer 'A' and to

A = T.match_buffer(p, (n,), "int32")  #! handle 'p' is bound twice: to the indptr of axis 'J' and to

M = T.sparse_variable(K, (n, nnz), (p, a))  #! share the indptr 'p', but their parents 'I' and 'K'

M = T.sparse_variable(K, (m, None), (a, b), unique=False)  #! expected it under a dense_fixed axis

M = T.sparse_variable(J, (m, None), (a, b))  #! axis 'M': nnz None .. expected it under a dense_fi

M = T.sparse_variable(K, (m, None), (a, b))  #! axis 'M': .. one buffer over it, a result, got []

M = T.sparse_variable(K, (m, None), (p, b))  #! axis 'M': .. expected 'p' to be of nothing else

M = T.sparse_variable(K, (m, None), (a, b))  #! expected no iteration over it, and no other axis
O = T.sparse_variable(M, (m, nnz), (p, q))

M = T.sparse_variable(I, (n, nnz), (p, a), idtype="int64")  #! but their idtypes differ: int32 and
"""
# Refused where the text is parsed, whose message has no place in it.
INDICES = """
C[i, 0] = max(C[i, 0], x)  #! Python's max takes no expressions; use T.max

B[i] = p[i]  #! 'p' is a handle, which has no elements; expected a buffer, such as T.match_buffer(p,

with T.sp_iter([K, J], "SR", "in") as [k]:  #! expected 2 names, one for each of k, j, got 1
    B[i] = 0

A2 = T.dense_fixed(n, "int8")  #! dense_fixed: argument 'idtype': expected 'int32' or 'int64', got

A2 = T.match_sparse_buffer(a, (I,), "float31")  #! argument 'dtype': unknown dtype 'float31'

C[i, 0, i] = x  #! buffer 'C' has 2 axes, got 3 indices

C[i] = x  #! buffer 'C' has 2 axes, got 1 indices

C[i, 0] = x + C[i]  #! buffer 'C' has 2 axes, got 1 indices

C[i, 0] = x + A[i, 0, 0]  #! buffer 'A' has 2 axes, got 3 indices

C[i, 0] += C[i]  #! buffer 'C' has 2 axes, got 1 indices

if C[i] < x:  #! buffer 'C' has 2 axes, got 1 indices
    B[i] = 0

for s in range(B[i, i]):  #! buffer 'B' has 1 axes, got 2 indices
    B[i] = 0

C[i, 0] = T.evaluate(0)  #! expected a value to store, got None
"""


def refused(text: str, prefix: str) -> None:
    """A script is refused where its comment is, with the words that are there, in order."""
    (line,) = [n for n, row in enumerate(text.splitlines(), 1) if "#!" in row]
    words = text.splitlines()[line - 1].partition("#! ")[2].split(" .. ")
    with pytest.raises(IllFormedError) as err:
        from_source(text)
    # TVM's hook for uncaught errors keeps the message of this very class to itself.
    assert type(err.value) is not DiagnosticError
    message, _, place = str(err.value).partition("\n --> ")
    assert str(err.value).count("\n") <= 5, "a message shows one line of the script"
    assert message.startswith(f"error: <str>:{line}: {prefix}"), message
    assert re.search(".*".join(map(re.escape, words)), message), message
    assert int(place.split(":")[1]) == line


PLACE = "in function 'f': "


@pytest.mark.parametrize("body", SCRIPTS.strip().split("\n\n"))
def test_refused_scripts(body):
    refused(source(body), PLACE)


@pytest.mark.parametrize("lines", DECLARATIONS.strip().split("\n\n"))
def test_refused_declarations(lines):
    refused(source("T.evaluate(0)", indent(lines, "    ") + "\n"), PLACE)


@pytest.mark.parametrize("body", INDICES.strip().split("\n\n"))
def test_refused_indices(body):
    refused(source(f'with T.sp_iter([I], "S", "it") as [i]:\n{indent(body, "    ")}'), "")


def test_the_text_of_a_file_that_is_no_module_of_its_path(tmp_path):
    """Below the place is that line, also where `sys.modules` does not know the module."""
    wrong = source('with T.sp_iter([J], "S", "it") as [i]:\n    B[0] = 77')
    file = tmp_path / "alone.py"
    file.write_text(f"import sparsetir\nfrom tvm.script import sparse_tir as T\n\n\n{wrong}")
    spec = importlib.util.spec_from_file_location("alone", file)
    with pytest.raises(IllFormedError) as error:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    line = int(str(error.value).split("alone.py:")[1].split(":")[0])
    assert re.search(rf"{line} \| +with T.sp_iter\(\[J\]", str(error.value)), error.value


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
    for length in ("m + 1", "1 + m"):  # offsets of rows, read as a buffer
        offsets = f"P = T.dense_fixed({length})\nPTR = T.match_sparse_buffer(p, (P,), 'int32')"
        from_source(source("T.evaluate(PTR[m])", indent(offsets, "    ") + "\n"))
    shared = "    M = T.sparse_variable(I, (n, nnz), (p, a))\n"  # same parent, other indices
    from_source(source("T.evaluate(0)", shared))


def test_check_can_be_left_out():
    text = source('with T.sp_iter([J], "S", "it") as [j]:\n    T.evaluate(0)')
    func = from_source(text.replace("@T.prim_func", "@T.prim_func(check_well_formed=False)"))
    with pytest.raises(IllFormedError, match=r"^<str>:\d+: in function 'f': sp_iter 'it'"):
        verify(func)


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


# Functions built by hand: no spans, so no file and line


class Hand:
    """The pieces of a small function, to be broken one at a time."""

    def __init__(self):
        self.handles = [tirx.Var(n, T.handle().ty) for n in ("a", "p", "q")]
        self.m, self.n, self.nnz = (tirx.Var(n, "int32") for n in ("m", "n", "nnz"))
        self.params = [*self.handles, self.m, self.n, self.nnz]
        self.i_axis = dense("I", self.m)
        self.j_axis = self.child()
        self.buffer = self.over([self.i_axis, self.j_axis])
        self.i, self.j = tirx.Var("i", "int32"), tirx.Var("j", "int32")
        self.body = tirx.BufferStore(self.buffer.var, ZERO, [self.i, self.j])

    def child(self, **changes):
        _, indptr, indices = self.handles
        fields = {"name": "J", "kind": "sparse_variable", "length": self.n, "nnz": self.nnz}
        fields |= {"parent": self.i_axis, "indptr": indptr, "indices": indices}
        return Axis(**{**fields, **changes})

    def over(self, axes, name="A", handle=True, shape=None):
        var = buffer_var(shape or [a.length for a in axes], "float32", name)
        handle = self.handles[0] if handle is True else handle
        return SparseBuffer(var=var, axes=axes, handle=handle)

    def func(self, **changes):
        """A function with other parts, or with the iteration's: its body is `store`."""
        part = {"axes": [self.i_axis, self.j_axis], "kinds": "SS", "vars": [self.i, self.j]}
        part |= {"span": None, "name": "it", "init": None, "body": self.body, "annotations": {}}
        parts = {"over": "axes", "kinds": "kinds", "vars": "vars", "store": "body"}
        part |= {parts[k]: changes.pop(k) for k in [*changes] if k in parts}
        fields = {"name": "f", "params": self.params, "axes": [self.i_axis, self.j_axis]}
        fields |= {"buffers": [self.buffer], "body": SparseIteration(**part)}
        return make_func(**{**fields, **changes})


def dense(name, length):
    return Axis(name=name, kind="dense_fixed", length=length)


ZERO = tirx.const(0.0, "float32")
h = Hand()
x64, r, stray = tirx.Var("j", "int64"), tirx.Var("r", "int32"), tirx.Var("stray", "int32")
s, k, v, twin = tirx.Var("s", T.handle().ty), dense("K", h.m), dense("V", h.m), h.child(length=h.m)


def made(**changes):
    verify(h.func(**changes))


def axis(**changes):
    made(axes=[h.i_axis, h.child(**changes)])


def stored(to, *index):
    made(store=tirx.BufferStore(to, ZERO, [*index]))


BY_HAND = """
made(kinds="S")
    # IllFormedError: sp_iter 'it': expected 2 kinds S or R, one for each of [I, J], got 'S'
made(kinds="SX")  # IllFormedError: one for each of [I, J], got 'SX'
made(kinds="SSS")  # IllFormedError: one for each of [I, J], got 'SSS'
made(vars=[h.i])
    # IllFormedError: sp_iter 'it': expected 2 coordinate variables, one for each of [I, J], got 1
made(vars=[h.i, x64])
    # IllFormedError: sp_iter 'it': expected variable 'j' of type int32, the idtype of axis 'J', got
        int64
made(vars=[h.i, h.i])  # IllFormedError: sp_iter 'it': variable 'i' is bound twice
made(store=tirx.For(h.i, 0, 4, tirx.ForKind.SERIAL, h.body))
    # IllFormedError: variable 'i' is bound twice
made(over=[h.i_axis, k])  # IllFormedError: sp_iter 'it': 'K' is not an axis of 'f'
made(over=[h.i_axis, twin])
    # IllFormedError: sp_iter 'it': its axis 'J' differs from the axis of that name in 'f'
made(over=[h.i_axis, AttachedAxis(axis=h.j_axis, to=k)])
    # IllFormedError: sp_iter 'it': 'K' is not an axis of 'f'
made(over=[FusedAxis(axes=[h.j_axis, h.i_axis])])
    # IllFormedError: sp_iter 'it': expected axis 'I', its parent, before 'J' in [J, I] or around
        it, but 'I' comes after it
made(axes=[h.i_axis, h.j_axis, v], over=[AttachedAxis(axis=h.j_axis, to=v), v])
    # IllFormedError: sp_iter 'it': expected axis 'V', which it is attached to, before 'J' in [J, V]
        or around it, but 'V' comes after it
axis(kind="dense")
    # IllFormedError: axis 'J': expected a kind among dense_fixed, dense_variable, sparse_fixed,
        sparse_variable, union, intersect, difference, got 'dense'
axis(idtype="int8")  # IllFormedError: axis 'J': expected idtype 'int32' or 'int64', got 'int8'
axis(nnz=None)
    # IllFormedError: axis 'J': nnz None says that the program assembles it; expected no iteration
axis(kind="dense_variable", nnz=None, indices=None)
    # IllFormedError: axis 'J': a dense_variable axis needs a value for 'nnz'
axis(parent=None)  # IllFormedError: axis 'J': a sparse_variable axis needs a value for 'parent'
axis(nnz_cols=tirx.const(4))  # IllFormedError: axis 'J': a sparse_variable axis has no 'nnz_cols'
axis(kind="dense_variable")  # IllFormedError: axis 'J': a dense_variable axis has no 'indices'
axis(nnz=tirx.const(1.0))
    # IllFormedError: axis 'J': expected 'nnz' of type int32 or int64, got float32
axis(length=tirx.const(1, "int8"))
    # IllFormedError: axis 'J': expected 'length' of type int32 or int64, got int8
axis(indptr=h.n)
    # IllFormedError: axis 'J': expected a T.handle parameter for 'indptr', got int32
axis(indptr=s)
    # IllFormedError: axis 'J' belongs to another function or its 'indptr' is not a parameter of
        'f': 's' is none
axis(nnz=h.nnz + r)
    # IllFormedError: axis 'J' belongs to another function or its 'nnz' is not a parameter of 'f':
        'r' is none
made(axes=[h.j_axis, h.i_axis])
    # IllFormedError: axis 'J': its parent 'I' is not an axis of 'f' listed before it
made(axes=[dense("I", h.n), h.j_axis])
    # IllFormedError: axis 'J': its parent differs from the axis 'I'
made(params=[*h.params, tirx.Var("m", "int32")])
    # IllFormedError: two parameters are named 'm'
made(axes=[h.i_axis, h.j_axis, h.i_axis])
    # IllFormedError: two axes are named 'I'; axes are identified by name
made(buffers=[h.buffer, h.over([h.i_axis], handle=None)])
    # IllFormedError: two buffers are named 'A'
made(buffers=[h.over([h.i_axis], handle=s)])
    # IllFormedError: buffer 'A': its handle 's' is not a parameter of 'f'
made(buffers=[h.over([h.i_axis], handle=h.m)])
    # IllFormedError: buffer 'A': expected a T.handle parameter, got 'm' of type int32
made(buffers=[SparseBuffer(var=h.buffer.var, axes=None, handle=None)])
    # IllFormedError: buffer 'A' has neither axes nor a handle
made(buffers=[h.over([k])])  # IllFormedError: buffer 'A': 'K' is not an axis of 'f'
made(buffers=[h.over([h.i_axis, twin])])
    # IllFormedError: buffer 'A': its axis 'J' differs from the axis of that name in 'f'
made(buffers=[h.over([h.i_axis], shape=[h.n])])
    # IllFormedError: buffer 'A': expected the shape [m] of its axes, got [n]
made(buffers=[h.over(None, shape=[r])])
    # IllFormedError: buffer 'A': 'r' in its shape is not a parameter of 'f'
stored(h.buffer.var, h.i, stray)
    # IllFormedError: variable 'stray' is used but not defined: it is no parameter, coordinate or
        loop variable here
stored(buffer_var([h.m], "float32", "X"), h.i)
    # IllFormedError: buffer 'X' is used but not declared
made(body=tirx.SeqStmt([h.func().body, tirx.Evaluate(h.i)]))
    # IllFormedError: variable 'i' is used but not defined
made(body=tirx.AttrStmt(tirx.const(0), "key", tirx.const(0), tirx.Evaluate(0)))
    # IllFormedError: a statement of type AttrStmt cannot occur in stage I
made(body=tirx.stmt.Return(tirx.const(0)))
    # IllFormedError: a statement of type Return cannot occur in stage I
"""
IN_F = BY_HAND.replace("IllFormedError: ", "IllFormedError: in function 'f': .. ")
test_refused_by_hand = refusals(IN_F, globals(), AttachedAxis, FusedAxis)


def test_source_that_nobody_keeps():
    text = "@T.prim_func\ndef lost(a: T.handle, m: T.int32):\n    I = T.dense_fixed(m)\n"
    with pytest.raises(OSError) as error:
        exec(text, {"T": T})
    assert str(error.value) == (
        "prim_func: the source of 'lost' is not known, which a program is parsed from: write it in "
        "a file or a notebook, not at Python's own prompt or in `exec`, or give its text to "
        "`sparsetir.from_source`"
    )

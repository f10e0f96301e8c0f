"""Stage-I nodes as TVM objects: equality, hash, JSON, modules and passes."""

import re

import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as TIR

from sparsetir.sparse_ir.nodes import SparseFunc, sparse_iterations
from sparsetir.sparse_ir.script import from_source
from sparsetir.sparse_ir.traversal import map_expr
from sparsetir.sparse_ir.verify import verify

SPMM = """@T.prim_func
def spmm(a: T.handle, b: T.handle, c: T.handle, p: T.handle, q: T.handle,
         m: T.int32, n: T.int32, nnz: T.int32, feat: T.int32):
    I = T.dense_fixed(m)
    J = T.sparse_variable(I, (n, nnz), (p, q))
    J_ = T.dense_fixed(n)
    K = T.dense_fixed(feat)
    A = T.match_sparse_buffer(a, (I, J), "float32")
    B = T.match_sparse_buffer(b, (J_, K), "float32")
    C = T.match_sparse_buffer(c, (I, K), "float32")
    with T.sp_iter([I, J, K], "SRS", "it") as [i, j, k]:
        T.sp_iter_attr({"tile": 4})
        with T.init():
            C[i, k] = T.float32(0.0)
        C[i, k] = C[i, k] + A[i, j] * B[j, k]
"""
NAMES = dict(zip(
    "a b c p q m n nnz feat I J J_ K A B C i j k".split(),
    "x y z ptr idx rows cols size d R S D F X Y Z r s f".split(), strict=True,
))  # fmt: skip
RENAMED = re.sub(r"\w+", lambda word: NAMES.get(word[0], word[0]), SPMM)


def changed(*pairs: tuple[str, str]) -> SparseFunc:
    text = SPMM
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return from_source(text)


def test_equal_under_renaming():
    a, b = from_source(SPMM), from_source(RENAMED)
    assert tvm_ffi.structural_equal(a, b)
    assert tvm_ffi.structural_hash(a) == tvm_ffi.structural_hash(b)
    assert {g.name for g in a.axes}.isdisjoint(g.name for g in b.axes)


@pytest.mark.parametrize(
    "pairs",
    [
        [("def spmm", "def other")],
        [('"SRS"', '"SSS"'), ("            C[i, k] = T.float32(0.0)", "            C[i, k] = 0.0")],
        [("(I, J), ", "(I, K), ")],
        [("B = T.match_sparse_buffer(b, (J_, K)", "B = T.match_sparse_buffer(b, (K, J_)")],
        [('(J_, K), "float32"', '(J_, K), "float32", scope="shared"')],
        [("a, (I, J), ", "c, (I, J), "), ("c, (I, K), ", "a, (I, K), ")],
        [("(p, q))", "(q, p))")],
        [("(p, q))", "(p, q), unique=False)")],
        [("T.dense_fixed(feat)", "T.dense_fixed(n)")],
        [("T.dense_fixed(feat)", 'T.dense_fixed(feat, idtype="int64")')],
        [('"it"', '"that"')],
        [('{"tile": 4}', '{"tile": 8}')],
        [("T.float32(0.0)", "T.float32(1.0)")],
        [("A[i, j] * B[j, k]", "B[j, k] * A[i, j]")],
        [("m: T.int32", "m: T.int64"), ("T.dense_fixed(m)", 'T.dense_fixed(m, idtype="int64")')],
        [("[I, J, K]", "[T.fuse(I, J), K]")],
        [("[I, J, K]", "[I, K, J]"), ("[i, j, k]", "[i, k, j]"), ('"SRS"', '"SSR"')],
        [("J_ = T.dense_fixed(n)", "J_ = T.dense_fixed(m)")],
    ],
    ids=lambda pairs: pairs[0][1].strip(),
)
def test_differences_count(pairs):
    a, b = from_source(SPMM), changed(*pairs)
    assert not tvm_ffi.structural_equal(a, b, map_free_vars=True)
    assert tvm_ffi.structural_hash(a) != tvm_ffi.structural_hash(b)


@pytest.mark.parametrize("text", [SPMM, RENAMED, SPMM.replace("[I, J, K]", "[T.fuse(I, J), K]")])
def test_json(text):
    func = from_source(text)
    back = tvm.ir.load_json(tvm.ir.save_json(func))
    assert isinstance(back, SparseFunc)
    assert tvm_ffi.structural_equal(func, back)
    assert [a.name for a in back.axes] == [a.name for a in func.axes]
    assert back.script() == func.script()
    verify(back)


def test_json_keeps_sharing():
    back = tvm.ir.load_json(tvm.ir.save_json(from_source(SPMM)))
    (it,) = sparse_iterations(back)
    assert it.axes[1].same_as(back.axis("J"))
    assert back.axis("J").parent.same_as(back.axis("I"))
    assert back.buffer("A").axes[1].same_as(back.axis("J"))


def test_lookup():
    func = from_source(SPMM)
    assert func.name == "spmm"
    assert func.axis("J").parent.name == "I"
    assert [a.name for a in func.axis("J").ancestors()] == ["I", "J"]
    assert func.axis("J").root.name == "I"
    assert func.axis("J").is_sparse and func.axis("J").is_variable
    assert not func.axis("K").is_sparse and not func.axis("K").is_variable
    assert func.buffer("C").dtype == "float32"
    with pytest.raises(KeyError, match=r"no axis 'X'; there are \['I', 'J', 'J_', 'K'\]"):
        func.axis("X")
    with pytest.raises(KeyError, match=r"no buffer 'X'; there are \['A', 'B', 'C'\]"):
        func.buffer("X")


@TIR.prim_func
def flat(a: TIR.handle, m: TIR.int32):
    A = TIR.match_buffer(a, (m,), "float32")
    for i in range(m):
        A[i] = TIR.float32(0)


def test_module():
    func = from_source(SPMM)
    mod = tvm.IRModule({"spmm": func, "flat": flat})
    assert isinstance(mod["spmm"], SparseFunc) and isinstance(mod["flat"], tvm.tirx.PrimFunc)
    assert tvm_ffi.structural_equal(mod, tvm.IRModule({"spmm": from_source(RENAMED), "flat": flat}))
    back = tvm.ir.load_json(tvm.ir.save_json(mod))
    assert tvm_ffi.structural_equal(mod, back)
    assert isinstance(back["spmm"], SparseFunc)


def test_errors_of_functions_that_map_a_tree():
    """Errors are raised when the walk is over, and no function is called after the first."""
    body = from_source(SPMM).body.body
    stores, wrong = [], ValueError("refused")

    def refuse(store):
        stores.append(store)
        raise wrong

    rules = [
        (tirx.BufferStore, refuse),
        (ir.TensorLoad, lambda x: tirx.BufferLoad(x.source, x.indices)),
    ]
    for _ in range(1000):
        with pytest.raises(ValueError, match="refused") as raised:
            map_expr(tirx.SeqStmt([body, body]), rules)
        assert raised.value is wrong
        _ = [bytearray(20 + n) for n in range(100)]
    assert len(stores) == 1000

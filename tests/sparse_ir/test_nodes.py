"""Stage-I nodes as TVM objects: equality, hash, lookup, and functions that map a tree."""

import pytest
import tvm_ffi
from tvm import ir, tirx

from sparsetir.sparse_ir.nodes import SparseFunc
from sparsetir.sparse_ir.script import from_source
from sparsetir.sparse_ir.traversal import map_expr

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


def changed(*pairs: tuple[str, str]) -> SparseFunc:
    text = SPMM
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return from_source(text)


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

"""docs/tvm.md: its table is what trying each cell gives, and what its kernels compute is right."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.sparse as sp
from tvm.s_tir import TensorIntrin
from tvm.script import tirx as TIR

import sparsetir
from cuda_runner import requires_cuda_text
from cuda_stages import CudaStages
from sparsetir.formats import BSR, Hyb, Operand

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "docs") not in sys.path:
    sys.path.append(str(ROOT / "docs"))
TABLE = importlib.import_module("primitive_table")
MATRIX = sp.random_array((24, 40), density=0.2, format="csr", dtype="float32", rng=0)
PAGE = (ROOT / "docs" / "tvm.md").read_text()


def test_table() -> None:
    """After a change: `python docs/primitive_table.py`."""
    (shown,) = TABLE.MARKED.findall(PAGE)
    assert shown == TABLE.table()
    notes = {int(n) for n in re.findall(r"^(\d+)\. ", shown, re.M)}
    assert notes == {int(n) for n in re.findall(r"\((\d+)\)", shown)}


def inputs(storage: str) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of a case of the table but B and C, and the matrix that they store."""
    fmt, dense = TABLE.STORAGES[storage], MATRIX.toarray()
    if not isinstance(fmt, str):
        plain = sparsetir.from_source(TABLE.CSR.format(feat="feat", size=", feat: T.int32"))
        operand = Operand.of(plain, "A")
        converted = fmt.convert(sparsetir.SparseMatrix(MATRIX).pattern, operand)
        return {**converted.arguments(A=MATRIX.data), "m": 24}, dense
    if storage == "CSR":
        return {"a": MATRIX.data, "indptr": MATRIX.indptr, "indices": MATRIX.indices}, dense
    if storage == "BSR":
        stored = sp.bsr_matrix(MATRIX, blocksize=(4, 8))
        stored.sort_indices()
        return {"a": stored.data, "indptr": stored.indptr, "indices": stored.indices}, dense
    rng = np.random.default_rng(1)
    values = rng.uniform(0.5, 1, (24, 8)).astype("float32")
    if storage == "ELL":
        columns = np.stack([np.sort(rng.choice(40, 8, replace=False)) for _ in range(24)])
        dense = np.zeros((24, 40))
        dense[np.arange(24)[:, None], columns] = values
        return {"a": values.ravel(), "indices": columns.astype("int32").ravel()}, dense
    offsets = np.array([-3, -1, 0, 2, 5, 6, 20, 39], "int32")
    dense = np.zeros((24, 40))
    for d, offset in enumerate(offsets):
        rows = np.arange(24)[(np.arange(24) + offset >= 0) & (np.arange(24) + offset < 40)]
        dense[rows, rows + offset] = values[rows, d]
    return {"a": values, "off": offsets}, dense


@pytest.mark.slow
@pytest.mark.parametrize("storage", TABLE.STORAGES)
def test_what_works_is_right(storage: str) -> None:
    args, dense = inputs(storage)
    b = np.random.default_rng(2).uniform(-1, 1, (40, 32)).astype("float32")
    for primitive in TABLE.PRIMITIVES:
        case = TABLE.case_of(primitive, storage)
        if TABLE.refusal(primitive, case) or "bind" in primitive:
            continue
        c = np.full((24, 32), np.nan, "float32")
        arrays = {"b": b, "c": c}
        if storage == "BSR":
            arrays = {"b": b.reshape(5, 8, 32), "c": c.reshape(6, 4, 32)}
        sparsetir.build(case.sch)(**args, **arrays)
        np.testing.assert_allclose(c, dense @ b, rtol=1e-4, atol=1e-5, err_msg=primitive)


@functools.cache
def page(folder: Path) -> Any:
    """The code of the page, run, as a module."""
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S))
    (folder / "tvm_page.py").write_text(code)
    spec = importlib.util.spec_from_file_location("tvm_page", folder / "tvm_page.py")
    assert spec is not None and spec.loader is not None
    sys.modules["tvm_page"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@requires_cuda_text
def test_kernels_for_gpus(tmp_path: Path) -> None:
    """The ones of the page whose results it does not compare itself, as CUDA text."""
    module, rng = page(tmp_path), np.random.default_rng(0)
    func, arguments = module.over(Hyb(1, 9))
    b, c = module.b, np.full((80, 64), np.nan, "float32")
    out = CudaStages(func, module.by_buckets)(
        {**arguments, "b": b, "out": c, "m": 80, "n": 160, "feat": 64}
    )
    np.testing.assert_allclose(out["out"], module.matrix @ b, rtol=1e-4)
    # The module of the intrinsics looks at the stack for each of them, which takes a minute.
    stack = functools.partial(inspect.stack, 0)
    with mock.patch("inspect.stack", stack), mock.patch("inspect.getmodule", lambda *_: None):
        from tvm.s_tir.tensor_intrin.cuda import get_wmma_intrin_group
    names = get_wmma_intrin_group(
        load_scope="shared", store_scope="global", in_dtype="float16", out_dtype="float32",
        trans_b=False,
    )  # fmt: skip
    program = module.blocks(16, 16, 64, "float16")
    gpu = {"kind": "cuda", "arch": "sm_80"}
    assert "wmma" in sparsetir.build(program, gpu, schedule=module.wmma, config=names).source()
    stored = module.matrix.tobsr((16, 16))
    stored.sort_indices()
    a, b = stored.data.astype("float16"), rng.random((10, 16, 64)).astype("float16")
    c = np.full((5, 16, 64), np.nan, "float32")
    args = {"a": a, "b": b, "c": c, "indptr": stored.indptr, "indices": stored.indices}
    sizes = {"mb": 5, "nb": 10, "nnzb": len(a)}
    out = CudaStages(program, module.wmma, names)({**args, **sizes})
    rounded = sp.bsr_matrix((a.astype("float32"), stored.indices, stored.indptr), shape=(80, 160))
    exact = rounded @ b.reshape(160, 64).astype("float32")
    np.testing.assert_allclose(out["c"].reshape(80, 64), exact, rtol=1e-3)


@pytest.mark.parametrize(
    ("storage", "names"),
    [
        ("CSR", ["J_indptr", "J_indices"]),
        ("ELL", ["J_indices"]),
        ("DIA", ["OFF"]),
        ("COO", ["JC_coo_indices", "IR_coo_indices"]),
        ("hyb part", ["JB_hyb_1_2_p0_b2_indices", "IB_hyb_1_2_p0_b2_indices"]),
        (BSR(4, 4), ["JO_bsr_4_4_indptr", "JO_bsr_4_4_indices", "MASK_bsr_4_4"]),
    ],
    ids=str,
)
def test_index_reads(storage: Any, names: list[str]) -> None:
    """Statements about the position of other accesses; the operands stay."""
    case = TABLE.Case(TABLE.STORAGES.get(storage, storage))
    assert set(TABLE.hide_index_reads(case.sch, case.block)) == set(names)
    assert {str(r.source.name)[0] for r in case.sch.get(case.block).reads} - {"C"} == {"A", "B"}
    assert TABLE.hide_index_reads(case.sch, case.block) == []


@TIR.prim_func(s_tir=True)
def axpy_by_ramps(a: TIR.handle, b: TIR.handle, c: TIR.handle) -> None:
    A = TIR.match_buffer(a, (1,), "float32", offset_factor=1)
    B = TIR.match_buffer(b, (16,), "float32", offset_factor=1)
    C = TIR.match_buffer(c, (16,), "float32", offset_factor=1)
    with TIR.sblock("root"):
        TIR.reads(C[0:16], A[0], B[0:16])
        TIR.writes(C[0:16])
        C[TIR.Ramp(0, 1, 16)] = (
            C[TIR.Ramp(0, 1, 16)] + TIR.Broadcast(A[0], 16) * B[TIR.Ramp(0, 1, 16)]
        )


def test_an_intrinsic_of_vectors() -> None:
    """Indices that are vectors get the type of offsets, too."""
    TensorIntrin.register("test_axpy_by_ramps", TABLE._axpy, axpy_by_ramps, override=True)
    case = TABLE.Case(TABLE.CSR)
    lanes = case.lanes()
    case.sch.decompose_reduction(case.block, case.loops[0])
    TABLE.hide_index_reads(case.sch, case.block)
    case.sch.tensorize(lanes, "test_axpy_by_ramps")
    args, dense = inputs("CSR")
    b, c = np.random.default_rng(2).random((40, 32), "float32"), np.empty((24, 32), "float32")
    sparsetir.build(case.sch)(**args, b=b, c=c)
    np.testing.assert_allclose(c, dense @ b, rtol=1e-4)

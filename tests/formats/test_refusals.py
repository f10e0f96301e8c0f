"""Errors of formats, their parameters, inference and partitions."""

import numpy as np
from zoo import MATRICES

from format_rules import csf, matrix, rule
from refusals import refusals
from sparsetir import formats
from sparsetir.formats import CSR, Mixture, Operand, Pattern
from sparsetir.formats.infer_indices import infer_format
from sparsetir.formats.partition import check_partition

ONE, BIG = np.array([0]), 2**31
LONG = Pattern([ONE, np.array([BIG])], (1, BIG + 1))  # a column that int32 does not count
WIDE = (40_000, 70_000)
IN_A_ROW = Pattern([np.zeros(70_000, np.int32), np.arange(70_000, dtype=np.int32)], WIDE)
IN_A_COLUMN = Pattern([np.arange(40_000, dtype=np.int32), np.full(40_000, 69_999)], WIDE)
PAIR = Pattern([np.arange(2), np.arange(2)], (2, 2))
THREE = Pattern([np.zeros(3, np.int32), np.arange(3)], (1, 3))
FOUR = Pattern(np.nonzero([[1, 0, 1], [1, 1, 0]]), (2, 3))
# (0, 2), (1, 0), (1, 2) of a matrix of 3 x 3; its formats.
ROOM = [np.array([0, 1, 1]), np.array([2, 0, 2])]
PARTS = [np.array([0, 1, 1, 2]), np.array([3, 0, 2, 1])]
MASK = np.array([True, False, False, True])


def bad_rule(idx, inv):
    axes = [("I2", "dense", "m"), ("J2", "sparse", "n", "I2")]
    return rule("bad", axes, "IJ", {"I": ["I2"], "J": ["J2"]}, idx, inv)


EARLIER = bad_rule(lambda i, j: (i - 1, j), lambda i, j: (i + 1, j))
HALVES = bad_rule(lambda i, j: (i // 2, j), lambda i, j: (i * 2, j))


def chosen(numbers, pattern=FOUR):
    """A mixture whose elements go where these numbers say."""
    both = CSR(), formats.BSR(2, 2)
    return Mixture("mine", both, lambda _: np.asarray(numbers)).convert(pattern)


def choose(pattern):
    return np.zeros(pattern.nnz, int)


test_refusals = refusals(
    """
RowELL(0)  # ValueError: RowELL: argument 'cols': expected a positive integer
RowELL(2.0)  # ValueError: RowELL: argument 'cols': expected a positive integer
RowELL(True)  # ValueError: RowELL: argument 'cols': expected a positive integer
RowELL("2")  # ValueError: RowELL: argument 'cols': expected a positive integer
CSF(())  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF((1, 2))  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF((0, 0))  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF((0, True))  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF((0.0, 1.0))  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF("01")  # ValueError: CSF: argument 'axes': expected a permutation of 0
CSF(None)  # ValueError: CSF: argument 'axes': expected a permutation of 0
BSR(0, 2)  # ValueError: BSR: argument 'rows': expected a positive integer, got 0
BSR(2, -1)  # ValueError: BSR: argument 'cols': expected a positive integer, got -1
DBSR(2, True)  # ValueError: DBSR: argument 'cols': expected a positive integer, got True
SRBCRS(8, 2.0)  # ValueError: SRBCRS: argument 'g': expected a positive integer, got 2.0
SRBCRS("8", 2)  # ValueError: SRBCRS: argument 't': expected a positive integer, got '8'
SELL(0)  # ValueError: SELL: argument 'c': expected a positive integer, got 0
SELL(4, 2.0)  # ValueError: SELL: argument 'sigma': expected a positive integer, got 2.0
SELL(4, 6)  # ValueError: SELL: argument 'sigma': expected 1 or a multiple of c = 4, got 6
Hyb(0, 1)  # ValueError: Hyb: argument 'c': expected a positive integer, got 0
Hyb(1, -1)  # ValueError: Hyb: argument 'k': expected an integer in [0, 30], got -1
Hyb(1, 31)  # ValueError: Hyb: argument 'k': expected an integer in [0, 30], got 31
RelationalHyb(True)  # ValueError: RelationalHyb: argument 'k': .. [0, 30], got True
RelationalHyb(1, 0)  # ValueError: RelationalHyb: argument 'rows': .. integer, got 0
EnumeratedPatterns(4, "mask")  # ValueError: 'by': expected 'count' or 'pattern', got 'mask'
EnumeratedPatterns(9, "pattern")  # ValueError: 'rows': expected at most 8 by pattern, got 9
EnumeratedPatterns(0)  # ValueError: argument 'rows': expected a positive integer, got 0
EnumeratedPatterns(17)
    # ValueError: EnumeratedPatterns: argument 'rows': expected at most 16, got 17
Mixture("two words", (CSR(),), choose)
    # ValueError: Mixture: argument 'label': expected an identifier, got 'two words'
Mixture("m", (), choose)  # ValueError: 'formats': expected at least one format, got ()
Mixture("m", (CSR(), "csr"), choose)  # ValueError: 'formats': expected at least one format, got
Mixture("m", (CSR(), RelationalHyb(1)), choose)
    # ValueError: 'formats': expected formats for the same number of axes, got
Mixture("m", (CSR(),), None)  # ValueError: 'choose': expected a function of a pattern, got None
chosen([0, 1, 2, 0])
    # StructureError: mine: argument 'choose': expected formats in [0, 2), got 2 for coordinate (1,
chosen([0, -1, 1, 0])  # StructureError: expected formats in [0, 2), got -1 for coordinate (0, 2)
chosen([0, 1, 1])  # StructureError: expected (4,) integers, got (3,) int64, none for coordinate
chosen([0] * 5)  # StructureError: expected (4,) integers, got (5,) int64
chosen([[0, 0, 0, 0]])  # StructureError: expected (4,) integers, got (1, 4) int64
chosen([0.0] * 4)  # StructureError: expected (4,) integers, got (4,) float64
chosen([0], MATRICES["nothing stored"])  # StructureError: expected (0,) integers, got (1,) int64
DIA().convert(Pattern([ONE, ONE + 1], (2**30 + 1, 2)))
    # ValueError: DIA: argument 'pattern': expected at most 1073741824 ro
DIA().convert(Pattern([ONE, ONE + 1], (2, 2**30 + 1)))  # ValueError: expected at most 1073741824 ro
CSR().convert(LONG, Operand())
    # StructureError: rule 'csr': length of axis 'J' = 2147483649 does not fit int32
CSC().convert(LONG, Operand())  # StructureError: length of axis 'J' = 2147483649 does not fit int32
COO().convert(LONG, Operand())  # StructureError: length of axis 'J' = 2147483649 does not fit int32
DCSR().convert(LONG, Operand())  # StructureError: length of axis 'J' = 2147483649 does not fit
CSF((0, 1)).convert(LONG, Operand())  # StructureError: axis 'J' = 2147483649 does not fit int32
Hyb(1, 0).convert(LONG, Operand())
    # StructureError: 'hyb_1_0_p0_b0': length of axis 'JB' = 2147483649 does
ELL().convert(IN_A_ROW)  # StructureError: number of places = 2800000000 does not fit int32
Ragged().convert(IN_A_COLUMN)  # StructureError: number of places = 2800000000 does not fit int32
RowELL(2**31 - 1).convert(PAIR)  # StructureError: number of places = 4294967294 does not
SELL(2**30).convert(THREE)  # StructureError: places = 3221225472 does not fit int32
SRBCRS(1, 2**30).convert(MATRICES["diagonal"], Operand())
    # StructureError: places = 10737418240 does not fit int32
infer_format(SELL(4).rules(Operand())[0], MATRICES["random"].coords, MATRICES["random"].shape)
    # StructureError: axis 'IR' has 4 slots in each row, none for coord
infer_format(EARLIER, ROOM, (3, 3))
    # StructureError: 'bad': axis 'I2' has coordinates in [0, 2), none for coordinate (0, 2)
infer_format(HALVES, [np.array([0, 4, 5]), np.array([2, 1, 1])], (6, 3))
    # StructureError: 'bad': inv_idx_map does not undo idx_map at coordinate (5, 1)
infer_format(matrix("csr"), ROOM, (3, 3), {"n": 2})
    # StructureError: axis 'J2' has coordinates in [0, 2), none for coordinate (0, 2)
infer_format(matrix("ell"), ROOM, (3, 3), {"cols_j2": 1})
    # StructureError: axis 'J2' has 1 slots in each row, none for coordinate (1, 2)
infer_format(matrix("csr"), [ONE, np.array([BIG - 1])], (1, BIG))
    # StructureError: axis 'J2': length = 2147483648 does not fit int32
infer_format(matrix("ell_rows"), [np.arange(4)] * 2, (4, 4), {"cols_j2": 2**30})
    # StructureError: axis 'J2': parents * nnz_cols = 4294967296 does not
infer_format(matrix("ragged"), [np.arange(4), np.full(4, 2**29 - 1)], (4, 2**29))
    # StructureError: axis 'J2': nnz = 2147483648 does not fit int32
infer_format(matrix("csr"), [ONE] * 2, (1, 1), {"nnz_j2": 2})
    # StructureError: expected nnz 1, got 2
infer_format(csf("IJ", idtype="int64"), [ONE] * 2, (2**21, 2**42))
    # StructureError: are too many to number
infer_format(matrix("csr"), [ONE], (1, 1))
    # ValueError: 'csr': expected coordinates and lengths for the axes ['I', 'J'], got 1 and 2
infer_format(matrix("csr"), [ONE, np.array([0, 0])], (1, 1))
    # ValueError: axis 'J': expected (1,) coordinates, got shape (2,)
infer_format(matrix("csr"), [np.array([0.5]), ONE], (1, 1))
    # ValueError: axis 'I': expected integers, got float64
infer_format(matrix("csr"), [np.array([0, 0]), np.array([0, 2])], (1, 2))
    # StructureError: axis 'J': expected coordinates in [0, 2), got 2 at position 1
infer_format(matrix("csr"), [np.array([-1]), ONE], (1, 1))
    # StructureError: axis 'I': expected coordinates in [0, 1), got -1 at
infer_format(matrix("ell"), [ONE] * 2, (2, 5), {"rows": 3})
    # ValueError: rule 'ell': argument 'sizes': expected some of the scalars ['m', 'n', 'cols_j2']
        of the .. , got 'rows'
check_partition(PARTS, [MASK, np.array([1])])  # StructureError: no part takes coordinate (1, 2)
check_partition(PARTS, [MASK, ~MASK, np.array([1])])
    # StructureError: coordinate (1, 0) is taken 2 times, by the parts [1, 2]
check_partition(PARTS, [MASK, np.array([1, 2, 1])])
    # StructureError: is taken 2 times, by the parts [1, 1]
check_partition(PARTS, [])  # StructureError: no part takes coordinate (0, 3)
check_partition(PARTS, [np.ones(3, bool)])
    # ValueError: part 0: expected a mask of shape (4,), got (3,)
check_partition(PARTS, [MASK, np.array([0.0])])
    # ValueError: part 1: expected a boolean mask or an array of positions, got float64
check_partition(PARTS, [np.array([0, 4])])  # ValueError: part 0: expected positions in [0, 4)
check_partition(PARTS, [np.array([0, -1])])
    # ValueError: part 0: expected positions in [0, 4), got -1
check_partition([np.zeros(2, int), np.zeros(3, int)], [])
    # ValueError: argument 'coords': expected one-dimensional arrays
infer_format(matrix("bsr2"), [np.arange(2)] * 2, (2, 2)).values(np.ones(3))
    # ValueError: 'bsr2': argument 'stored': expected shape (2,), got (3
infer_format(matrix("bsr2"), [np.arange(2)] * 2, (2, 2)).restore(np.ones(3))
    # ValueError: argument 'values': expected shape (1, 2, 2), got (3,)
""",
    {**vars(formats), **globals(), "MATRICES": MATRICES},
    check_partition, infer_format, csf, matrix, Operand,
)  # fmt: skip


def test_partitions():
    """Each coordinate belongs to one part."""
    check_partition(PARTS, [MASK, ~MASK])
    check_partition(PARTS, [MASK, np.array([2, 1]), np.zeros(0, int), np.zeros(4, bool)])
    check_partition(PARTS, [np.arange(4, dtype=np.uint8), []])
    check_partition([np.zeros(0, int)] * 2, [])
    infer_format(HALVES, [np.array([0, 4]), np.array([2, 1])], (6, 3))  # what is stored comes back

import numpy as np
import pytest
import torch

from ented.errors import InputError
from ented.tensor import COOTensor

# The second shape has more cells than int64 can number.
SHAPES = [(4, 3, 5), (4, 3, 5) + (2**21,) * 3]


CELL, VALUE = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)


def make(cells, values, shape=(4, 3)):
    indices = torch.tensor(cells, dtype=torch.int64).reshape(-1, len(shape))
    return COOTensor(indices, torch.tensor(values, dtype=torch.float64), shape)


def random_tensor(shape, n, seed):
    """Entries whose value depends on the cell, many of them repeated."""
    cells = np.random.default_rng(seed).integers(0, np.minimum(shape, 3), size=(n, len(shape)))
    cells[:, 3:] *= 2**20 - 1  # few but distant indices in the large modes
    return make(cells.tolist(), cells.sum(axis=1).tolist(), shape)


def rows(tensor):
    cells, values = tensor.indices.tolist(), tensor.values.tolist()
    return [(*cell, value) for cell, value in zip(cells, values, strict=True)]


def test_attributes():
    tensor = make([[0, 2], [3, 1]], [0, 1])
    assert (len(tensor), tensor.order, tensor.shape, tensor.is_binary) == (2, 2, (4, 3), True)
    assert not make([[0, 2], [3, 1]], [0, 2]).is_binary


def test_degrees_are_of_one_mode_after_the_other():
    assert make([[0, 2], [3, 1], [3, 2]], [0, 1, 1]).degrees().tolist() == [1, 0, 0, 2, 0, 1, 2]


def test_values_near_an_integer_are_rounded():
    tensor = make([[0, 0], [0, 1], [0, 2]], [8.9e-16, 7 - 9e-13, -1e-9])
    assert tensor.values.tolist() == [0, 7, 0]
    assert not torch.signbit(tensor.values).any()


@pytest.mark.parametrize(
    ("cells", "values", "message"),
    [
        ([[0, 0], [1, 3], [1, 9]], [1, 1, 1], "row 1, mode 1: index 3 is outside 0..2 (size 3); correct"),
        ([[0, 0], [-1, 0]], [1, 1], "row 1, mode 0: index -1 is outside 0..3 (size 4); correct"),
        ([[0, 0], [0, 1], [0, 2]], [1, np.nan, np.nan], "row 1: value nan is not finite; give counts"),
        ([[0, 0], [0, 1]], [np.inf, 1], "row 0: value inf is not finite"),
        ([[0, 0], [0, 1]], [1, -2], "row 1: value -2 is negative"),
        ([[0, 0], [0, 1]], [1, 2.5], "row 1: value 2.5 is not an integer"),
        ([[0, 0], [0, 1]], [1, -0.3], "row 1: value -0.3 is not an integer"),
        ([[0, 0], [0, 1]], [1, 1.00001], "row 1: value 1.00001 is not an integer"),
        ([[0, 0], [0, 1]], [2**53, 2**53 + 2], "row 1: value 9.0071993e+15 is above 2^53, where"),
        ([], [], "the tensor has no entries; give at least one row"),
        ([[0, 0], [0, 1]], [1], "indices have shape (2, 2); give 1 rows, one a value, and 2 columns, one"),
    ],
)
def test_invalid_entries(cells, values, message):
    with pytest.raises(InputError) as error:
        make(cells, values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(), (4, 0), (4, -1), (4, 3.0)])
def test_invalid_shape(shape):
    with pytest.raises(InputError, match="is invalid; give one size of at least 1 for each mode"):
        COOTensor(CELL, VALUE, shape)


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        (CELL.float(), VALUE, "indices are torch.float32 with 2 dimensions on cpu; give torch.int64 with 2"),
        (CELL[0], VALUE, "indices are torch.int64 with 1 dimensions on cpu; give torch.int64 with 2"),
        (
            CELL.to("meta"),
            VALUE,
            "indices are torch.int64 with 2 dimensions on meta; give torch.int64 with 2",
        ),
        (CELL, VALUE.float(), "values are torch.float32 with 1 dimensions on cpu; give torch.float64 with 1"),
        (CELL, VALUE[None], "values are torch.float64 with 2 dimensions on cpu; give torch.float64 with 1"),
        (
            CELL[:, :1],
            VALUE,
            "indices have shape (1, 1); give 1 rows, one a value, and 2 columns, one a mode",
        ),
    ],
)
def test_invalid_layout(indices, values, message):
    with pytest.raises(InputError) as error:
        COOTensor(indices, values, (4, 3))
    assert message in str(error.value)


def test_from_rows():
    for dtype in (np.float64, np.int64, np.uint8):
        tensor = COOTensor.from_rows(np.array([[3, 2, 7], [0, 1, 0]], dtype=dtype), (4, 3))
        assert rows(tensor) == [(3, 2, 7), (0, 1, 0)]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            [[0, 0, 0, 1]],
            "rows have shape (1, 4); give 3 columns: one index for each of 2 modes, then",
        ),
        ([0, 0, 1], "rows have shape (3,); give 3 columns"),
        ([["a", "b", "c"]], "rows hold <U1; give numbers"),
        ([[0, 0, 1], [0, 1.5, 1]], "row 1, mode 1: index 1.5 is not an integer"),
        ([[np.nan, 0, 1]], "row 0, mode 0: index nan is not an integer"),
        ([[np.inf, 0, 1]], "row 0, mode 0: index inf is not an integer"),
    ],
)
def test_invalid_rows(table, message):
    with pytest.raises(InputError) as error:
        COOTensor.from_rows(np.array(table), (4, 3))
    assert message in str(error.value)


def test_subset():
    tensor = make([[0, 0], [1, 1], [2, 2]], [5, 6, 7])
    assert rows(tensor.subset(torch.tensor([2, 0]))) == [(2, 2, 7), (0, 0, 5)]
    assert rows(tensor.subset(tensor.values > 5)) == [(1, 1, 6), (2, 2, 7)]
    with pytest.raises(InputError, match="no entries"):
        tensor.subset(tensor.values > 7)


@pytest.mark.parametrize("shape", SHAPES)
def test_distinct_keeps_the_first_row_of_each_cell(shape):
    tensor = random_tensor(shape, 60, seed=0)
    expected = list(dict.fromkeys(rows(tensor)))
    assert len(expected) < 60
    assert rows(tensor.distinct()) == expected


def test_distinct_refuses_a_cell_with_two_values():
    with pytest.raises(InputError) as error:
        make([[0, 0], [3, 2], [0, 1], [3, 2]], [5, 6, 5, 7]).distinct()
    assert str(error.value) == "row 3: cell (3, 2) has the value 7, but 6 in row 1; keep one of them"


@pytest.mark.parametrize("shape", SHAPES)
def test_without_drops_the_cells_of_the_other(shape):
    tensor, other = random_tensor(shape, 200, seed=0), random_tensor(shape, 20, seed=1)
    cells = {row[:-1] for row in rows(other)}
    expected = [row for row in rows(tensor) if row[:-1] not in cells]
    assert 0 < len(expected) < 200
    assert rows(tensor.without(other)) == expected


def test_without_refuses_to_leave_nothing():
    tensor = make([[0, 0], [1, 1]], [1, 1])
    with pytest.raises(InputError, match="no entry is left, as every cell stands in the other split too"):
        tensor.without(tensor)

import numpy as np
import pytest

from longspan.tasks.packing import Packed


@pytest.mark.parametrize("width", [1, 7, 511, 1000, 4095])
@pytest.mark.parametrize("count", [1, 510, 511, 512, 5000])
def test_no_token_is_lost_or_read_twice(count, width):
    tokens = np.arange(1, count + 1, dtype=np.uint16)
    packed = Packed(tokens, width, pad_id=0)
    rows = packed.take(range(len(packed)))
    assert rows.shape[1] == width
    assert (rows[rows != 0] == tokens).all()
    assert (rows.ravel()[count:] == 0).all()


def test_rows_come_in_any_order():
    packed = Packed(np.arange(1, 100, dtype=np.uint16), 8, pad_id=0)
    rows = packed.take([12, 0, 12])
    assert rows[0].tolist() == [97, 98, 99, 0, 0, 0, 0, 0]
    assert rows[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (rows[0] == rows[2]).all()

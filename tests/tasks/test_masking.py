import numpy as np
import pytest

from longspan.tasks.masking import IGNORED, Masking, uniform

CLS, SEP, PAD, MASK = 2, 3, 0, 4
ORDINARY = np.arange(5, 1000)
ROWS, LENGTH = 400, 128
HIDABLE = LENGTH - 2


def tokens(seed=0):
    ids = np.random.default_rng(seed).choice(ORDINARY, (ROWS, LENGTH))
    ids[:, 0], ids[:, -1] = CLS, SEP
    return ids


def spread_of(share, count):
    """Five standard errors of a share of `count` independent draws."""
    return 5 * np.sqrt(share * (1 - share) / count)


def test_a_fixed_share_is_hidden_eighty_ten_ten():
    ids = tokens()
    read, places, labels = Masking(MASK, PAD, ORDINARY).apply(ids, np.arange(ROWS), epoch=0)
    used = labels != IGNORED
    assert (used.sum(1) == round(0.15 * LENGTH)).all()
    assert (np.take_along_axis(ids, places, 1)[used] == labels[used]).all()
    assert np.isin(labels[used], ORDINARY).all()
    shown = np.take_along_axis(read, places, 1)[used]
    count = used.sum()
    masked, kept = (shown == MASK).mean(), (shown == labels[used]).mean()
    random = 1 - masked - kept
    # A random token is the true one once in 995 draws.
    for found, expected in ((masked, 0.8), (kept, 0.1), (random, 0.1)):
        assert found == pytest.approx(expected, abs=spread_of(expected, count) + 0.1 / 995)
    untouched = np.ones_like(ids, bool)
    np.put_along_axis(untouched, places, ~used, axis=1)
    untouched[:, 0] = True
    assert (read == ids)[untouched].all()


def test_every_place_is_as_likely():
    ids = tokens()
    masking = Masking(MASK, PAD, ORDINARY)
    hits = np.zeros(LENGTH)
    for epoch in range(20):
        _, places, labels = masking.apply(ids, np.arange(ROWS), epoch)
        hits += np.bincount(places[labels != IGNORED], minlength=LENGTH)
    share = round(0.15 * LENGTH) / HIDABLE
    rows = 20 * ROWS
    assert np.abs(hits[1:-1] / rows - share).max() < spread_of(share, rows)
    assert hits[0] == hits[-1] == 0


def test_a_row_is_masked_alike_in_any_company_and_anew_in_every_epoch():
    ids = tokens()
    masking = Masking(MASK, PAD, ORDINARY)
    whole = masking.apply(ids, np.arange(ROWS), epoch=3)
    some = np.array([7, 300, 12])
    for a, b in zip(masking.apply(ids[some], some, epoch=3), whole, strict=True):
        assert (a == b[some]).all()
    assert (masking.apply(ids, np.arange(ROWS), epoch=4)[1] != whole[1]).any(1).all()
    other = Masking(MASK, PAD, ORDINARY, seed=1).apply(ids, np.arange(ROWS), epoch=3)
    assert (other[1] != whole[1]).any(1).all()


def test_whole_words_are_hidden_whole():
    ids = tokens()
    continues = np.zeros(1000, bool)
    continues[500:] = True  # half of the ids continue a word
    masking = Masking(MASK, PAD, ORDINARY, continues=continues)
    _, places, labels = masking.apply(ids, np.arange(ROWS), epoch=0)
    chosen = np.zeros_like(ids, bool)
    np.put_along_axis(chosen, places, labels != IGNORED, axis=1)
    chosen[:, 0] = False
    # A token that continues a word is hidden exactly if the one before it is, unless that one is
    # special; a single word longer than the share may be cut, which these are not.
    inside = continues[ids[:, 2:-1]]
    assert (chosen[:, 2:-1] == chosen[:, 1:-2])[inside].all()
    share = chosen.sum() / (ROWS * HIDABLE)
    # Of 19 places, those that a word does not fit into are left.
    assert 0.13 < share <= 19 / HIDABLE


def test_a_word_longer_than_the_share_is_cut_rather_than_nothing_hidden():
    ids = np.full((1, 40), 600)
    masking = Masking(MASK, PAD, ORDINARY, continues=np.arange(1000) >= 500)
    _, _, labels = masking.apply(ids, np.array([0]), epoch=0)
    assert (labels != IGNORED).sum() == 6


def test_short_and_empty_rows():
    ids = np.full((3, 32), PAD)
    ids[0, :3] = CLS, 10, SEP
    ids[2, :20] = 10
    _, places, labels = Masking(MASK, PAD, ORDINARY).apply(ids, np.arange(3), epoch=0)
    assert (labels != IGNORED).sum(1).tolist() == [1, 0, 3]
    assert labels[0, 0] == 10
    assert places[0, 0] == 1


def test_draws_are_uniform():
    draws = uniform(0, 0, np.arange(1000), 100)
    assert draws.min() >= 0
    assert draws.max() < 1
    # Ten bins of 100,000 draws: each within five standard errors of its share.
    counts = np.histogram(draws, 10, (0, 1))[0] / draws.size
    assert np.abs(counts - 0.1).max() < spread_of(0.1, draws.size)
    correlation = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(draws.size)


def test_a_share_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"share must be between 0 and 1, got 1\.5"):
        Masking(MASK, PAD, ORDINARY, share=1.5)

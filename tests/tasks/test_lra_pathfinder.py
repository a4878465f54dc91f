"""Pathfinder: statistics, geometry, what can be guessed without looking along a path."""

import numpy as np
import pytest

from longspan.tasks.lra import pathfinder
from longspan.tasks.lra.paths import tables
from longspan.tasks.lra.pictures import draw
from longspan.tasks.lra.splits import checksum


@pytest.fixture(scope="module")
def pictures():
    return draw(np.random.default_rng(0), 1500)


# Mean, deviation, share above 0 and above 127 of the original generator (150 to 300 pictures), and
# distractors a picture of an independent one, by dashes of a path.
ORIGINAL = {14: (20.34, 51.3, 0.343, 0.0860, 1.12), 9: (15.49, 46.2, 0.268, 0.0638, 1.8),
            6: (13.27, 43.5, 0.234, 0.0528, 3.35)}  # fmt: skip


@pytest.mark.parametrize("dashes", ORIGINAL)
def test_statistics_of_the_original(dashes, pictures):
    if dashes != 14:
        pictures = draw(np.random.default_rng(0), 500, dashes)
    x = pictures.images.astype(float)
    found = x.mean(), x.std(), (x > 0).mean(), (x > 127).mean(), pictures.distractors.mean()
    # The means of single pictures deviate by 2.3, so that of 150 by 0.2 and of 1,500 by 0.06; the
    # shares likewise by 1 to 2 %; distractors by 1, so 0.05 where 500 are drawn.
    assert np.allclose(found, ORIGINAL[dashes], rtol=(0.04, 0.02, 0.04, 0.04, 0.12))


def test_few_directions_survive_the_original_dilation():
    assert tables().usable.tolist() == list(range(-150, -120))


def test_label_says_whether_discs_share_a_path(pictures):
    assert 0.45 < pictures.labels.mean() < 0.55  # 4 standard errors of 0.013
    same = [
        any({tuple(e) for e in path} == {tuple(d) for d in discs} for path in ends)
        for discs, ends in zip(pictures.discs, pictures.ends, strict=True)
    ]
    # Since the last dash of the first path is not marked as taken, both may end in one pixel.
    met = (pictures.ends[:, 0, 1] == pictures.ends[:, 1, 1]).all(-1)
    assert met.mean() < 0.02
    assert np.array_equal(np.array(same)[~met], pictures.labels[~met].astype(bool))
    at = pictures.images[np.arange(1500)[:, None], pictures.discs[..., 0], pictures.discs[..., 1]]
    assert (at >= 127).all()  # a disc is 1 where the brightest distractor is 2
    centre = pictures.ends[:, 0, 0]
    assert ((centre >= 12) & (centre < 20)).all()


def test_brightness_says_nothing(pictures):
    """A threshold on the mean, or on any brightness, chosen on half, scores chance on the rest."""
    x = pictures.images.reshape(1500, -1).astype(float)
    features = np.stack([x.mean(1), x.std(1), (x > 0).mean(1), (x > 200).mean(1)], 1)
    features = (features - features.mean(0)) / features.std(0)
    weights, *_ = np.linalg.lstsq(features[:750], pictures.labels[:750] * 2.0 - 1, rcond=None)
    score = ((features[750:] @ weights > 0) == pictures.labels[750:]).mean()
    assert abs(score - 0.5) < 4 * 0.5 / 750**0.5  # standard errors of a guess


def test_generated_set(tmp_path):
    """The first of 200 parts of the set that results are of."""
    found = pathfinder.make(tmp_path / "parts", 0, {"train": 900, "test": 100}, workers=1)
    assert len(found["train"]) == 900
    assert (found["test"].lengths == 1024).all()
    whole = checksum(pathfinder.make(tmp_path / "parts", 0, {"train": 1000}, workers=1))
    assert whole == "88bdca2f05a3e4dc0df734653e62da75aa949f73f3b26a74dc661ce023664bf6"


def test_released_layout(tmp_path, pictures):
    from PIL import Image

    assert pathfinder.find(tmp_path) is None
    folder = tmp_path / "pathfinder32" / pathfinder.HARD
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for i in range(20):
        Image.fromarray(pictures.images[i]).save(folder / "imgs" / "0" / f"sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {pictures.labels[i]} 0 1 14 1.0")
    (folder / "imgs" / "0" / "sample_7.png").write_bytes(b"")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    found = pathfinder.find(tmp_path)
    assert [len(split) for split in found.values()] == [15, 2, 2]
    by_pixels = {pictures.images[i].tobytes(): pictures.labels[i] for i in range(20) if i != 7}
    seen = {
        split.document(int(row)): int(label)
        for split in found.values()
        for row, label in zip(split.rows, split.labels, strict=True)
    }
    assert seen == by_pixels

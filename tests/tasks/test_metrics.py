import numpy as np
import pytest

from longspan.tasks import metrics

stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
reference = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")

ROWS = 200
CASES = {"mixed": 0, "another": 1, "skewed": 2}


def draw(seed, classes):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, ROWS)
    if seed == CASES["skewed"]:
        labels[rng.random(ROWS) < 0.9] = 1
    predicted = np.where(rng.random(ROWS) < 0.6, labels, rng.integers(0, classes, ROWS))
    return predicted, labels


@pytest.mark.parametrize("seed", CASES.values(), ids=CASES)
@pytest.mark.parametrize("classes", [2, 3])
def test_accuracy_and_matthews_are_scikit_learns(seed, classes):
    predicted, labels = draw(seed, classes)
    assert metrics.accuracy(predicted, labels) == reference.accuracy_score(labels, predicted)
    expected = reference.matthews_corrcoef(labels, predicted)
    assert metrics.matthews(predicted, labels) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", CASES.values(), ids=CASES)
def test_f1_is_scikit_learns(seed):
    predicted, labels = draw(seed, 2)
    expected = reference.f1_score(labels, predicted)
    assert metrics.f1(predicted, labels) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("ties", [False, True], ids=["no-ties", "ties"])
def test_correlations_are_scipys(ties):
    rng = np.random.default_rng(3)
    x = rng.normal(size=ROWS)
    y = x + rng.normal(size=ROWS)
    if ties:
        x, y = x.round(), (2 * y).round() / 2
    assert metrics.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
    expected = stats.spearmanr(x, y).statistic
    assert metrics.spearman(x, y) == pytest.approx(expected, abs=1e-12)


def test_what_never_varies_has_no_correlation():
    constant, labels = np.ones(10), np.arange(10) % 2
    assert metrics.matthews(constant, labels) == 0
    assert metrics.pearson(constant, labels) == 0
    assert metrics.f1(np.zeros(10), np.zeros(10)) == 0


def test_scores_read_logits():
    logits = np.array([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    labels = np.array([1, 0, 0])
    assert metrics.score_f1(logits, labels) == {
        "f1": pytest.approx(2 / 3),
        "accuracy": pytest.approx(2 / 3),
    }
    assert metrics.score_correlation(logits[:, 1:], labels)["spearman"] == pytest.approx(
        stats.spearmanr(logits[:, 1], labels).statistic
    )

import json

import pytest
import runs
import torch

from longspan import records
from longspan.models import LongspanForMaskedLM, LongspanForSequenceClassification
from longspan.tasks import corpus
from longspan.training.run import FINISHED
from longspan.training.trainer import LongspanTrainer


def test_a_run_leaves_rows_a_model_and_what_it_was_made_of(data, tmp_path):
    run = runs.make("mlm", "nystrom", data, tmp_path, seed=3, evaluate_every=5)
    outcome = runs.silent(run)
    (row,) = records.read(tmp_path / "rows.jsonl")
    assert row == outcome.row
    assert (row["task"], row["method"], row["seed"], row["steps"]) == ("mlm", "nystrom", 3, 10)
    assert row["tokens"] == 10 * 8 * 32
    assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
    assert row["options"] == {"num_landmarks": 8, "conv_kernel": 33}
    assert [point["step"] for point in row["curve"]] == [5, 10]
    (scores,) = row["metrics"].values()
    assert scores["perplexity"] == pytest.approx(2.718281828 ** scores["loss"], rel=1e-6)
    assert 0 <= scores["accuracy"] <= 1
    assert row["environment"]["torch"] == torch.__version__
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["recipe"]["steps"] == 10
    model = LongspanForMaskedLM.from_pretrained(tmp_path / "model")
    assert model.config.method == "nystrom"
    assert row["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("method", ["yoso", "nystrom", "linformer"])
def test_a_trained_model_continues_longer_and_is_fine_tuned(method, data, tmp_path):
    short = runs.make("mlm", method, data, tmp_path / "short")
    runs.silent(short)
    start = tmp_path / "short" / "model"
    longer = runs.make(
        "mlm", method, data, tmp_path / "long", start=start, length=64, steps=2, learning_rate=0.0
    )
    row = runs.silent(longer).row
    assert row["model"]["max_position_embeddings"] == 64
    trained = LongspanForMaskedLM.from_pretrained(start)
    grown = LongspanForMaskedLM.from_pretrained(tmp_path / "long" / "model")
    old, new = (m.longspan.embeddings.position_embeddings.weight for m in (trained, grown))
    assert torch.equal(new, torch.cat([old, old]))
    fine = runs.make("glue/rte", method, data, tmp_path / "fine", start=tmp_path / "long" / "model")
    assert runs.silent(fine).status == FINISHED
    tuned = LongspanForSequenceClassification.from_pretrained(tmp_path / "fine" / "model")
    assert tuned.config.num_labels == 2
    changed = tuned.longspan.embeddings.word_embeddings.weight
    assert not torch.equal(changed, grown.longspan.embeddings.word_embeddings.weight)
    assert (tmp_path / "fine" / "model" / "tokenizer.json").is_file()


def test_a_start_of_another_method_or_vocabulary_is_refused(data, tmp_path):
    runs.silent(runs.make("mlm", "softmax", data, tmp_path / "a"))
    start = tmp_path / "a" / "model"
    other = runs.make("mlm", "nystrom", data, tmp_path / "b", start=start)
    with pytest.raises(ValueError, match=r"method must be that of .* \(softmax\), got nystrom"):
        runs.silent(other)
    nowhere = runs.make("mlm", "softmax", data, tmp_path / "b", start=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"start must be the folder of a trained model"):
        runs.silent(nowhere)


def test_one_cycle_moves_the_rate_and_momentum(data, tmp_path, monkeypatch):
    """As published code does, which says OneCycleLR and leaves its momentum as it comes."""
    seen, step = [], LongspanTrainer.training_step

    def noted(self, *arguments):
        (group, *_) = self.optimizer.param_groups
        seen.append((group["lr"], group["betas"][0]))
        return step(self, *arguments)

    monkeypatch.setattr(LongspanTrainer, "training_step", noted)
    changes = dict(schedule="one_cycle", warmup=4, learning_rate=1e-3)
    runs.silent(runs.make("mlm", "softmax", data, tmp_path, **changes))
    rates, momenta = zip(*seen, strict=True)
    assert rates[0] == pytest.approx(1e-3 / 25)
    assert max(rates) == rates[3] == pytest.approx(1e-3)  # the fourth step is the peak
    assert (momenta[0], momenta[3]) == (pytest.approx(0.95), pytest.approx(0.85))
    assert rates[-1] < 1e-6
    assert momenta[-1] == pytest.approx(0.95)
    for warmup in (1, len(seen)):
        change = changes | {"warmup": warmup}
        with pytest.raises(ValueError, match=f"warmup must be from 2 .*, got {warmup}"):
            runs.silent(runs.make("mlm", "softmax", data, tmp_path / "b", **change))


def test_evaluation_alone_finds_what_training_found(data, tmp_path):
    run = runs.make("mlm", "yoso", data, tmp_path)
    trained = runs.silent(run).row
    alone = runs.silent(run, eval_only=True).row
    assert alone["kind"] == "evaluation"
    for name, scores in trained["metrics"].items():
        # The dtype of sums is the same; only the batch they are made in may differ.
        assert alone["metrics"][name] == pytest.approx(scores, rel=1e-6)


def test_patience_ends_a_run_and_the_best_weights_are_kept(data, tmp_path):
    run = runs.make(
        "glue/rte", "softmax", data, tmp_path, steps=40, evaluate_every=2, patience=2,
        learning_rate=0.0, keep_best=True,
    )  # fmt: skip
    outcome = runs.silent(run)
    assert outcome.step == 6  # the first is the best, two more are no better
    assert outcome.row["best"]["step"] == 2
    assert outcome.row["best"]["value"] == outcome.row["metrics"]["validation"]["accuracy"]
    assert (tmp_path / "best" / "model.safetensors").is_file()


def test_accumulation_and_checkpointing_change_nothing(data, tmp_path):
    losses = []
    for number, changes in enumerate(
        [{}, {"accumulate": 4}, {"checkpointing": True}, {"accumulate": 2, "checkpointing": True}]
    ):
        run = runs.make(
            "mlm", "nystrom", data, tmp_path / str(number), hidden_dropout_prob=0.0, log_every=1,
            **changes,
        )  # fmt: skip
        losses.append(runs.silent(run).losses)
    for other in losses[1:]:
        # Parts of a batch are added in another order: float32's rounding, over ten steps.
        assert other == pytest.approx(losses[0], rel=1e-4)


def test_checkpointing_draws_the_same_hashes_again(data, tmp_path):
    losses = []
    for name, again in (("kept", False), ("again", True)):
        run = runs.make("mlm", "yoso", data, tmp_path / name, checkpointing=again, log_every=1)
        losses.append(runs.silent(run).losses)
    assert losses[0] == losses[1]


def test_bfloat16_is_close(data, tmp_path):
    losses = []
    for precision in ("fp32", "bf16"):
        run = runs.make(
            "mlm", "nystrom", data, tmp_path / precision, precision=precision, log_every=1
        )
        losses.append(runs.silent(run).losses)
    # bfloat16 keeps 8 bits: 0.4 % of a value, less of a mean over many.
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1] != losses[0]


def test_a_batch_that_cannot_be_divided_or_filled_is_refused(data, tmp_path):
    run = runs.make("mlm", "softmax", data, tmp_path, batch=9, accumulate=2)
    with pytest.raises(ValueError, match="batch must be a multiple of processes × accumulate = 2"):
        runs.silent(run)
    run = runs.make("glue/rte", "softmax", data, tmp_path, batch=97)
    with pytest.raises(ValueError, match="batch must be at most the 96 rows to train on, got 97"):
        runs.silent(run)


def test_a_loss_that_is_not_finite_ends_a_run(data, tmp_path):
    """And no row says that it was a run."""
    run = runs.make("mlm", "softmax", data, tmp_path, learning_rate=1e38, warmup=0, log_every=2)
    with pytest.raises(ValueError, match=r"the loss must stay finite, got (nan|inf) at step \d+;"):
        runs.silent(run)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.slow
def test_a_newcomers_run_learns(data, tmp_path):
    run = runs.make(
        "mlm", "nystrom", data, tmp_path, steps=300, batch=32, learning_rate=3e-3, norm="pre",
        hidden_dropout_prob=0.0, warmup=0.1, adam_beta2=0.98,
    )  # fmt: skip
    (scores,) = runs.silent(run).row["metrics"].values()
    # Knowing how often each word occurs and nothing else costs the entropy; neighbours tell more.
    assert scores["loss"] < 0.85 * corpus.read(data / "corpus", "validation").entropy

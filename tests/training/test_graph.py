"""Replayed steps are the steps they replace."""

import pytest
import torch

from longspan.models import LongspanConfig, LongspanForSequenceClassification
from longspan.training.graph import WARM_UP, StepGraph

pytestmark = pytest.mark.gpu


def make(method, **options):
    torch.manual_seed(0)
    config = LongspanConfig(
        vocab_size=20, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=128, max_position_embeddings=256, hidden_dropout_prob=0.0, num_labels=4,
        pooling="mean", norm="pre", method=method, options=options,
    )  # fmt: skip
    return LongspanForSequenceClassification(config).cuda().train()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(1, 20, (8, 256), generator=generator)
        lengths = torch.randint(100, 257, (8, 1), generator=generator)
        mask = torch.arange(256) < lengths
        yield {
            "input_ids": (ids * mask).cuda(), "attention_mask": mask.cuda(),
            "labels": torch.randint(0, 4, (8,), generator=generator).cuda(),
        }  # fmt: skip


def losses(model, graph):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step(batch):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    found = []
    for batch in batches(WARM_UP + 8):
        loss = graph(step, batch) if graph else step(batch)
        found.append(loss.item())
        optimizer.step()
        model.zero_grad()
    return found


@pytest.mark.parametrize("method", ["softmax", "nystrom", "linformer", "window"])
def test_replayed_steps_are_the_same(method):
    plain = losses(make(method), None)
    model = make(method)
    replayed = losses(model, StepGraph(model.parameters()))
    # The same kernels in the same order; sums of gradients by atomic additions differ.
    assert replayed == pytest.approx(plain, rel=2e-3)


def test_replays_draw_afresh():
    model = make("yoso", num_hashes=4, hash_bits=8, exact_below=0)
    graph = StepGraph(model.parameters())
    (batch,) = batches(1)

    def step(batch):
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    found = []
    for _ in range(WARM_UP + 6):
        found.append(graph(step, batch).item())
        model.zero_grad()
    assert len(set(found)) == len(found)
    assert graph.recorded

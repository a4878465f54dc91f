"""Our own models: every head, method and choice of configuration."""

import pytest
import torch
import transformers
import zoo
from cases import relative_error
from torch.nn import functional as F

import longspan
import longspan.huggingface  # registers the names of methods with transformers
from longspan.models import (
    LongspanConfig,
    LongspanForMaskedLM,
    LongspanForPairClassification,
    LongspanForPreTraining,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
    LongspanModel,
)
from longspan.models.encoder import pool

OPTIONS = {
    "window": {"window": 5},
    "strided": {"stride": 6},
    "reformer": {"bucket_size": 8},
    "yoso": {"num_hashes": 8, "hash_bits": 4, "conv_kernel": 5, "exact_below": 0},
    "yoso_expectation": {"hash_bits": 4},
    "nystrom": {"num_landmarks": 6, "conv_kernel": 5},
    "linformer": {"projected_length": 8},
}
LENGTHS = (40, 29, 7)
LABELS = {
    LongspanForMaskedLM: dict(labels=torch.randint(0, 99, (3, 40))),
    LongspanForPreTraining: dict(
        labels=torch.randint(0, 99, (3, 40)), sentence_order_label=torch.tensor([0, 1, 1])
    ),
    LongspanForSequenceClassification: dict(labels=torch.tensor([0, 2, 1])),
    LongspanForPairClassification: dict(
        pair_input_ids=torch.randint(5, 99, (3, 11)), labels=torch.tensor([0, 2, 1])
    ),
    LongspanForTokenClassification: dict(labels=torch.randint(0, 3, (3, 40))),
    LongspanForQuestionAnswering: dict(
        start_positions=torch.tensor([0, 4, 2]), end_positions=torch.tensor([5, 9, 99])
    ),
}
SHAPES = {"post-learned": {}, "pre-rotary": dict(norm="pre", positions="rotary"),
          "factorised": dict(embedding_size=16), "mean": dict(pooling="mean")}  # fmt: skip


def config(method="nystrom", **more):
    options = more.pop("options", OPTIONS.get(method, {}))
    settings = {**zoo.SMALL, "max_position_embeddings": 64, "num_labels": 3, **more}
    return LongspanConfig(method=method, options=options, **settings)


def make(model_class=LongspanModel, method="nystrom", **more):
    torch.manual_seed(0)
    return zoo.enlarge(model_class(config(method, **more))).eval()


@pytest.mark.parametrize("method", longspan.METHODS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_padded_equals_alone(method, shape):
    model = make(LongspanForSequenceClassification, method, **shape)
    ids, mask = zoo.batch()
    with torch.no_grad():
        whole = model(ids, mask, output_hidden_states=True)
        assert len(whole.hidden_states) == 3
        for i, n in enumerate(LENGTHS):
            alone = model(ids[i : i + 1, :n], output_hidden_states=True)
            assert relative_error(whole.logits[i : i + 1], alone.logits) < 1e-5
            assert (
                relative_error(
                    whole.hidden_states[-1][i : i + 1, :n], alone.hidden_states[-1]
                )
                < 1e-5
            )  # fmt: skip


@pytest.mark.parametrize("model_class", LABELS, ids=lambda c: c.__name__)
def test_every_head_learns_is_saved_and_loaded(model_class, tmp_path):
    model = make(model_class, hidden_dropout_prob=0.0)
    ids, mask = zoo.batch()
    labels = LABELS[model_class]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(ids, mask, **labels).loss
        loss.backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    loaded = model_class.from_pretrained(tmp_path).eval()
    a, b = model(ids, mask, **labels), loaded(ids, mask, **labels)
    assert all(torch.equal(x, y) for x, y in zip(a.to_tuple(), b.to_tuple(), strict=True))
    assert model(ids, mask, return_dict=False, **labels)[0] == a.loss


AUTO = {
    "AutoModel": LongspanModel,
    "AutoModelForMaskedLM": LongspanForMaskedLM,
    "AutoModelForPreTraining": LongspanForPreTraining,
    "AutoModelForSequenceClassification": LongspanForSequenceClassification,
    "AutoModelForTokenClassification": LongspanForTokenClassification,
    "AutoModelForQuestionAnswering": LongspanForQuestionAnswering,
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_classes(name, tmp_path):
    auto = getattr(transformers, name)
    assert type(auto.from_config(config())) is AUTO[name]
    make(AUTO[name]).save_pretrained(tmp_path)
    assert type(auto.from_pretrained(tmp_path)) is AUTO[name]
    assert type(transformers.AutoConfig.from_pretrained(tmp_path)) is LongspanConfig


SHARINGS = ("none", "headwise", "key-value", "layerwise")


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_linformer_projections_are_saved_in_every_sharing(sharing, tie, tmp_path):
    options = {"projected_length": 8, "sharing": sharing}
    model = make(LongspanForMaskedLM, "linformer", options=options, tie_word_embeddings=tie)
    projections = {id(p): p for k, p in model.named_parameters() if "projection" in k}
    matrices = sum(p.shape[0] for p in projections.values())
    assert matrices == {"none": 16, "headwise": 4, "key-value": 2, "layerwise": 1}[sharing]
    ids, mask = zoo.batch()
    model.save_pretrained(tmp_path)
    loaded, info = LongspanForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(loaded.eval()(ids, mask).logits, model(ids, mask).logits)
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


def test_projections_that_a_checkpoint_lacks_start_at_the_papers_scale(tmp_path):
    """N(0, 1/max_length): transformers leaves what it does not know uninitialised."""
    make(method="softmax").save_pretrained(tmp_path)
    options = {"projected_length": 64}
    model, info = LongspanModel.from_pretrained(
        tmp_path, method="linformer", options=options, output_loading_info=True
    )
    assert len(info["missing_keys"]) == 4
    for layer in model.layers:
        weight = layer.attention.attention.key_projection.weight
        assert abs(weight.std().item() * 64**0.5 - 1) < 0.1


def test_pair_head_reads_both_towers():
    model = make(LongspanForPairClassification)
    ids, mask = zoo.batch()
    other, other_mask = zoo.batch((20, 11, 15), seed=1)
    a = model.longspan(ids, mask).last_hidden_state[:, 0]
    b = model.longspan(other, other_mask).last_hidden_state[:, 0]
    expected = model.classifier(torch.cat([a, b, a * b, a - b], -1))
    assert torch.equal(model(ids, mask, other, other_mask).logits, expected)
    with pytest.raises(ValueError, match="pair_input_ids must be given"):
        model(ids, mask)


def test_losses_are_their_formulas():
    ids, mask = zoo.batch()
    model = make(LongspanForMaskedLM)
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    out = model(ids, mask, labels=labels)
    chosen = labels != -100
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[chosen], labels[chosen]))
    both = make(LongspanForPreTraining)
    order = torch.tensor([0, 1, 1])
    one, two, sum_ = (
        both(ids, mask, **given).loss
        for given in (
            dict(labels=labels),
            dict(sentence_order_label=order),
            dict(labels=labels, sentence_order_label=order),
        )
    )
    torch.testing.assert_close(one + two, sum_)
    number = make(LongspanForSequenceClassification, num_labels=1)
    target = torch.tensor([0.5, -1, 2])
    out = number(ids, mask, labels=target)
    torch.testing.assert_close(out.loss, (out.logits[:, 0] - target).square().mean())
    numbers = make(LongspanForTokenClassification, num_labels=1)
    target = torch.randn(ids.shape).masked_fill(~chosen, -100)
    out = numbers(ids, mask, labels=target)
    mean = (out.logits[..., 0] - target)[chosen].square().mean()
    torch.testing.assert_close(out.loss, mean)
    span = make(LongspanForQuestionAnswering)
    start, end = torch.tensor([-1, 4, 2]), torch.tensor([5, 9, 99])  # −1 and 99: no label
    out = span(ids, mask, start_positions=start, end_positions=end)
    first = F.cross_entropy(out.start_logits[1:], start[1:])
    last = F.cross_entropy(out.end_logits[:2], end[:2])
    torch.testing.assert_close(out.loss, (first + last) / 2)


def test_rotary_positions_are_relative():
    model = make(method="softmax", positions="rotary")
    ids, mask = zoo.batch()
    places = torch.arange(40)[None]
    with torch.no_grad():
        here, there, apart = (
            model(ids, mask, position_ids=p).last_hidden_state[0]
            for p in (places, places + 500, 3 * places)
        )
    assert relative_error(there, here) < 1e-4  # cosines of larger numbers in float32
    assert relative_error(apart, here) > 1e-2
    assert model(torch.randint(5, 99, (1, 200))).last_hidden_state.shape == (1, 200, 32)


def test_embeddings_may_be_given_instead_of_ids():
    model = make(embedding_size=16)
    ids, mask = zoo.batch()
    x = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=x, attention_mask=mask)[0], model(ids, mask)[0])
    types = torch.zeros_like(ids)
    assert torch.equal(model(ids, mask, token_type_ids=types)[0], model(ids, mask)[0])
    assert not torch.equal(model(ids, mask, token_type_ids=types + 1)[0], model(ids, mask)[0])


def test_the_vocabulary_can_grow():
    model = make(LongspanForMaskedLM, embedding_size=16)
    model.resize_token_embeddings(120)
    ids, mask = zoo.batch()
    assert model(ids, mask).logits.shape == (3, 40, 120)
    assert model.predictions.decoder.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("method", ["yoso", "nystrom", "linformer"])
def test_gradient_checkpointing_repeats_the_forward(method):
    ids, mask = zoo.batch()
    grads = []
    for checkpointing in (False, True):
        model = make(LongspanForMaskedLM, method).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        torch.manual_seed(5)
        model(ids, mask, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# torch's own: its tracer uses what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["yoso", "nystrom", "linformer"])
def test_compiles_to_one_graph_both_passes(method):
    model = make(LongspanForMaskedLM, method, norm="pre", positions="rotary")
    ids, mask = zoo.batch()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(ids, mask, labels=ids)
        out.loss.backward()
        results.append([out.logits, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", longspan.METHODS)
def test_bfloat16_stays_near_float32(method):
    model = make(LongspanForSequenceClassification, method, pooling="mean")
    ids, mask = zoo.batch()
    with torch.no_grad():
        high = model(ids, mask, output_hidden_states=True).hidden_states[1]
        out = model.to(torch.bfloat16)(ids, mask, output_hidden_states=True)
    assert out.logits.dtype == torch.bfloat16
    # One layer; eight bits of mantissa, and hash codes that turn over near zero.
    valid = mask.bool()
    limit = 0.2 if method in ("yoso", "reformer") else 0.03
    assert relative_error(out.hidden_states[1][valid], high[valid]) < limit


def test_autocast():
    model = make(LongspanForMaskedLM, "nystrom")
    ids, mask = zoo.batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, mask, labels=ids).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_eval_repeats_and_training_draws_afresh():
    model = make(method="yoso", hidden_dropout_prob=0.0)
    ids, mask = zoo.batch()
    assert torch.equal(model(ids, mask)[0], model(ids, mask)[0])
    model.train()
    assert not torch.equal(model(ids, mask)[0], model(ids, mask)[0])


def test_classifiers_and_perceptrons_are_what_is_asked():
    more = dict(classifier_size=48, classifier_act="relu", classifier_dropout=0.0)
    model = make(LongspanForSequenceClassification, hidden_dropout_prob=0.0, **more).train()
    head = model.classifier
    pooled = torch.randn(2, 32)
    assert head.dense.out_features == 48
    assert torch.equal(head(pooled), head.output(head.dense(pooled).relu()))  # nothing is dropped
    ids, mask = zoo.batch()
    assert torch.equal(model(ids, mask).logits, model(ids, mask).logits)
    model = make(hidden_dropout_prob=0.0, activation_dropout=0.5).train()
    assert not torch.equal(model(ids, mask)[0], model(ids, mask)[0])
    by_default = make(LongspanForSequenceClassification, hidden_dropout_prob=0.3).classifier
    assert (by_default.dense.out_features, by_default.dropout.p) == (32, 0.3)


def test_embeddings_start_as_large_as_asked_and_keep_what_is_loaded(tmp_path):
    model = LongspanModel(config(embedding_range=0.5, embedding_norm=False, vocab_size=2000))
    words = model.embeddings.word_embeddings.weight.detach()
    # 2000 × 32 numbers: their deviation is known to a hundredth.
    assert words[1:].std().item() == pytest.approx(0.5, rel=0.02)
    assert words[0].eq(0).all()  # padding
    assert model.layers[0].up.weight.std() < 0.05
    assert isinstance(model.embeddings.norm, torch.nn.Identity)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again.embeddings.word_embeddings.weight, words)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_act", "foo"), ("classifier_act", "foo"), ("hidden_dropout_prob", 2)],
)
def test_wrong_values_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value!r}"):
        LongspanConfig(**{name: value})


def test_wrong_configurations_and_inputs_are_refused():
    for wrong, message in (
        (dict(method="nystroem"), "method must be one of"),
        (dict(norm="middle"), "norm must be one of 'post', 'pre', got 'middle'"),
        (dict(positions="relative"), "positions must be one of 'learned', 'rotary'"),
        (dict(pooling="max"), "pooling must be one of 'first', 'mean', 'padded-mean', got 'max'"),
        (dict(num_attention_heads=5), "multiple of num_attention_heads, got 32 and 5"),
        (dict(num_attention_heads=32, positions="rotary"), "must be even"),
    ):
        with pytest.raises(ValueError, match=message):
            config(**{"method": "nystrom", **wrong})
    with pytest.raises(TypeError, match="got 'landmarks'"):
        LongspanModel(config(options={"landmarks": 3}))
    with pytest.raises(ValueError, match=r"config\.method names the method, got 'window'"):
        transformers.AutoModel.from_config(config(), attn_implementation="window")
    model = make()
    with pytest.raises(ValueError, match="input_ids must be given, or inputs_embeds"):
        model()
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(torch.arange(9)[None], output_attentions=True)
    with pytest.raises(NotImplementedError, match="every pair of tokens"):
        model(torch.arange(9)[None], torch.ones(1, 1, 9, 9))
    with pytest.raises(
        ValueError, match=r"attention_mask must have shape .* = \(1, 9\), got \(1, 8\)"
    ):
        model(torch.arange(9)[None], torch.ones(1, 8, dtype=torch.long))


@pytest.mark.parametrize("model_class", [LongspanForMaskedLM, LongspanForPreTraining])
def test_masked_positions_are_predicted_as_among_all(model_class):
    model = make(model_class)
    ids = torch.randint(5, 99, (3, 40))
    places = torch.tensor([[1, 7, 0], [39, 2, 5], [0, 4, 0]])
    labels = torch.tensor([[9, 8, -100], [7, 6, 5], [4, -100, -100]])
    everywhere = torch.full((3, 40), -100).scatter(1, places.flip(1), labels.flip(1))
    few = model(ids, labels=labels, masked_positions=places)
    all_ = model(ids, labels=everywhere)
    logits = few[1], all_[1].gather(1, places[..., None].expand(-1, -1, 99))
    assert relative_error(*logits) < 1e-5
    torch.testing.assert_close(few.loss, all_.loss)


def test_poolings():
    x, mask = torch.randn(2, 5, 3), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    x[1, 2:] = torch.nan  # what padding holds does not matter
    assert torch.equal(pool(x, mask, "first"), x[:, 0])
    mean, padded = pool(x, mask, "mean"), pool(x, mask, "padded-mean")
    torch.testing.assert_close(mean[1], x[1, :2].mean(0))
    torch.testing.assert_close(padded[0], mean[0])
    torch.testing.assert_close(padded[1], mean[1] * 2 / 5)
    torch.testing.assert_close(pool(x[:1], None, "padded-mean"), mean[:1])
    many, ones = torch.full((1, 4096, 3), 20.0).half(), torch.ones(1, 4096)
    for pooling in ("mean", "padded-mean"):  # sums that float16 has no room for
        assert (pool(many, ones, pooling) == 20).all()

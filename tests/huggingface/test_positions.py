"""`extend_positions`: a 512 model takes more, what was trained stays."""

import pytest
import torch
import zoo
from cases import relative_error

import longspan

ABSOLUTE = [
    "bert", "roberta", "xlm-roberta", "albert", "electra", "distilbert", "esm", "yoso",
    "nystromformer",
]  # fmt: skip
KEPT = {"esm": 2, "roberta": 2, "xlm-roberta": 2, "yoso": 2, "nystromformer": 2}


def make(name):
    """Room for 48 tokens; RoBERTa and ESM count the rows they keep in the same number."""
    rows = 50 if "roberta" in name or name == "esm" else 48
    absolute = {"position_embedding_type": "absolute"} if name == "esm" else {}
    return zoo.make(name, max_position_embeddings=rows, **absolute)


def position_table(model):
    return model.embeddings.position_embeddings.weight.detach()


@pytest.mark.parametrize("name", ABSOLUTE)
@pytest.mark.parametrize("how", ["tile", "interpolate"])
def test_longer_inputs_are_taken_and_short_ones_unchanged_by_tiles(name, how, tmp_path):
    model = longspan.convert(make(name), "nystrom", num_landmarks=8)
    ids, mask = zoo.batch()
    long = torch.randint(5, 99, (2, 130))
    with pytest.raises((IndexError, RuntimeError)):
        model(long)
    before, table = model(ids, attention_mask=mask).last_hidden_state, position_table(model)
    assert longspan.extend_positions(model, 130, how=how) is model
    y = model(long).last_hidden_state
    assert y.shape == (2, 130, 32)
    kept, new = KEPT.get(name, 0), position_table(model)
    assert torch.equal(new[:kept], table[:kept])
    assert new.shape == (130 + kept, table.shape[1])
    body = new[kept:]
    if how == "tile":
        assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, before)
        assert torch.equal(body, table[kept:].repeat(3, 1)[:130])
    else:
        torch.testing.assert_close(body[[0, -1]], table[kept:][[0, -1]])
        assert (body.diff(dim=0).norm() < table[kept:].diff(dim=0).norm()).item()
    model.save_pretrained(tmp_path)
    again = longspan.huggingface.load(type(model), tmp_path).eval()
    assert torch.equal(again(long).last_hidden_state, y)


def test_a_512_model_becomes_a_4096_one():
    model = longspan.convert(zoo.make("bert"), "nystrom")
    longspan.extend_positions(model, 4096)
    assert model.config.max_position_embeddings == 4096
    with torch.no_grad():
        assert model(torch.randint(5, 99, (1, 4096))).last_hidden_state.isfinite().all()


def test_padding_still_does_not_matter():
    model = longspan.convert(longspan.extend_positions(make("roberta"), 200), "yoso")
    ids, mask = zoo.batch((150, 90))
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).last_hidden_state
        alone = model(ids[1:, :90]).last_hidden_state
    assert relative_error(whole[1:, :90], alone) < 1e-5


def test_positions_stay_trainable_or_frozen_in_their_precision():
    for trainable in (True, False):
        model = make("bert").to(torch.bfloat16)
        model.embeddings.position_embeddings.requires_grad_(trainable)
        longspan.extend_positions(model, 99, how="interpolate")
        weight = model.embeddings.position_embeddings.weight
        assert weight.dtype == torch.bfloat16
        assert weight.requires_grad == trainable


def test_our_own_models():
    config = longspan.models.LongspanConfig(**zoo.SMALL, max_position_embeddings=20)
    model = longspan.models.LongspanForSequenceClassification(config)
    ids = torch.randint(5, 99, (1, 30))
    with pytest.raises(ValueError, match=r"at most max_position_embeddings = 20 tokens, got 30"):
        model(ids)
    longspan.extend_positions(model, 30)
    assert model(ids).logits.shape == (1, 2)


def test_rotary_positions_need_none_but_projections_do(tmp_path):
    config = longspan.models.LongspanConfig(
        **zoo.SMALL, max_position_embeddings=32, positions="rotary", method="linformer",
        options={"projected_length": 4},
    )  # fmt: skip
    model = longspan.extend_positions(longspan.models.LongspanModel(config), 64)
    assert model.config.max_position_embeddings == 64
    assert model.layers[0].attention.attention.key_projection.max_length == 64
    model.save_pretrained(tmp_path)
    ids = torch.arange(2, 66)[None]
    assert torch.equal(type(model).from_pretrained(tmp_path)(ids)[0], model.eval()(ids)[0])


def test_refusals():
    with pytest.raises(ValueError, match="length must be at least 48, as it is now, got 40"):
        longspan.extend_positions(make("roberta"), 40)
    with pytest.raises(ValueError, match="how must be one of 'tile', 'interpolate', got 'copy'"):
        longspan.extend_positions(make("bert"), 99, how="copy")
    for model in (zoo.make("modernbert"), zoo.vit()):
        with pytest.raises(ValueError, match=r"learned absolute positions .* got"):
            longspan.extend_positions(model, 999)


@pytest.mark.parametrize("projection", ["linear", "convolution", "mean-pool"])
@pytest.mark.parametrize("sharing", ["none", "layerwise"])
def test_linformers_projections_are_stretched(projection, sharing, tmp_path):
    torch.manual_seed(0)
    config = longspan.models.LongspanConfig(
        method="linformer",
        options={"projected_length": 8, "projection": projection, "sharing": sharing},
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        vocab_size=99, max_position_embeddings=64,
    )  # fmt: skip
    model = longspan.models.LongspanModel(config).eval()
    kept = model.layers[0].attention.attention.key_projection
    before = None if kept.weight is None else kept.weight.detach().clone()
    longspan.extend_positions(model, 256)
    if before is not None:
        # Four places do what one did, a quarter each: a constant input is projected as before.
        assert kept.weight.shape[-1] == 4 * before.shape[-1]
        torch.testing.assert_close(kept.weight.sum(-1), before.sum(-1), rtol=1e-4, atol=1e-5)
    ids = torch.randint(5, 99, (2, 256))
    y = model(ids).last_hidden_state
    model.save_pretrained(tmp_path)
    loaded = longspan.models.LongspanModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).last_hidden_state, y)


@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value", "layerwise"])
@pytest.mark.parametrize(("name", "options"), [("bert", {}), ("roberta", {"max_length": 60})])
def test_those_of_a_converted_model_too(name, options, sharing, tmp_path):
    model = make(name)
    longspan.convert(model, "linformer", projected_length=4, sharing=sharing, **options)
    longspan.extend_positions(model, 96)
    ids = torch.randint(5, 99, (2, 96))
    y = model.eval()(ids).last_hidden_state
    model.save_pretrained(tmp_path)
    loaded = longspan.huggingface.load(type(model), tmp_path).eval()
    assert torch.equal(loaded(ids).last_hidden_state, y)

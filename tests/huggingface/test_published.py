"""Published YOSO and Nyströmformer checkpoints: names, values, and the vectors they must give.

The last tests need weights: from transformers' cache, or from folders named after the checkpoints
(`yoso-4096`, `nystromformer-512`) in the folder that LONGSPAN_CHECKPOINTS names.
"""

import os
from pathlib import Path

import pytest
import torch
import transformers
import zoo
from cases import relative_error

import longspan
import longspan.huggingface as hf

HEADS = ["Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification",
         "ForQuestionAnswering"]  # fmt: skip
KINDS = {"Yoso": "yoso_expectation", "Nystromformer": "softmax"}
RESULT = {"Model": "last_hidden_state", "ForQuestionAnswering": "start_logits"}

# The configurations as published: those not named are transformers' defaults.
PUBLISHED = {
    "yoso-4096": lambda: transformers.YosoConfig(),
    "nystromformer-512": lambda: transformers.NystromformerConfig(),
    "nystromformer-1024": lambda: transformers.NystromformerConfig(max_position_embeddings=1024),
    "nystromformer-2048": lambda: transformers.NystromformerConfig(max_position_embeddings=2048),
    "nystromformer-4096": lambda: transformers.NystromformerConfig(max_position_embeddings=4096),
}


def make(kind, head="ForMaskedLM", **config):
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}{head}")
    config = {**zoo.SMALL, "num_labels": 3, **config}
    if kind == "Yoso":
        config = {"conv_window": 5, **config}
    return zoo.enlarge(model_class(getattr(transformers, f"{kind}Config")(**config))).eval()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_name_and_shape_has_its_place(name):
    """At published sizes, without the memory: on torch's meta device."""
    with torch.device("meta"):
        theirs = transformers.AutoModelForMaskedLM.from_config(PUBLISHED[name]())
        ours = longspan.models.LongspanForMaskedLM(hf.config_from(theirs.config))
    shapes = {key: value.shape for key, value in ours.state_dict().items()}
    assert {k: v.shape for k, v in hf.rename(theirs.state_dict()).items()} == shapes
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kind", KINDS)
def test_our_models_agree_with_transformers_where_it_is_right(kind, head):
    theirs = make(kind, head)
    ours = hf.from_transformers(theirs, KINDS[kind])
    assert type(ours).__name__ == f"Longspan{head}"
    ids, _ = zoo.batch()
    result = RESULT.get(head, "logits")
    with torch.no_grad():
        actual, expected = (getattr(model(ids), result) for model in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_ours_and_the_converted_are_one_with_padding_too(kind):
    theirs = make(kind, "Model")
    ours = hf.from_transformers(theirs)
    longspan.convert(theirs)
    ids, mask = zoo.batch()
    with torch.no_grad():
        actual, expected = (model(ids, attention_mask=mask)[0] for model in (ours, theirs))
        alone = ours(ids[1:2, :29])[0]
    assert relative_error(actual, expected) < 1e-6
    assert relative_error(actual[1:2, :29], alone) < 1e-5


def test_the_masked_lm_head_stays_tied_and_is_saved(tmp_path):
    ours = hf.from_transformers(make("Nystromformer"))
    assert ours.predictions.decoder.weight is ours.longspan.embeddings.word_embeddings.weight
    ids, mask = zoo.batch()
    ours.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids, mask).logits, ours(ids, mask).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_old_files_with_a_table_of_positions_load(kind, tmp_path):
    """Published files are .bin, from when that table was saved: read with `weights_only`."""
    theirs = make(kind)
    state = theirs.state_dict()
    state[f"{kind.lower()}.embeddings.position_ids"] = torch.arange(2, 14)[None]
    assert set(hf.rename(state)) == set(hf.rename(theirs.state_dict()))
    theirs.config.save_pretrained(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    ids, mask = zoo.batch()
    expected = hf.from_transformers(theirs)(ids, mask).logits
    assert torch.equal(hf.from_transformers(loaded)(ids, mask).logits, expected)


class Trap:
    """What a hostile pickle is made of: it runs a program when it is read."""

    def __init__(self, proof):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def test_code_in_a_pickle_is_never_run(tmp_path):
    make("Yoso").config.save_pretrained(tmp_path)
    torch.save({"trap": Trap(tmp_path / "sprung")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|weights only|unsupported|unpickl"):
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    longspan.convert(zoo.make("bert"), "nystrom").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        hf.load(transformers.BertModel, tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"model must be a YOSO or Nyströmformer.* got BertModel"):
        hf.from_transformers(zoo.make("bert"))


def at_hand(name):
    """A published checkpoint, if its weights are on this machine; otherwise a skip that says so."""
    folder = Path(os.environ.get("LONGSPAN_CHECKPOINTS", "")) / name
    place = str(folder) if (folder / "config.json").exists() else f"uw-madison/{name}"
    try:
        return transformers.AutoModel.from_pretrained(place, local_files_only=True).eval()
    except OSError:
        pytest.skip(
            f"the weights of uw-madison/{name} are neither in transformers' cache nor in the "
            "folder LONGSPAN_CHECKPOINTS"
        )


VECTORS = {
    "yoso-4096": ("yoso_expectation", [-0.0611, 0.1242, 0.0840]),
    "nystromformer-512": ("nystrom", [-0.4532, -0.0936, 0.5137]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTORS)
def test_published_weights_give_the_published_vectors(name):
    method, vector = VECTORS[name]
    model = at_hand(name)
    ids = torch.arange(6)[None]
    with torch.no_grad():
        ours = hf.from_transformers(model, method)
        for candidate in (ours, longspan.convert(model, method)):
            actual = candidate(ids).last_hidden_state[0, 0, :3]
            torch.testing.assert_close(actual, torch.tensor(vector), rtol=0, atol=1e-4)

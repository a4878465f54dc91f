"""Methods as attention backends: chosen by name, masks never lost, nothing ignored."""

import pytest
import torch
import transformers
import zoo
from cases import relative_error
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)
from transformers.masking_utils import create_bidirectional_sliding_window_mask as create_sliding

import longspan
from longspan.huggingface import backend

PLAIN = [method for method in longspan.METHODS if method != "linformer"]
LENGTHS = (40, 29, 7)


def states(model, ids, mask=None, **kwargs):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **kwargs).last_hidden_state


@pytest.mark.parametrize("method", PLAIN)
def test_chosen_when_loading_or_later(method, tmp_path):
    """`from_pretrained(..., attn_implementation=)` and `set_attn_implementation` are the method."""
    model = zoo.make("bert")
    model.save_pretrained(tmp_path)
    ids, mask = zoo.batch()
    loaded = transformers.BertModel.from_pretrained(tmp_path, attn_implementation=method).eval()
    model.set_attn_implementation(method)
    assert torch.equal(states(loaded, ids, mask), states(model, ids, mask))
    attention = model.encoder.layer[0].attention.self
    x = torch.randn(1, 40, 32)
    q, k, v = (
        f(x).unflatten(2, (4, 8)).transpose(1, 2)
        for f in (attention.query, attention.key, attention.value)
    )
    expected = longspan.METHODS[method].module(4).eval()(q, k, v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(x)[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", zoo.ENCODERS)
def test_softmax_is_transformers_own_attention(name):
    """The same mask, the same sliding windows, grouped heads and scale as SDPA, on every model."""
    model = zoo.make(name)
    ids, mask = zoo.batch()
    expected = states(model, ids, mask)
    model.set_attn_implementation("softmax")
    actual = states(model, ids, mask)
    for i, n in enumerate(LENGTHS):
        assert relative_error(actual[i, :n], expected[i, :n]) < 1e-6


def test_sliding_windows_are_kept_without_padding_too():
    model = zoo.make("modernbert")
    ids, _ = zoo.batch()
    expected = states(model, ids)
    everywhere = zoo.make("modernbert", layer_types=["full_attention"] * 4)
    assert relative_error(states(everywhere, ids), expected) > 1e-2
    model.set_attn_implementation("softmax")
    assert relative_error(states(model, ids), expected) < 1e-6


def test_a_scale_of_its_own_is_honoured():
    model = zoo.make("bert")
    ids, mask = zoo.batch()
    for layer in model.encoder.layer:
        layer.attention.self.scaling = 0.9
    expected = states(model, ids, mask)
    model.set_attn_implementation("softmax")
    assert relative_error(states(model, ids, mask)[0], expected[0]) < 1e-6


def test_eval_repeats_and_training_draws_afresh():
    model = zoo.make("bert", attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model.set_attn_implementation("reformer")
    ids, mask = zoo.batch((200, 150))  # longer than its buckets
    assert torch.equal(states(model, ids, mask), states(model, ids, mask))
    model.train()
    assert not torch.equal(states(model, ids, mask), states(model, ids, mask))


class NoHostRead(TorchDispatchMode):
    """Fails on anything that makes the host wait for a value on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.name() not in ("aten::_local_scalar_dense", "aten::is_nonzero"), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
@pytest.mark.parametrize("method", ["softmax", "nystrom", "yoso", "window"])
def test_nothing_is_read_back_from_the_device(name, method):
    model = zoo.make(name)
    model.set_attn_implementation(method)
    ids, mask = zoo.batch()
    with NoHostRead():
        states(model, ids, mask)


def test_the_host_read_detector_sees_one():
    with pytest.raises(AssertionError), NoHostRead():
        bool(torch.ones(2).all())


@pytest.mark.parametrize("reach", [None, 8], ids=["full", "sliding"])
def test_masks_are_linear_in_the_length(reach):
    """What every layer gets holds at most one boolean a token, at 100,000 tokens."""
    n = 100_000
    config = transformers.ModernBertConfig(local_attention=16, attn_implementation="nystrom")
    create = create_bidirectional_mask if reach is None else create_sliding
    x = torch.empty(2, n, 1)
    for given in (None, torch.ones(2, n, dtype=torch.long)):
        mask = create(config=config, inputs_embeds=x, attention_mask=given)
        if mask is None:
            assert given is None
            assert reach is None
            continue
        assert mask.untyped_storage().nbytes() <= 2 * n
        visible, found = backend.read(mask)
        assert visible.shape == (2, n)
        assert visible.dtype == torch.bool
        assert found == reach


@pytest.mark.parametrize("create", [create_causal_mask, create_sliding_window_causal_mask])
def test_causal_masks_are_refused(create):
    config = transformers.BertConfig(attn_implementation="nystrom")
    config.sliding_window = 4
    with pytest.raises(NotImplementedError, match="both directions"):
        create(
            config=config, inputs_embeds=torch.empty(1, 9, 1), attention_mask=None,
            past_key_values=None,
        )  # fmt: skip


@pytest.mark.parametrize("create", [create_bidirectional_mask, create_sliding])
@pytest.mark.parametrize("overlay", ["and_mask_function", "or_mask_function"])
def test_mask_patterns_of_a_models_own_are_refused(create, overlay):
    config = transformers.ModernBertConfig(attn_implementation="nystrom")
    with pytest.raises(NotImplementedError, match="one of its own"):
        create(
            config=config, inputs_embeds=torch.empty(1, 9, 1), attention_mask=None,
            **{overlay: lambda b, h, q, k: q >= k},
        )  # fmt: skip


def call(method="nystrom", attention_mask=None, module=None, **kwargs):
    module = torch.nn.Identity().eval() if module is None else module
    x = torch.randn(1, 2, 9, 8)
    return backend.attend(method, module, x, x, x, attention_mask, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(is_causal=True), "is_causal cannot be honoured by nystrom"),
        (dict(output_attentions=True), "output_attentions cannot be honoured by nystrom"),
        (dict(dropout=0.1), "dropout of attention weights cannot be honoured by nystrom"),
        (dict(position_bias=torch.zeros(1)), "position_bias cannot be honoured"),
        (dict(softcap=50.0), "softcap cannot be honoured"),
        (dict(cu_seq_lens_q=torch.tensor([0, 9])), "packed sequences"),
        (dict(attention_mask=torch.ones(1, 1, 9, 9)), "every pair of tokens"),
        (dict(attention_mask=torch.ones(1, 9, 9)), "every pair of tokens"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_what_cannot_be_honoured_is_refused(kwargs, message):
    with pytest.raises(NotImplementedError, match=message):
        call(**kwargs)


def test_causal_modules_are_refused_unless_the_call_says_otherwise():
    module = torch.nn.Identity()
    module.is_causal = True
    with pytest.raises(NotImplementedError, match="is_causal"):
        call(module=module)
    call(module=module, is_causal=False)


def test_causal_models_are_refused():
    config = transformers.LlamaConfig(
        **zoo.SMALL, num_key_value_heads=4, attn_implementation="nystrom"
    )
    model = transformers.LlamaModel(config)
    with pytest.raises(NotImplementedError, match="both directions"):
        model(torch.arange(9)[None])


def test_output_attentions_is_refused_by_models():
    model = zoo.make("bert")
    model.set_attn_implementation("nystrom")
    with pytest.raises(NotImplementedError, match="output_attentions"):
        model(torch.arange(9)[None], output_attentions=True)


def test_attention_dropout_is_refused_in_training_and_off_after_convert():
    model = zoo.make("bert").train()
    model.set_attn_implementation("nystrom")
    ids, mask = zoo.batch()
    with pytest.raises(NotImplementedError, match=r"to 0, or use longspan\.convert"):
        model(ids, attention_mask=mask)
    longspan.convert(model, "nystrom")(ids, attention_mask=mask)


@pytest.mark.parametrize("shape", [(1, 9, 9), (1, 1, 9, 9)], ids=["three", "four"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "yoso", "nystromformer"])
def test_masks_for_pairs_of_tokens_are_refused_by_models(name, shape):
    model = longspan.convert(zoo.make(name), "nystrom")
    with pytest.raises(NotImplementedError, match="every pair of tokens"):
        model(torch.arange(9)[None], attention_mask=torch.ones(shape, dtype=torch.bool))


def test_methods_with_learned_parts_say_how_to_get_them():
    model = zoo.make("bert")
    model.set_attn_implementation("linformer")
    with pytest.raises(ValueError, match=r"longspan\.convert\(model, 'linformer'\)"):
        model(torch.arange(9)[None])


@pytest.mark.parametrize(
    "form",
    [
        lambda m: m,
        lambda m: m.long(),
        lambda m: m.float(),
        lambda m: m[:, None, None],
        lambda m: torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min)[
            :, None, None
        ],
        lambda m: torch.zeros(m.shape).masked_fill(~m, -torch.inf)[:, None, None],
    ],
    ids=["boolean", "integer", "float", "four-dimensional", "additive", "additive-infinite"],
)
def test_every_form_of_a_padding_mask_is_read(form):
    mask = torch.tensor([[True, True, False]])
    visible, reach = backend.read(form(mask))
    assert torch.equal(visible, mask)
    assert reach is None


@pytest.mark.parametrize(
    "wrong",
    [torch.tensor([[0.0, -1e30]]), torch.tensor([[[[0.0, 1.0]]]])],
    ids=["flat", "additive"],
)
def test_other_numbers_in_a_mask_are_refused(wrong):
    with pytest.raises(RuntimeError, match="attention_mask must hold 0 or"):
        backend.read(wrong)

"""MultiheadAttention as a drop-in for torch's."""

import copy

import pytest
import torch
from torch import nn

import longspan
from longspan import METHODS, MultiheadAttention

X, CONTEXT = torch.randn(2, 30, 24), torch.randn(2, 40, 24)
PADDING = torch.arange(40) >= torch.tensor([[40], [25]])


def options(method):
    return {"max_length": 40, "projected_length": 9} if method == "linformer" else {}


def pair(**arguments):
    """torch's module and ours with softmax inside, the weights of the one loaded into the other."""
    theirs = nn.MultiheadAttention(24, 3, **arguments)
    ours = MultiheadAttention(24, 3, method="softmax", **arguments)
    nn.init.normal_(theirs.out_proj.bias)
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cross", [True, False], ids=["cross", "self"])
def test_softmax_inside_equals_torch(batch_first, bias, cross):
    if bias:
        theirs, ours = pair(batch_first=batch_first)
    else:
        theirs = nn.MultiheadAttention(24, 3, bias=False, batch_first=batch_first)
        ours = MultiheadAttention(24, 3, method="softmax", bias=False, batch_first=batch_first)
        ours.load_state_dict(theirs.state_dict())
    order = (lambda x: x) if batch_first else (lambda x: x.transpose(0, 1))
    query, key = order(X), order(CONTEXT if cross else X)
    padding = PADDING[:, : key.shape[1 if batch_first else 0]]
    for mask in (None, padding):
        expected, _ = theirs(query, key, key, key_padding_mask=mask, need_weights=False)
        actual, weights = ours(query, key, key, key_padding_mask=mask)
        assert weights is None
        torch.testing.assert_close(actual, expected)


def test_other_widths_of_keys_and_values():
    theirs, ours = pair(kdim=10, vdim=7, batch_first=True)
    key, value = torch.randn(2, 40, 10), torch.randn(2, 40, 7)
    expected, _ = theirs(X, key, value, key_padding_mask=PADDING, need_weights=False)
    torch.testing.assert_close(ours(X, key, value, key_padding_mask=PADDING)[0], expected)


def test_without_a_batch():
    theirs, ours = pair()
    expected, _ = theirs(
        X[0], CONTEXT[1], CONTEXT[1], key_padding_mask=PADDING[1], need_weights=False
    )
    actual, _ = ours(X[0], CONTEXT[1], CONTEXT[1], key_padding_mask=PADDING[1])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_torchs_weights_and_trains(method):
    theirs = nn.MultiheadAttention(24, 3, batch_first=True)
    ours = MultiheadAttention(24, 3, method=method, batch_first=True, **options(method))
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not missing.unexpected_keys
    assert all(key.startswith("attention.") for key in missing.missing_keys)
    y, _ = ours(X, X, X, key_padding_mask=PADDING[:, :30])
    assert y.shape == X.shape
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())
    again = copy.deepcopy(ours).eval()
    assert torch.equal(again(X, X, X)[0], ours.eval()(X, X, X)[0])


@pytest.mark.parametrize("method", METHODS)
def test_the_convolution_is_added_to_every_head(method):
    with_conv = MultiheadAttention(24, 3, method, 5, batch_first=True, **options(method)).eval()
    assert with_conv.attention.conv.weight.shape == (3, 1, 5, 1)
    plain = MultiheadAttention(24, 3, method, batch_first=True, **options(method)).eval()
    plain.load_state_dict(with_conv.state_dict(), strict=False)
    mask = PADDING[:, 5:35]
    poisoned = X.masked_fill(mask[..., None], torch.nan)
    value = nn.functional.linear(X, with_conv.in_proj_weight[48:], with_conv.in_proj_bias[48:])
    value = value.masked_fill(mask[..., None], 0).unflatten(2, (3, 8))
    padded = nn.functional.pad(value, (0, 0, 0, 0, 2, 2))
    filters = with_conv.attention.conv.weight[:, 0, :, 0]  # (heads, 5)
    extra = sum(padded[:, i : i + 30] * filters[:, i, None] for i in range(5)).flatten(2)
    expected = plain(X, X, X, key_padding_mask=mask)[0] + extra @ with_conv.out_proj.weight.T
    actual = with_conv(X, poisoned, poisoned, key_padding_mask=mask)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_encoder_layers_of_torch_call_it_in_both_modes(method):
    """In eval mode torch's layer has a shortcut that would compute softmax from our weights."""
    # Four heads: torch takes the shortcut for even numbers alone.
    layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0, batch_first=True, norm_first=True)
    layer.self_attn = MultiheadAttention(24, 4, method, batch_first=True, **options(method))
    layer.eval()
    mask = PADDING[:, 5:35]
    with torch.inference_mode():
        actual = layer(X, src_key_padding_mask=mask)
        h = layer.norm1(X)
        h = X + layer.self_attn(h, h, h, key_padding_mask=mask)[0]
        expected = h + layer.linear2(layer.linear1(layer.norm2(h)).relu())
    torch.testing.assert_close(actual, expected)


def test_what_cannot_be_honoured_is_refused():
    mha = MultiheadAttention(24, 3, "nystrom", batch_first=True)
    with pytest.raises(NotImplementedError, match="is_causal cannot be honoured by nystrom"):
        mha(X, X, X, is_causal=True)
    with pytest.raises(NotImplementedError, match="need_weights cannot be honoured by nystrom"):
        mha(X, X, X, need_weights=True)
    with pytest.raises(NotImplementedError, match="attn_mask cannot be honoured by nystrom"):
        mha(X, X, X, attn_mask=torch.zeros(30, 30))
    with pytest.raises(NotImplementedError, match="dropout of attention weights"):
        MultiheadAttention(24, 3, dropout=0.1)
    with pytest.raises(ValueError, match="embed_dim must be a multiple of num_heads, got 24 and 5"):
        MultiheadAttention(24, 5)
    with pytest.raises(ValueError, match=r"key must have shape .*, got \(2, 40, 23\)"):
        mha(X, CONTEXT[..., :23], CONTEXT)
    with pytest.raises(RuntimeError, match="key_padding_mask must hold 0 or -inf"):
        mha(X, X, X, key_padding_mask=torch.full((2, 30), 0.5))
    with pytest.raises(TypeError, match="key_padding_mask must be boolean or floating point"):
        mha(X, X, X, key_padding_mask=torch.ones(2, 30, dtype=torch.long))
    for shape in ((2, 29), (1, 30)):
        with pytest.raises(ValueError, match=r"key_padding_mask must have the shape \(2, 30\)"):
            mha(X, X, X, key_padding_mask=torch.zeros(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"key_padding_mask must be a torch\.Tensor or None"):
        mha(X, X, X, key_padding_mask=[True])
    with pytest.raises(ValueError, match=r"value must have the batch size and length of key \(2"):
        mha(X, X, X[:, :20])
    with pytest.raises(ValueError, match=r"key must have the batch size of query \(2\), got 1"):
        mha(X, X[:1], X[:1])
    with pytest.raises(ValueError, match="did you mean 'yoso'"):
        MultiheadAttention(24, 3, method="yosso")


def test_projections_start_afresh():
    for widths in ({}, {"kdim": 12}):
        mha = MultiheadAttention(24, 3, method="softmax", **widths)
        before = mha._linears()[0][0].clone()
        mha._reset_parameters()
        assert not torch.equal(mha._linears()[0][0], before)


def test_dtype_and_device_arguments():
    mha = MultiheadAttention(24, 3, "linformer", 3, dtype=torch.float64, max_length=30)
    assert {p.dtype for p in mha.parameters()} == {torch.float64}
    on_meta = longspan.MultiheadAttention(24, 3, "linformer", device="meta", max_length=30)
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}

"""Bad input gets one clear sentence: the argument, the rule, the value."""

import pytest
import torch
from cases import qkv

import longspan

Q, K, V = qkv()
MASK = torch.ones(2, 50, dtype=torch.bool)


def call(method="yoso", q=Q, k=K, v=V, **options):
    return lambda: longspan.attention(q, k, v, method, **options)


BAD = {
    "not-a-tensor": (call(q=[1.0]), TypeError, "q must be a torch.Tensor, got list"),
    "rank": (call(q=Q[0]), ValueError, "q must have shape (B, H, N, D), got (3, 50, 16)"),
    "integers": (
        call(v=V.long()),
        TypeError,
        "v must have a floating-point dtype, got torch.int64",
    ),
    "heads": (
        call(k=K[:, :2]),
        ValueError,
        "k must have the batch size and heads of q (2, 3, 50, 16), got (2, 2, 50, 16)",
    ),
    "batch": (
        call(v=V[:1]),
        ValueError,
        "v must have the batch size and heads of q (2, 3, 50, 16), got (1, 3, 50, 16)",
    ),
    "channels": (call(k=K[..., :8]), ValueError, "k must have the head dimension of q (16), got 8"),
    "length": (call(v=V[:, :, :9]), ValueError, "v must have the length of k (50), got 9"),
    "no-tokens": (
        call(q=Q[:, :, :0]),
        ValueError,
        "q must have at least one head, token and channel, got (2, 3, 0, 16)",
    ),
    "mixed-dtypes": (
        call(k=K.double()),
        TypeError,
        "k must have the dtype of q (torch.float32), got torch.float64",
    ),
    "mask-shape": (
        call(key_mask=MASK[:, :9]),
        ValueError,
        "key_mask must have shape (B, Nk) = (2, 50), got (2, 9)",
    ),
    "mask-dtype": (
        call(key_mask=MASK.float()),
        TypeError,
        "key_mask must be boolean (true = attend), got torch.float32",
    ),
    "mask-list": (
        call(key_mask=[True]),
        TypeError,
        "key_mask must be a torch.Tensor or None, got list",
    ),
    "no-bits": (
        call(hash_bits=0),
        ValueError,
        "hash_bits must be an integer from 1 to 16, got 0",
    ),
    "many-bits": (
        call(hash_bits=40),
        ValueError,
        "hash_bits must be an integer from 1 to 16, got 40",
    ),
    "half-bits": (
        call(hash_bits=8.5),
        TypeError,
        "hash_bits must be an integer from 1 to 16, got 8.5",
    ),
    "no-hashes": (
        call(num_hashes=0),
        ValueError,
        "num_hashes must be an integer of at least 1, got 0",
    ),
    "hashing": (
        call(hashing="hadamar"),
        ValueError,
        "hashing must be one of 'gaussian', 'hadamard', got 'hadamar' (did you mean 'hadamard'?)",
    ),
    "normalize": (
        call(normalize="no"),
        TypeError,
        "normalize must be true or false, got 'no'",
    ),
    "gradient": (
        call(gradient="exact"),
        ValueError,
        "gradient must be one of 'surrogate', 'true', got 'exact'",
    ),
    "seed": (
        call(seed=-1),
        ValueError,
        "seed must be an integer from 0 to 9223372036854775807, got -1",
    ),
    "seed-tensor": (
        call(seed=torch.ones(2)),
        TypeError,
        "seed must be a 0-d int64 tensor, got (2,) torch.float32",
    ),
    "impl": (
        call(impl="triton"),
        ValueError,
        "impl must be one of 'auto', 'fused', 'reference', got 'triton'",
    ),
    "method": (
        call("nystorm"),
        ValueError,
        "method must be one of 'softmax', 'window', 'strided', 'reformer', 'yoso', "
        "'yoso_expectation', 'nystrom', 'linformer', got 'nystorm' (did you mean 'nystrom'?)",
    ),
    "option": (
        call("nystrom", num_landmark=3),
        TypeError,
        "options of nystrom must be among num_landmarks, num_iterations, init, scale, impl, "
        "got 'num_landmark' (did you mean 'num_landmarks'?)",
    ),
    "landmarks": (
        call("nystrom", num_landmarks=0),
        ValueError,
        "num_landmarks must be an integer of at least 1, got 0",
    ),
    "init": (
        call("nystrom", init="orignal"),
        ValueError,
        "init must be one of 'exact', 'original', got 'orignal' (did you mean 'original'?)",
    ),
    "scale": (
        call("softmax", scale="1"),
        TypeError,
        "scale must be a number or None, got '1'",
    ),
    "window": (
        call("window", window=-1),
        ValueError,
        "window must be an integer of at least 0, got -1",
    ),
    "stride": (
        call("strided", stride=0),
        ValueError,
        "stride must be an integer of at least 1, got 0",
    ),
    "bucket-size": (
        call("reformer", bucket_size=True),
        TypeError,
        "bucket_size must be an integer of at least 1, got True",
    ),
    "projection-missing": (
        call("linformer"),
        TypeError,
        "key_projection and value_projection must be given for linformer, got neither; "
        "longspan.LinformerAttention has its own, and learns them",
    ),
    "projection-shape": (
        call("linformer", key_projection=torch.ones(4, 9), value_projection=torch.ones(4, 50)),
        ValueError,
        "key_projection must have shape (k, 50) or (3, k, 50), got (4, 9)",
    ),
    "projection-lengths": (
        call("linformer", key_projection=torch.ones(4, 50), value_projection=torch.ones(5, 50)),
        ValueError,
        "value_projection must project to the length of key_projection (4), got 5",
    ),
    "causal": (
        call("nystrom", is_causal=True),
        NotImplementedError,
        "is_causal cannot be honoured by nystrom: landmarks are means over segments, so they mix "
        "later tokens into earlier ones",
    ),
    "module-heads": (
        lambda: longspan.YosoAttention(4)(Q, K, V),
        ValueError,
        "q must have num_heads = 4 heads, got 3",
    ),
    "conv-even": (
        lambda: longspan.NystromAttention(3, conv_kernel=4),
        ValueError,
        "conv_kernel must be odd, got 4",
    ),
    "conv-cross": (
        lambda: longspan.NystromAttention(3, conv_kernel=3)(Q[:, :, :9], K, V),
        ValueError,
        "q must be as long as k with conv_kernel, which adds each value to its own place, "
        "got 9 and 50",
    ),
    "module-option": (
        lambda: longspan.YosoAttention(3, num_hash=2),
        TypeError,
        "options of YosoAttention must be among num_hashes, hash_bits, hashing, gradient, "
        "backward_hashes, normalize, seed, impl, exact_below, conv_kernel, got 'num_hash' "
        "(did you mean 'num_hashes'?)",
    ),
    "exact-below-negative": (
        lambda: longspan.YosoAttention(3, exact_below=-1),
        ValueError,
        "exact_below must be an integer of at least 0, got -1",
    ),
    "exact-below-float": (
        lambda: longspan.YosoAttention(3, exact_below=2e3),
        TypeError,
        "exact_below must be an integer of at least 0, got 2000.0",
    ),
    "exact-below-boolean": (
        lambda: longspan.MultiheadAttention(6, 3, exact_below=True),
        TypeError,
        "exact_below must be an integer of at least 0, got True",
    ),
}


@pytest.mark.parametrize(("bad", "error", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input(bad, error, sentence):
    with pytest.raises(error) as caught:
        bad()
    assert str(caught.value) == sentence
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


@pytest.mark.parametrize("method", longspan.METHODS)
def test_every_method_says_why_it_is_not_causal(method):
    with pytest.raises(NotImplementedError, match=f"is_causal cannot be honoured by {method}: "):
        longspan.attention(Q, K, V, method, is_causal=True)


FUSABLE = [name for name, row in longspan.METHODS.items() if row.why_not_fused]


@pytest.mark.parametrize("method", FUSABLE)
def test_fused_runs_or_says_why_not(method):
    """An explicit request never falls back silently."""
    from cases import function

    attend = function(method, "fused", keys=50)
    reasons = longspan.METHODS[method].why_not_fused(torch.device("cpu"))
    if not reasons:
        assert attend(Q, K, V).shape == V.shape
        return
    with pytest.raises(NotImplementedError) as caught:
        attend(Q, K, V)
    assert str(caught.value) == f"impl='fused' cannot run: {'; '.join(reasons)}"
    assert torch.equal(
        function(method, "auto", keys=50)(Q, K, V), function(method, keys=50)(Q, K, V)
    )


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match=r"k must be on the device of q \(cuda:0\), got cpu"):
        longspan.yoso(Q.cuda(), K, V)
    with pytest.raises(
        ValueError, match=r"key_mask must be on the device of k \(cuda:0\), got cpu"
    ):
        longspan.yoso(Q.cuda(), K.cuda(), V.cuda(), key_mask=MASK)

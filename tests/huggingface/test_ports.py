"""transformers' own YOSO and Nyströmformer: their defects shown there, and absent after `convert`.

A defect that transformers repairs turns its test red: then it goes from here.
"""

import pytest
import torch
import transformers
import zoo
from cases import relative_error
from transformers.models.yoso import modeling_yoso

import longspan

LENGTHS = (40, 29, 7)


def states(model, ids, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask).last_hidden_state


def padding_error(model, ids, mask):
    whole = states(model, ids, mask)
    return max(
        relative_error(whole[i : i + 1, :n], states(model, ids[i : i + 1, :n]))
        for i, n in enumerate(LENGTHS)
    )


@pytest.mark.parametrize("conv", [None, 5], ids=["plain", "convolution"])
def test_yoso_expectation_agrees_with_transformers_where_nothing_is_padded(conv):
    model = zoo.make("yoso", conv_window=conv)
    ids, _ = zoo.batch()
    expected = states(model, ids)
    longspan.convert(model, "yoso_expectation")
    assert model.encoder.layer[0].attention.self.longspan.options == {"hash_bits": 9}
    torch.testing.assert_close(states(model, ids), expected, rtol=0, atol=1e-4)
    assert relative_error(states(model, ids), expected) < 1e-5


def test_yoso_gradients_agree_with_transformers():
    """Both take the paper's surrogate for the derivative of the expectation."""
    ids, _ = zoo.batch()
    grads = []
    for convert in (False, True):
        model = zoo.make("yoso", hash_code_len=5)
        if convert:
            longspan.convert(model, "yoso_expectation")
        model(ids).last_hidden_state[..., :3].square().sum().backward()
        grads.append({k: p.grad for k, p in model.encoder.named_parameters()})
    for key, expected in grads[0].items():
        if "key.bias" not in key:  # a few ulps around nothing
            assert relative_error(grads[1][key], expected) < 1e-4, key


def test_own_method_is_the_configurations_linear_one():
    config = dict(hash_code_len=5, num_hash=7)
    model = longspan.convert(zoo.make("yoso", **config))
    attention = model.encoder.layer[0].attention.self.longspan
    assert isinstance(attention, longspan.YosoAttention)
    assert attention.options == {"num_hashes": 7, "hash_bits": 5, "hashing": "hadamard"}
    model = longspan.convert(zoo.make("yoso", use_fast_hash=False))
    assert model.encoder.layer[0].attention.self.longspan.options["hashing"] == "gaussian"
    model = longspan.convert(zoo.make("nystromformer", num_landmarks=7))
    attention = model.encoder.layer[0].attention.self.longspan
    assert isinstance(attention, longspan.NystromAttention)
    assert attention.options == {"num_landmarks": 7}


def test_many_hashes_of_the_own_method_tend_to_the_expectation():
    ids, mask = zoo.batch()

    def converted(method, **options):
        return states(longspan.convert(zoo.make("yoso"), method, hash_bits=4, **options), ids, mask)

    expected = converted("yoso_expectation")
    # Hyperplanes make an unbiased sampler, so the error falls as 1/√m.
    few, many = (
        relative_error(
            converted("yoso", num_hashes=m, hashing="gaussian", exact_below=0), expected
        )
        for m in (16, 1024)
    )  # fmt: skip
    assert 4 < few / many < 16  # 8 in the mean


def test_nystrom_agrees_with_transformers_exact_branch():
    """As downloaded, checkpoints have as many landmarks as `segment_means_seq_len`: softmax."""
    model = zoo.make("nystromformer", num_landmarks=8, segment_means_seq_len=8)
    ids, _ = zoo.batch()
    expected = states(model, ids)
    longspan.convert(model, "softmax")
    torch.testing.assert_close(states(model, ids), expected, rtol=0, atol=1e-4)
    assert relative_error(states(model, ids), expected) < 1e-5


def test_nystrom_agrees_with_transformers_landmarks():
    model = zoo.make("nystromformer", num_landmarks=8, segment_means_seq_len=40)
    ids, _ = zoo.batch()
    expected = states(model, ids)
    longspan.convert(model, init="original")
    torch.testing.assert_close(states(model, ids), expected, rtol=0, atol=1e-4)
    assert relative_error(states(model, ids), expected) < 1e-5


@pytest.mark.parametrize("name", zoo.PORTS)
@pytest.mark.parametrize("method", [None, *longspan.METHODS])
def test_state_dicts_are_those_of_transformers_both_ways(name, method):
    config = {"conv_window": 5} if name == "yoso" else {}
    original = zoo.make(name, **config)
    options = {"max_length": 64} if method == "linformer" else {}
    converted = longspan.convert(zoo.make(name, seed=1, **config), method, **options)
    learned = {key for key in converted.state_dict() if ".longspan." in key}
    assert set(converted.state_dict()) - learned == set(original.state_dict())
    assert bool(learned) == (method == "linformer")
    missing, unexpected = converted.load_state_dict(original.state_dict(), strict=False)
    assert set(missing) == learned
    assert not unexpected
    zoo.make(name, seed=2, **config).load_state_dict(
        {k: v for k, v in converted.state_dict().items() if k not in learned}
    )


@pytest.mark.parametrize("name", zoo.PORTS)
def test_output_attentions_is_refused(name):
    with pytest.raises(NotImplementedError, match="output_attentions"):
        longspan.convert(zoo.make(name))(torch.arange(9)[None], output_attentions=True)


def test_a_backend_for_nystromformer_is_refused_instead_of_added_to_its_scores():
    model = zoo.make("nystromformer", attn_implementation="nystrom")
    ids, mask = zoo.batch((40,))
    with pytest.raises(ValueError, match=r"longspan\.convert\(model\) gives it another"):
        states(model, ids, mask)
    assert states(longspan.convert(model), ids, mask).isfinite().all()


# What follows is wrong in transformers, and right here.


def test_transformers_yoso_ignores_padding():
    model = zoo.make("yoso")
    ids, mask = zoo.batch()
    assert torch.equal(states(model, ids, mask), states(model, ids))
    assert padding_error(model, ids, mask) > 1e-2
    assert padding_error(longspan.convert(model), ids, mask) < 1e-5


def test_transformers_yoso_gives_queries_the_codes_of_keys():
    q, k = torch.randn(1, 50, 8), torch.randn(1, 50, 8)
    query_codes, key_codes = modeling_yoso.hashing(q, k, 4, 6)
    assert torch.equal(query_codes, key_codes)
    from longspan.attention.yoso.hashing import hash_codes, projections

    planes = projections("gaussian", 0, 1, 8, 4, 6, q.device)
    assert not torch.equal(hash_codes(q[None], planes), hash_codes(k[None], planes))


def test_transformers_yoso_can_return_nan():
    """The cosine of a vector with itself rounds to more than 1, where arccos is NaN."""
    big = {**zoo.SMALL, "hidden_size": 128, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = transformers.YosoModel(transformers.YosoConfig(**big)).eval()
    for layer in model.encoder.layer:
        layer.attention.self.key.load_state_dict(layer.attention.self.query.state_dict())
    ids, _ = zoo.batch()
    assert states(model, ids).isnan().any()
    for method in (None, "yoso_expectation"):
        assert states(longspan.convert(model, method), ids).isfinite().all()


def test_transformers_yoso_has_no_linear_path_without_its_kernels():
    ids, mask = zoo.batch()
    model = zoo.make("yoso", use_expectation=False)
    with pytest.raises(AttributeError):  # of the kernels' module, which is None
        states(model, ids, mask)
    assert states(longspan.convert(model), ids, mask).isfinite().all()


def test_transformers_nystrom_fails_on_padded_batches():
    model = zoo.make("nystromformer", num_landmarks=8, segment_means_seq_len=40)
    ids, mask = zoo.batch()
    with pytest.raises(RuntimeError, match="must match the size"):
        states(model, ids, mask)
    assert padding_error(longspan.convert(model), ids, mask) < 1e-5


def test_transformers_nystrom_wants_one_length():
    model = zoo.make("nystromformer", num_landmarks=8, segment_means_seq_len=40)
    ids = torch.arange(5, 42)[None]  # 37 tokens
    with pytest.raises(RuntimeError, match="shape"):
        states(model, ids)
    assert states(longspan.convert(model), ids).shape == (1, 37, 32)


def test_transformers_nystrom_lets_the_convolution_see_padding():
    """In its exact branch, which takes padded batches."""
    model = zoo.make("nystromformer", num_landmarks=8, segment_means_seq_len=8)
    ids, mask = zoo.batch()
    assert padding_error(model, ids, mask) > 1e-3
    assert padding_error(longspan.convert(model, "softmax"), ids, mask) < 1e-5


def test_transformers_nystrom_cannot_start_the_inverse_exactly():
    with pytest.raises(TypeError):
        zoo.make("nystromformer", inv_coeff_init_option=True)
    assert longspan.convert(zoo.make("nystromformer"), init="exact") is not None


def test_transformers_nystrom_runs_exact_attention_as_downloaded():
    """64 landmarks of 64 tokens at 130 tokens: softmax, to the last bits."""
    model = zoo.make("nystromformer")
    ids = torch.randint(5, 99, (1, 130))
    downloaded = states(model, ids)
    assert relative_error(states(longspan.convert(model, "softmax"), ids), downloaded) < 1e-5
    assert relative_error(states(longspan.convert(model), ids), downloaded) > 1e-4

"""`longspan.convert`: every encoder, every method, padded equals alone, saved and loaded."""

import subprocess
import sys

import pytest
import torch
import transformers
import zoo
from cases import relative_error
from safetensors.torch import load_file

import longspan
import longspan.huggingface as hf

# Options at which nothing degenerates to exact attention at 40 tokens.
OPTIONS = {
    "window": {"window": 5},
    "strided": {"stride": 6},
    "reformer": {"bucket_size": 8},
    "yoso": {"num_hashes": 8, "hash_bits": 4, "exact_below": 0},
    "yoso_expectation": {"hash_bits": 4},
    "nystrom": {"num_landmarks": 6},
    "linformer": {"max_length": 64, "projected_length": 8},
}
LENGTHS = (40, 29, 7)


def states(model, ids, mask=None):
    return model(ids, attention_mask=mask).last_hidden_state


@torch.no_grad()
def padding_error(model, ids, mask):
    """How far a padded batch is from its sequences alone."""
    whole = states(model, ids, mask)
    return max(
        relative_error(whole[i : i + 1, :n], states(model, ids[i : i + 1, :n]))
        for i, n in enumerate(LENGTHS)
    )


@pytest.mark.parametrize("name", [*zoo.ENCODERS, *zoo.PORTS])
@pytest.mark.parametrize("method", longspan.METHODS)
def test_padded_equals_alone_and_everything_trains(name, method):
    model = zoo.make(name)
    ids, mask = zoo.batch()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        plain = states(model, ids[:1])
    assert longspan.convert(model, method, **OPTIONS.get(method, {})) is model
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert padding_error(model, ids, mask) < 1e-5
    if method == "softmax" and name in zoo.ENCODERS:
        assert relative_error(states(model, ids[:1]), plain) < 1e-6
    elif name in zoo.ENCODERS:
        assert relative_error(states(model, ids[:1]), plain) > 1e-3  # the method is at work
    model.train()
    torch.where(mask[..., None] > 0, states(model, ids, mask), 0)[..., :3].square().sum().backward()
    for key, parameter in model.named_parameters():
        if "pooler" not in key and "token_type" not in key and "contact_head" not in key:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("method", longspan.METHODS)
def test_images(method):
    model = zoo.vit()
    pixels = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        plain = model(pixels).last_hidden_state
        longspan.convert(model, method, **OPTIONS.get(method, {}) | (
            {"max_length": 65} if method == "linformer" else {}
        ))  # fmt: skip
        y = model(pixels).last_hidden_state
    assert y.isfinite().all()
    error = relative_error(y, plain)
    assert error < 1e-6 if method == "softmax" else error > 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bert", "modernbert", "nystromformer"])
@pytest.mark.parametrize("method", longspan.METHODS)
def test_on_a_gpu(name, method):
    model = longspan.convert(zoo.make(name).to("cuda"), method, **OPTIONS.get(method, {}))
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    ids, mask = (x.to("cuda") for x in zoo.batch())
    # Hash codes are signs: the last bits of a state, which follow the batch's shape, may turn one.
    limit = 0.2 if method in ("yoso", "reformer") else 1e-4
    assert padding_error(model, ids, mask) < limit
    model.train()
    states(model, ids, mask)[..., :3].square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_sliding_layers_keep_their_window():
    model = longspan.convert(zoo.make("modernbert"), "nystrom", num_landmarks=6)
    attached = [hasattr(layer.attn, "longspan") for layer in model.layers]
    assert attached == [True, False, False, True]
    model = zoo.make("modernbert")
    ids, mask = zoo.batch()
    with torch.no_grad():
        expected = states(model, ids, mask)
        # As many landmarks as tokens is exact attention: then all is as it was, windows included.
        longspan.convert(model, "nystrom", num_landmarks=40)
        for i, n in enumerate(LENGTHS):
            assert relative_error(states(model, ids, mask)[i, :n], expected[i, :n]) < 1e-5


LEARNED = {
    "convolution": ("nystrom", {"num_landmarks": 6, "conv_kernel": 5}),
    "headwise": ("linformer", OPTIONS["linformer"]),
    "each-head": ("linformer", {**OPTIONS["linformer"], "sharing": "none"}),
    "key-value": ("linformer", {**OPTIONS["linformer"], "sharing": "key-value"}),
    "layerwise": ("linformer", {**OPTIONS["linformer"], "sharing": "layerwise"}),
    "window-with-convolution": ("window", {"window": 5, "conv_kernel": 3}),
}


@pytest.mark.parametrize("name", ["bert", "albert", "modernbert", "distilbert"])
@pytest.mark.parametrize(("method", "options"), LEARNED.values(), ids=LEARNED)
def test_learned_parts_are_trained_saved_and_loaded(name, method, options, tmp_path):
    model = longspan.convert(zoo.make(name), method, **options)
    learned = {key: p for key, p in model.named_parameters() if ".longspan." in key}
    assert learned
    ids, mask = zoo.batch()
    start = {key: p.detach().clone() for key, p in learned.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # Not the square: the norm of a normalised state has no gradient.
    states(model, ids, mask)[..., :3].square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(start[key], p) for key, p in learned.items())
    model.save_pretrained(tmp_path)
    assert set(learned) <= set(load_file(tmp_path / "model.safetensors"))
    loaded = hf.load(type(model), tmp_path).eval()
    assert type(loaded) is type(model)
    assert torch.equal(states(loaded, ids, mask), states(model, ids, mask))
    assert torch.equal(
        states(hf.load(transformers.AutoModel, tmp_path).eval(), ids, mask),
        states(model, ids, mask),
    )
    # What was read is trained on: shared projections are still one.
    assert len(list(loaded.parameters())) == len(list(model.parameters()))


def test_a_new_convolution_changes_nothing_until_it_is_trained():
    ids, mask = zoo.batch()
    without = longspan.convert(zoo.make("bert"), "window", window=5)
    with_it = longspan.convert(zoo.make("bert"), "window", window=5, conv_kernel=3)
    assert torch.equal(states(with_it, ids, mask), states(without, ids, mask))


def test_heads_convert_with_their_encoder(tmp_path):
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**zoo.SMALL)).eval()
    longspan.convert(model, "linformer", **OPTIONS["linformer"])
    ids, mask = zoo.batch()
    model.save_pretrained(tmp_path)
    loaded = hf.load(transformers.AutoModelForMaskedLM, tmp_path).eval()
    assert torch.equal(loaded(ids, mask).logits, model(ids, mask).logits)
    assert loaded.config.architectures == ["BertForMaskedLM"]
    # The encoder goes on under another head, with settings of from_pretrained.
    other = hf.load(
        transformers.AutoModelForSequenceClassification, tmp_path, num_labels=5, dtype="bfloat16"
    )
    assert other(ids, mask).logits.shape == (3, 5)
    assert other.dtype == torch.bfloat16
    learned = "bert.encoder.layer.0.attention.self.longspan.key_projection.weight"
    assert torch.equal(other.state_dict()[learned], model.state_dict()[learned].bfloat16())


def test_a_saved_model_without_learned_parts_is_converted_again_by_convert(tmp_path):
    model = longspan.convert(zoo.make("bert"), "nystrom", num_landmarks=6)
    ids, mask = zoo.batch()
    model.save_pretrained(tmp_path)
    again = longspan.convert(transformers.BertModel.from_pretrained(tmp_path)).eval()
    assert torch.equal(states(again, ids, mask), states(model, ids, mask))
    assert torch.equal(states(hf.load(transformers.BertModel, tmp_path).eval(), ids, mask),
                       states(model, ids, mask))  # fmt: skip


@pytest.mark.parametrize("method", ["nystrom", "linformer"])
def test_a_saved_method_is_never_lost_silently(method, tmp_path):
    options = OPTIONS[method]
    longspan.convert(zoo.make("bert"), method, **options).save_pretrained(tmp_path)
    plain = transformers.BertModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"longspan\.huggingface\.load reads it"):
        plain(torch.arange(9)[None])
    if method == "linformer":
        with pytest.raises(ValueError, match=r"must be read by longspan\.huggingface\.load"):
            longspan.convert(plain)
    exact = transformers.BertModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    assert torch.equal(states(exact, *zoo.batch()), states(zoo.make("bert"), *zoo.batch()))


def test_a_saved_method_is_never_lost_without_longspan_either(tmp_path):
    longspan.convert(zoo.make("bert"), "nystrom").save_pretrained(tmp_path)
    program = f"from transformers import BertModel; BertModel.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert 'attn_implementation="nystrom"` is not supported' in done.stderr


def test_convert_again_changes_the_method():
    ids, mask = zoo.batch()
    model = longspan.convert(zoo.make("bert"), "linformer", max_length=64)
    longspan.convert(model, "nystrom", num_landmarks=6)
    assert not [key for key in model.state_dict() if "longspan" in key]
    once = longspan.convert(zoo.make("bert"), "nystrom", num_landmarks=6)
    assert torch.equal(states(model, ids, mask), states(once, ids, mask))


def test_convert_again_forgets_what_was_shared():
    ids, mask = zoo.batch()
    options = dict(max_length=64, projected_length=4)
    model = longspan.convert(zoo.make("bert"), "linformer", sharing="layerwise", **options)
    longspan.convert(model, "linformer", sharing="none", **options)
    before = states(model, ids, mask)
    model.tie_weights()
    assert torch.equal(states(model, ids, mask), before)
    longspan.convert(model, "nystrom", num_landmarks=6)
    model.resize_token_embeddings(120)
    assert states(model, ids, mask).isfinite().all()


def test_loading_can_say_what_it_found(tmp_path):
    longspan.convert(zoo.make("bert"), "nystrom").save_pretrained(tmp_path)
    model, found = hf.load(transformers.BertModel, tmp_path, output_loading_info=True)
    assert type(model) is transformers.BertModel
    assert not found["missing_keys"]


def test_models_of_the_same_configuration_are_left_alone():
    ids, mask = zoo.batch()
    config = transformers.BertConfig(**zoo.SMALL)
    teacher, student = (transformers.BertModel(config).eval() for _ in range(2))
    expected = states(teacher, ids, mask)
    longspan.convert(student, "nystrom", num_landmarks=6)
    assert torch.equal(states(teacher, ids, mask), expected)
    assert config._attn_implementation == teacher.config._attn_implementation == "sdpa"
    assert student.encoder.layer[0].attention.self.config is student.config


def test_going_back_to_sdpa_and_to_another_method():
    ids, mask = zoo.batch()
    model = zoo.make("bert")
    expected = states(model, ids, mask)
    longspan.convert(model, "nystrom", num_landmarks=6).set_attn_implementation("sdpa")
    assert torch.equal(states(model, ids, mask), expected)
    model.set_attn_implementation("yoso")
    with pytest.raises(ValueError, match=r"what the model was converted to \(NystromAttention\)"):
        states(model, ids, mask)


def test_precision_and_device_of_the_model_are_kept():
    model = zoo.make("bert").to(torch.bfloat16)
    longspan.convert(model, "linformer", max_length=64, conv_kernel=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    ids, mask = zoo.batch()
    assert states(model, ids, mask).dtype == torch.bfloat16


def test_gradient_checkpointing_repeats_the_forward():
    ids, mask = zoo.batch()
    grads = []
    for checkpointing in (False, True):
        model = zoo.make("bert", hidden_dropout_prob=0.0).train()
        longspan.convert(model, "yoso", **OPTIONS["yoso"])
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        states(model, ids, mask)[..., :3].square().sum().backward()
        grads.append([p.grad for p in model.encoder.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


# torch's own: its tracer uses what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "method"),
    [("bert", "nystrom"), ("bert", "linformer"), ("modernbert", "yoso"), ("yoso", None)],
)
def test_compiles_to_one_graph(name, method):
    model = longspan.convert(zoo.make(name), method, **OPTIONS.get(method, {}))
    ids, mask = zoo.batch()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert relative_error(states(compiled, ids, mask), states(model, ids, mask)) < 1e-6


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: transformers.BertModel(transformers.BertConfig(**zoo.SMALL, is_decoder=True)),
            "its configuration makes it a decoder",
        ),
        (
            lambda: transformers.LlamaModel(
                transformers.LlamaConfig(**zoo.SMALL, num_key_value_heads=4)
            ),
            "layers.0.self_attn is causal",
        ),
        (
            lambda: transformers.BartModel(
                transformers.BartConfig(
                    vocab_size=99,
                    d_model=32,
                    encoder_layers=1,
                    decoder_layers=1,
                    encoder_attention_heads=4,
                    decoder_attention_heads=4,
                )
            ),
            "its decoder is causal",
        ),
    ],
    ids=["bert-decoder", "llama", "bart"],
)
def test_causal_models_are_refused(make, reason):
    with pytest.raises(NotImplementedError, match=f"cannot be converted: {reason}"):
        longspan.convert(make(), "nystrom")


def test_relative_position_biases_are_refused():
    """T5 hands them over by name, BEiT as a mask: neither gets lost."""
    t5 = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=48
    )  # fmt: skip
    model = longspan.convert(transformers.T5EncoderModel(t5), "nystrom")
    with pytest.raises(NotImplementedError, match="position_bias cannot be honoured by nystrom"):
        model(torch.arange(9)[None])
    beit = transformers.BeitConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=8, use_relative_position_bias=True,
    )  # fmt: skip
    model = longspan.convert(transformers.BeitModel(beit), "nystrom").eval()
    with pytest.raises(NotImplementedError, match="every pair of tokens"):
        model(torch.randn(1, 3, 32, 32))


def test_errors_name_the_argument_the_rule_and_the_value(tmp_path):
    bert = zoo.make("bert")
    with pytest.raises(ValueError, match=r"method must be one of .* \(bert\), got None"):
        longspan.convert(bert)
    with pytest.raises(ValueError, match=r"method must be one of .* 'nystrom'"):
        longspan.convert(bert, "nystroem")
    with pytest.raises(TypeError, match="got 'landmarks'"):
        longspan.convert(bert, "nystrom", landmarks=3)
    with pytest.raises(TypeError, match=r"must be a transformers\.PreTrainedModel, got Linear"):
        longspan.convert(torch.nn.Linear(2, 2), "nystrom")
    with pytest.raises(ValueError, match="max_length must be given for linformer"):
        longspan.convert(zoo.vit(), "linformer")
    with pytest.raises(ValueError, match="conv_kernel must be left out"):
        longspan.convert(zoo.make("nystromformer"), conv_kernel=3)
    small = longspan.models.LongspanConfig(**zoo.SMALL)
    with pytest.raises(ValueError, match="already"):
        longspan.convert(longspan.models.LongspanModel(small), "nystrom")
    fnet = transformers.FNetModel(transformers.FNetConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, intermediate_size=48
    ))  # fmt: skip
    with pytest.raises(ValueError, match=r"attention interface.* got FNetModel"):
        longspan.convert(fnet, "nystrom")
    with pytest.raises(ValueError, match="trust_remote_code must be left out"):
        hf.load(transformers.AutoModel, tmp_path, trust_remote_code=True)
    with pytest.raises(ValueError, match="attn_implementation must be left out"):
        hf.load(transformers.AutoModel, tmp_path, attn_implementation="window")
    bert.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"saved after longspan\.convert"):
        hf.load(transformers.AutoModel, tmp_path)
    # A refused conversion leaves the model as it was.
    assert bert.config._attn_implementation == "sdpa"
    assert not hasattr(bert.config, "longspan")

"""Calibration of toy models: what is collected, what is learned, and which models the file then serves."""

import json

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as plain_caches

import veloxquant
from veloxquant import ConfigError
from veloxquant import LayerSpec
from veloxquant import Rope
from veloxquant import UnsupportedModelError
from veloxquant import UnsupportedShapeError
from veloxquant import VeloxQuantError
from veloxquant.attention import is_routed
from veloxquant.attention import unroute
from veloxquant.build import layer_specs
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_llama
from veloxquant.testing.toys import tiny_mla
from veloxquant_a2ats.calibration import calibrate_model
from veloxquant_a2ats.calibration import cut_text
from veloxquant_a2ats.codebook_file import write_codebook
from veloxquant_a2ats.config import A2ATSConfig
from veloxquant_a2ats.fitting import Plan
from veloxquant_a2ats.fitting import fit_layer
from veloxquant_a2ats.layer import Layer
from veloxquant_a2ats.recorder import LayerData
from veloxquant_a2ats.recorder import collect

SHAPE = {"kv_heads": 2, "query_heads": 4, "layers": 2, "head_dim": 16}
COMPRESS = Plan(sub_dim=8, bits=6, tokens=2048, stretch=128, far_position=64, iterations=8)
RETRIEVE = Plan(mode="retrieve", bits=6, tokens=2048, stretch=128, far_position=64, iterations=8)
OPTIONS = {"codebook_bits": 6, "window": 16, "sinks": 2, "far_position": 64}


def text(count=4000, seed=5):
    return mx.random.randint(0, 64, (count,), key=mx.random.key(seed)).tolist()


def silent(*_):
    """Shows no progress."""


def calibrated(model, plan, tokens=None):
    return calibrate_model(model, tokens or text(), plan, on_stage=silent, on_progress=silent)


@pytest.fixture(scope="module")
def model():
    return tiny_llama(**SHAPE)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """Codebook files of the toy model, by mode."""
    folder, found = tmp_path_factory.mktemp("codebooks"), {}
    for plan in (COMPRESS, RETRIEVE):
        found[plan.mode] = folder / f"{plan.mode}.safetensors"
        write_codebook(found[plan.mode], *calibrated(model, plan))
    return found


@pytest.fixture(autouse=True)
def _nothing_stays_routed(model):
    yield
    while is_routed(model):
        unroute(model)


# ---------------------------------------------------------------- what is collected


def projected(model, tokens, name):
    """What a projection of layer 0 gives for a text, before any rotation: [heads, S, D]."""
    layer = model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(mx.array([tokens])))
    found = getattr(layer.self_attn, name)(hidden)
    return np.array(found.reshape(len(tokens), -1, 16).swapaxes(0, 1), dtype=np.float64)


def test_keys_and_values_are_those_before_the_rotation(model):
    texts = [text(40, seed) for seed in range(6)]
    specs = layer_specs(model, layers=None, routed=True)
    read = []
    take = collect(model, texts, specs, far_position=30, with_values=True, on_progress=read.append)
    assert sum(read) == 240
    data = take(0)
    for name, array in (("k_proj", data.keys), ("v_proj", data.values)):
        expected = np.concatenate([projected(model, one, name) for one in texts], axis=1)
        np.testing.assert_allclose(array, expected, atol=3e-3)
    assert not is_routed(model)


def test_the_moment_is_that_of_the_far_queries(model):
    texts = [text(40, seed) for seed in range(3)]
    specs = layer_specs(model, layers=None, routed=True)
    data = collect(model, texts, specs, far_position=30, with_values=False, on_progress=silent)(0)
    queries = np.concatenate([projected(model, one, "q_proj") for one in texts], axis=1)
    angles = 30.0 * 10000.0 ** (-np.arange(8) / 8)
    first, second = queries[..., :8], queries[..., 8:]
    cos, sin = np.cos(angles), np.sin(angles)
    far = np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1).reshape(2, -1, 16)
    np.testing.assert_allclose(data.moment, far.swapaxes(1, 2) @ far / far.shape[1], rtol=1e-4, atol=1e-6)
    assert (data.values, data.query_heads) == (None, 4)
    assert data.scale == pytest.approx(0.25)


def test_texts_are_spread_and_some_are_held_out():
    tokens = list(range(10_000))
    learn, held = cut_text(tokens, Plan(tokens=1600, stretch=100))
    assert (len(learn), len(held)) == (14, 2)
    assert {len(one) for one in (*learn, *held)} == {100}
    assert min(map(min, learn)) == 0
    assert max(map(max, learn)) == 9999
    assert not {token for one in learn for token in one} & {token for one in held for token in one}
    with pytest.raises(VeloxQuantError, match="only 50 tokens"):
        cut_text(tokens[:50], Plan())


# ---------------------------------------------------------------- what is learned


def layer_data(count=4000, seed=0, dim=16, heads=2):
    """Keys of different spectra in every head, and queries that look into few directions."""
    rng = np.random.default_rng(seed)
    spread = np.linspace(0.2, 3, dim)[None] ** np.array([[1.0], [-1.0]])[:heads]
    keys = rng.standard_normal((heads, count, dim)) * spread[:, None] + 2
    queries = rng.standard_normal((heads, count, dim)) * (np.arange(dim) % 8 < 2) * 3 + 0.1
    values = rng.standard_normal((heads, count, dim))
    moment = queries.swapaxes(1, 2) @ queries / count
    return LayerData(keys.astype(np.float32), values.astype(np.float32), moment, 2 * heads, 0.25)


@pytest.mark.parametrize("plan", [COMPRESS, RETRIEVE], ids=lambda plan: plan.mode)
def test_query_aware_logits_are_better_on_held_out_keys(plan):
    arrays, errors = fit_layer(layer_data(), layer_data(seed=1), plan, 0)
    assert errors["query_aware"] < 0.95 * errors["plain"]
    assert arrays["keys"].shape == ((2, 2, 64, 8) if plan.mode == "compress" else (2, 1, 64, 16))
    assert all(bool(mx.isfinite(array).all().item()) for array in arrays.values())
    assert fit_layer(layer_data(), layer_data(seed=1), plan, 0, compared=False)[1] == {}


def test_every_head_is_fitted_to_its_own_keys():
    """Case 98."""
    data = layer_data()
    arrays, _ = fit_layer(data, data, COMPRESS, 0, compared=False)
    keys = np.array(arrays["keys"])
    for head in range(2):
        rows = data.keys[head].reshape(-1, 2, 8)
        for other in range(2):
            for part in range(2):
                distance = ((rows[:500, part, None] - keys[other, part][None]) ** 2).sum(axis=2).min(axis=1).mean()
                variance = rows[:, part].var(axis=0).sum()
                if head == other:
                    assert distance < 0.8 * variance


@pytest.mark.parametrize("plan", [COMPRESS, RETRIEVE], ids=lambda plan: plan.mode)
def test_the_same_seed_gives_the_same_codebooks(model, plan):
    (first, one), (again, two) = (calibrated(model, plan) for _ in range(2))
    assert first == again
    for index in one:
        assert all(bool((one[index][name] == two[index][name]).all().item()) for name in one[index])


def test_the_header_says_what_was_done(model):
    header, arrays = calibrated(model, Plan(tokens=512, stretch=128, bits=8))
    assert (header.mode, header.layer_count, sorted(header.layers)) == ("compress", 2, [0, 1])
    # 384 tokens allow 24 centroids, not 256.
    assert (header.tokens, header.held_out, header.centroids) == (384, 128, 24)
    assert arrays[0]["keys"].shape == (2, 2, 24, 8)
    own = header.layers[1]
    assert (own.query_heads, own.kv_heads, own.head_dim, own.value_dim) == (4, 2, 16, 16)
    assert own.rope == Rope(dims=16)
    assert header.errors.keys() == {"plain", "query_aware"}


def test_only_full_layers_are_calibrated():
    header, _ = calibrated(tiny_gemma3(kv_heads=1, query_heads=2, head_dim=16), COMPRESS)
    assert (header.layer_count, list(header.layers)) == (6, [5])


def test_models_and_options_that_cannot_be_served(model):
    with pytest.raises(UnsupportedModelError):
        calibrated(tiny_mla(), COMPRESS)
    with pytest.raises(VeloxQuantError, match="--sub-dim 5"):
        calibrated(model, Plan(sub_dim=5))


# ---------------------------------------------------------------- the file in use


def run(model, caches, tokens):
    outputs = [model(mx.array([tokens[:60]]), cache=caches)]
    outputs += [model(mx.array([[token]]), cache=caches) for token in tokens[60:]]
    return np.array(mx.concatenate(outputs, axis=1))


@pytest.mark.parametrize("mode", ["compress", "retrieve"])
def test_a_calibrated_model_is_nearer_to_itself_than_with_a_random_codebook(model, files, mode):
    tokens, errors = text(120, 77), {}
    expected = run(model, plain_caches(model), tokens)
    for name, options in (("learned", {"codebook": str(files[mode])}), ("random", {"allow_uncalibrated": True})):
        caches = veloxquant.make_prompt_cache(model, "a2ats", {"mode": mode, **OPTIONS, **options})
        errors[name] = ((run(model, caches, tokens) - expected)[:, 60:] ** 2).mean()
        shown = veloxquant.report(caches).layers[0].details["codebook"]
        assert shown == (str(files[mode]) if name == "learned" else "uncalibrated")
    if mode == "compress":
        assert errors["learned"] < 0.5 * errors["random"]
    assert np.isfinite(errors["learned"])


@pytest.mark.parametrize("mode", ["compress", "retrieve"])
def test_codes_are_the_same_after_the_file_was_copied(model, files, mode, tmp_path):
    """Case 77: what is learned is not rounded on its way through a file."""
    copied = tmp_path / "copy.safetensors"
    copied.write_bytes(files[mode].read_bytes())
    found = []
    for path in (files[mode], copied):
        caches = veloxquant.make_prompt_cache(model, "a2ats", {"mode": mode, **OPTIONS, "codebook": str(path)})
        run(model, caches, text(100, 3))
        found.append([np.array(cache.method_state.codes.live("keys")) for cache in caches])
    assert all((one == other).all() for one, other in zip(*found, strict=True))


def test_caches_of_a_model_share_their_codebook(model, files):
    options = {**OPTIONS, "codebook": str(files["compress"])}
    one, other = (veloxquant.make_prompt_cache(model, "a2ats", options) for _ in range(2))
    assert one[0].method_state.model.codebook is other[0].method_state.model.codebook
    assert one[0].method_state.model.codebook is not one[1].method_state.model.codebook


def test_a_cache_with_a_codebook_is_saved_and_loaded(model, files, tmp_path):
    options = {**OPTIONS, "codebook": str(files["compress"])}
    caches = veloxquant.make_prompt_cache(model, "a2ats", options)
    run(model, caches, text(90, 3))
    veloxquant.save_prompt_cache(tmp_path / "cache.safetensors", caches)
    loaded = veloxquant.load_prompt_cache(tmp_path / "cache.safetensors", model)
    tokens = mx.array([[5]])
    assert (np.array(model(tokens, cache=caches)) == np.array(model(tokens, cache=loaded))).all()


@pytest.mark.parametrize(
    ("changes", "options", "word"),
    [
        ({"layers": 3}, {}, "2 layers"),
        ({"kv_heads": 1}, {}, "2 KV heads"),
        ({"query_heads": 8}, {}, "4 query heads"),
        ({"head_dim": 32}, {}, "16 channels"),
        ({}, {"mode": "retrieve"}, "mode='compress'"),
        ({}, {"sub_dim": 4}, "sub_dim=8"),
        ({}, {"codebook_bits": 8}, "codebook_bits=6"),
    ],
)
def test_a_codebook_of_another_model_is_refused_when_the_cache_is_made(files, changes, options, word):
    other = tiny_llama(**{**SHAPE, **changes})
    config = {**OPTIONS, "codebook": str(files["compress"]), **options}
    with pytest.raises(ConfigError, match=word):
        veloxquant.make_prompt_cache(other, "a2ats", config)
    assert not is_routed(other)


def test_a_codebook_of_another_rotation_is_refused(files):
    other = tiny_llama(**SHAPE)
    for layer in other.layers:
        layer.self_attn.rope.base = 500.0
    with pytest.raises(ConfigError, match="rotary"):
        veloxquant.make_prompt_cache(other, "a2ats", {**OPTIONS, "codebook": str(files["compress"])})


def test_two_rotations_that_differ_in_their_pairs_are_told_apart(files):
    other = tiny_llama(**SHAPE)
    for layer in other.layers:
        layer.self_attn.rope.traditional = True
    with pytest.raises(ConfigError, match=r"layer 0 has 16 channels, .*, traditional\)"):
        veloxquant.make_prompt_cache(other, "a2ats", {**OPTIONS, "codebook": str(files["compress"])})


def test_a_bare_cache_is_held_to_the_codebook_too(files):
    config = {**OPTIONS, "codebook": str(files["compress"])}
    for layer in (LayerSpec(head_dim=16), LayerSpec(), None):
        with pytest.raises(ConfigError, match="rotary"):
            veloxquant.get_cache("a2ats", {**config, "rope_base": 500.0}, layer=layer)
    with pytest.raises(ConfigError, match="layer 7"):
        veloxquant.get_cache("a2ats", config, layer=LayerSpec(index=7))
    cache = veloxquant.get_cache("a2ats", config)
    with pytest.raises(UnsupportedShapeError, match="2 KV heads with keys of 16"):
        cache.update_and_fetch(mx.zeros((1, 3, 4, 16)), mx.zeros((1, 3, 4, 16)))
    cache.update_and_fetch(mx.zeros((1, 2, 4, 16)), mx.zeros((1, 2, 4, 16)))


def altered(path, target, change):
    arrays, metadata = mx.load(str(path), return_metadata=True)
    record = json.loads(metadata["veloxquant_a2ats"])
    change(record)
    mx.save_safetensors(str(target), arrays, {"veloxquant_a2ats": json.dumps(record)})


def test_files_that_are_none_are_refused(files, tmp_path):
    newer, foreign, cut = (tmp_path / f"{name}.safetensors" for name in ("newer", "foreign", "cut"))
    altered(files["compress"], newer, lambda record: record.update(format=99))
    mx.save_safetensors(str(foreign), {"a": mx.zeros((2,))})
    cut.write_bytes(files["compress"].read_bytes()[:200])
    for path, word in ((newer, "format 99"), (foreign, "not a codebook"), (cut, "damaged"), (tmp_path / "no", "read")):
        with pytest.raises(ConfigError, match=word):
            veloxquant.get_cache("a2ats", {**OPTIONS, "codebook": str(path)})


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, model):
    header, arrays = calibrated(model, Plan(tokens=512, stretch=128, bits=4))
    target = tmp_path / "codebook.safetensors"
    target.write_text("what was there")

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(mx, "save_safetensors", fails)
    with pytest.raises(OSError, match="disk full"):
        write_codebook(target, header, arrays)
    assert [path.name for path in tmp_path.iterdir()] == ["codebook.safetensors"]
    assert target.read_text() == "what was there"


# ---------------------------------------------------------------- sharded models


def shard(model, index, count):
    """A sharded model's layer, with a group that only says who is who."""
    spec = layer_specs(model, layers=None, routed=True)[1]
    heads = {"query_heads": spec.query_heads // count, "kv_heads": max(1, spec.kv_heads // count)}
    return attrs.evolve(spec, shard_index=index, shard_count=count, **heads)


@pytest.mark.parametrize("mode", ["compress", "retrieve"])
def test_a_process_takes_its_own_heads_of_the_codebook(model, files, mode):
    config = A2ATSConfig(mode=mode, codebook=str(files[mode]), **OPTIONS)
    whole = Layer.of(config, layer_specs(model, layers=None, routed=True)[1]).codebook
    for index in range(2):
        own = Layer.of(config, shard(model, index, 2)).codebook
        assert own.keys.shape[0] == 1
        assert mx.array_equal(own.keys, whole.keys[index : index + 1])
    # With more processes than heads, models hold a head in several.
    for index in range(4):
        own = Layer.of(config, shard(model, index, 4)).codebook
        assert mx.array_equal(own.keys, whole.keys[index // 2 : index // 2 + 1])


def test_a_random_codebook_is_that_of_the_whole_model_too():
    config = A2ATSConfig(allow_uncalibrated=True, **OPTIONS)
    spec, rows = LayerSpec(kv_heads=4, head_dim=16), mx.zeros((1, 4, 1, 16))
    whole = Layer.of(config, spec).prepare(rows, rows)
    for index in range(2):
        layer = Layer.of(config, attrs.evolve(spec, kv_heads=2, shard_index=index, shard_count=2))
        own = layer.prepare(rows[:, :2], rows[:, :2])
        assert mx.array_equal(own.keys, whole.keys[2 * index : 2 * index + 2])
        assert mx.array_equal(own.values, whole.values[2 * index : 2 * index + 2])


def test_a_codebook_of_a_shard_is_for_no_other_number_of_heads(model, files):
    config = A2ATSConfig(codebook=str(files["compress"]), **OPTIONS)
    with pytest.raises(ConfigError, match="a model with 4 query heads, and layer 1 has 8"):
        Layer.of(config, attrs.evolve(shard(model, 0, 2), query_heads=4))

"""Every method in files: saved in one process, loaded in another, as if nothing had happened."""

import copy
import json
import subprocess
import sys
import threading

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache as mlx_lm_load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

import veloxquant
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_hybrid
from veloxquant.testing.toys import tiny_llama

CHILD = """
import json, sys
import mlx.core as mx
import veloxquant
from veloxquant.testing import toys
path, toy, options, out = json.loads(sys.argv[1])
model = getattr(toys, toy)(**options)
caches = veloxquant.load_prompt_cache(path, model)
logits = []
for token in range(20):
    logits.append(model(mx.array([[token]]), cache=caches)[0, -1])
mx.savez(out, logits=mx.stack(logits))
"""

OPTIONS = {"kv_heads": 2, "query_heads": 4, "layers": 2, "head_dim": 32, "vocab": 64}
TOYS = {"tiny_llama": OPTIONS, "tiny_gemma3": {}, "tiny_hybrid": {}}
MAKERS = {"tiny_llama": tiny_llama, "tiny_gemma3": tiny_gemma3, "tiny_hybrid": tiny_hybrid}


def steps(model, caches, count=20):
    return mx.stack([model(mx.array([[token]]), cache=caches)[0, -1] for token in range(count)])


@pytest.mark.parametrize("toy", list(TOYS))
@pytest.mark.parametrize("used", ["empty", "in the middle of the prompt", "after it"])
def test_twenty_tokens_in_a_new_process_are_bit_equal(method, generate, tmp_path, toy, used):
    model = MAKERS[toy](**TOYS[toy])
    caches = method.caches(model)
    if used != "empty":
        model(mx.array([[token % 32 for token in range(140)]]), cache=caches)
    if used == "after it":
        steps(model, caches, 3)
    path, out = tmp_path / "prompt.safetensors", tmp_path / "logits.npz"
    veloxquant.save_prompt_cache(path, caches)
    arguments = json.dumps([str(path), toy, TOYS[toy], str(out)])
    subprocess.run([sys.executable, "-c", CHILD, arguments], check=True, timeout=120)
    assert (mx.load(str(out))["logits"] == steps(model, caches)).all().item()


def test_a_sequence_taken_out_of_a_batch_is_saved_like_any_other(method, model, tmp_path):
    pair = []
    for length in (70, 120):
        caches = method.caches(model)
        model(mx.array([[token % 64 for token in range(length)]]), cache=caches)
        steps(model, caches, 1)
        pair.append(caches)
    batch = [type(layer[0]).merge(list(layer)) for layer in zip(*pair, strict=True)]
    with pytest.raises(veloxquant.VeloxQuantError, match="extract"):
        veloxquant.save_prompt_cache(tmp_path / "batch", batch)
    veloxquant.save_prompt_cache(tmp_path / "one", [layer.extract(1) for layer in batch])
    loaded = veloxquant.load_prompt_cache(tmp_path / "one", model)
    assert (steps(model, loaded) == steps(model, pair[1])).all().item()


def test_an_altered_or_cut_file_is_refused_wherever_it_was_hit(method, model, tmp_path):
    caches = method.caches(model)
    model(mx.array([list(range(64)) * 2]), cache=caches)
    path, other = tmp_path / "good", tmp_path / "bad"
    veloxquant.save_prompt_cache(path, caches)
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    for place in [*range(0, header + 8, 41), header + 8, header + 999, len(data) - 1]:
        other.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        with pytest.raises(veloxquant.FileFormatError):
            veloxquant.load_prompt_cache(other, model)
    for length in (0, 7, 100, header, header + 8, len(data) - 1):
        other.write_bytes(data[:length])
        with pytest.raises(veloxquant.FileFormatError):
            veloxquant.load_prompt_cache(other, model)
    with pytest.raises(veloxquant.FileFormatError, match="cannot read"):
        veloxquant.load_prompt_cache(tmp_path / "absent", model)


@pytest.mark.parametrize("change", [{"kv_heads": 4}, {"head_dim": 64}, {"layers": 3}, {"query_heads": 8}])
def test_a_file_of_another_model_is_refused(method, model, tmp_path, change):
    veloxquant.save_prompt_cache(tmp_path / "file", method.caches(model))
    with pytest.raises(veloxquant.FileFormatError, match="another model"):
        veloxquant.load_prompt_cache(tmp_path / "file", tiny_llama(**{**OPTIONS, **change}))


def test_other_options_than_expected_are_refused(method, model, tmp_path):
    veloxquant.save_prompt_cache(tmp_path / "file", method.caches(model))
    veloxquant.load_prompt_cache(tmp_path / "file", model, method=method.name, config=method.small)
    with pytest.raises(veloxquant.FileFormatError, match="saved with"):
        veloxquant.load_prompt_cache(tmp_path / "file", model, method=method.name, config=method.lossless)


def test_mlx_lms_own_functions_work_after_registration(method, model, tmp_path):
    caches = method.caches(model)
    model(mx.array([list(range(64)) * 2]), cache=caches)
    steps(model, caches, 2)
    path = str(tmp_path / "mlx_lm.safetensors")
    mlx_lm_save(path, caches)
    veloxquant.register_with_mlx_lm()
    assert (steps(model, mlx_lm_load(path)) == steps(model, caches)).all().item()


def test_plain_caches_are_left_to_mlx_lm(model, tmp_path):
    with pytest.raises(veloxquant.VeloxQuantError, match="mlx_lm"):
        veloxquant.save_prompt_cache(tmp_path / "plain", make_prompt_cache(model))
    assert not list(tmp_path.iterdir())


def test_copies_leave_no_memory_behind(method, model):
    caches = method.caches(model)
    model(mx.array([list(range(64)) * 4]), cache=caches)
    mx.eval([cache.state for cache in caches])

    def cycle():
        twin = copy.deepcopy(caches)
        mx.eval(steps(model, twin, 2))

    cycle()
    mx.clear_cache()
    before = mx.get_active_memory()
    for _ in range(200):
        cycle()
    mx.clear_cache()
    assert mx.get_active_memory() <= before


def test_threads_with_a_cache_each_give_the_serial_results(method, model, prompts):
    caches = [method.caches(model) for _ in range(4)]  # routes the model once, before the threads run

    def run(index, results):
        model(mx.array([prompts[index + 1]]), cache=caches[index])
        results[index] = steps(model, caches[index], 8)
        mx.eval(results[index])

    parallel, serial = {}, {}
    threads = [threading.Thread(target=run, args=(index, parallel)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caches = [method.caches(model) for _ in range(4)]
    for index in range(4):
        run(index, serial)
    assert all((parallel[index] == serial[index]).all().item() for index in range(4))

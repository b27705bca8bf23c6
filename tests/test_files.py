"""Every method in files: saved in one process, loaded in another, as if nothing had happened."""

import copy
import json
import subprocess
import sys
import threading
import time

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ChunkedKVCache
from mlx_lm.models.cache import load_prompt_cache as mlx_lm_load
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.cache import save_prompt_cache as mlx_lm_save

import veloxquant
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_hybrid
from veloxquant.testing.toys import tiny_llama
from veloxquant.threads import threads_compute

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


def settled():
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


def test_copies_leave_no_memory_behind(method, model):
    caches = method.caches(model)
    model(mx.array([list(range(64)) * 4]), cache=caches)
    mx.eval([cache.state for cache in caches])

    def cycle():
        twin = copy.deepcopy(caches)
        mx.eval(steps(model, twin, 2))

    cycle()
    before = settled()
    for _ in range(200):
        cycle()
    # On a GPU a thread of MLX's frees what the last steps used, a moment after they are through.
    deadline = time.monotonic() + 5
    while settled() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert settled() <= before


@pytest.mark.skipif(not threads_compute(), reason="on CUDA MLX ends a process in which several threads compute at once")
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


WRITER = """
import json, sys
import mlx.core as mx
import veloxquant
from veloxquant.testing.toys import tiny_llama
path, name, options, model_options = json.loads(sys.argv[1])
model = tiny_llama(**model_options)
both = []
for length in (150, 300):
    caches = veloxquant.make_prompt_cache(model, name, options)
    model(mx.array([[token % 64 for token in range(length)]]), cache=caches)
    both.append(caches)
print("ready", flush=True)
for turn in range(150):
    veloxquant.save_prompt_cache(path, both[turn % 2])
"""


def test_a_file_that_another_process_replaces_is_read_whole(method, model, tmp_path):
    """Two contents alternate under one name: what is loaded is one of them, never the header of one over the other."""
    path = tmp_path / "shared"
    arguments = json.dumps([str(path), method.name, method.small, OPTIONS])
    writer = subprocess.Popen([sys.executable, "-c", WRITER, arguments], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    loads = {150: 0, 300: 0}
    while writer.poll() is None:
        if not path.exists():
            continue
        caches = veloxquant.load_prompt_cache(path, model)
        (offset,) = {cache.offset for cache in caches}
        loads[offset] += 1
        assert {cache.rows for cache in caches} == {offset}  # nothing was evicted: the prompts are still open
    assert writer.returncode == 0
    assert min(loads.values()) > 0


def test_a_replaced_file_keeps_its_mode_and_its_links(method, model, tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    veloxquant.save_prompt_cache(file, method.caches(model))
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o664)
    link.symlink_to(file)
    veloxquant.save_prompt_cache(link, method.caches(model))
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o664
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


def test_what_cannot_be_written_is_one_sentence_and_leaves_nothing(method, model, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("[write] Unable to write")

    caches = method.caches(model)
    with pytest.raises(veloxquant.VeloxQuantError, match="metadata"):
        veloxquant.save_prompt_cache(tmp_path / "file", caches, {"a": 5})
    with pytest.raises(veloxquant.VeloxQuantError, match="choose a folder that exists"):
        veloxquant.save_prompt_cache(tmp_path / "absent" / "file", caches)
    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(veloxquant.VeloxQuantError, match="Unable to write; name a file where there is room"):
        veloxquant.save_prompt_cache(tmp_path / "file", caches)
    assert not list(tmp_path.iterdir())


def test_a_file_is_loaded_by_its_method_alone(method, model, tmp_path):
    veloxquant.save_prompt_cache(tmp_path / "file", method.caches(model))
    veloxquant.load_prompt_cache(tmp_path / "file", model, method=method.name)
    with pytest.raises(veloxquant.VeloxQuantError, match="method="):
        veloxquant.load_prompt_cache(tmp_path / "file", model, config=method.small)


def test_layers_of_different_lengths_are_trimmed_to_one(method, model):
    """As after a forward pass that failed half way: one layer has seen a token that another has not."""
    caches = method.caches(model)
    model(mx.array([list(range(64))]), cache=caches)
    rows = mx.zeros((1, 2, 1, 32))
    caches[0].update_and_fetch(rows, rows)
    assert veloxquant.trim_prompt_cache(caches, 1) == 1
    assert {cache.offset for cache in caches} == {64}
    model(mx.array([[5]]), cache=caches)
    assert {cache.offset for cache in caches} == {65}


def test_layers_that_cannot_follow_keep_all_from_being_trimmed(method, model):
    chunked = ChunkedKVCache(8)
    chunked.update_and_fetch(mx.zeros((1, 2, 20, 32)), mx.zeros((1, 2, 20, 32)))
    chunked.maybe_trim_front()
    caches = method.caches(model)[:1]
    model.layers[0].self_attn(mx.zeros((1, 20, model.args.hidden_size)), "causal", caches[0])
    assert veloxquant.trim_prompt_cache([*caches, chunked], 12) == 0
    assert (caches[0].offset, chunked.offset) == (20, 20)
    assert veloxquant.trim_prompt_cache([*caches, chunked], 5) == 5
    assert (caches[0].offset, chunked.offset) == (15, 15)

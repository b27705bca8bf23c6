"""Prompt caches in files: bounded, private, whole or not at all, and of no use to what they were not made for."""

import random
import signal
import stat
import subprocess
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

import veloxquant
from veloxquant.errors import VeloxQuantError
from veloxquant.registry import default_registry
from veloxquant.serve import disk as disk_module
from veloxquant.serve.disk import DiskStore
from veloxquant.serve.folder import CacheFolder
from veloxquant.serve.folder import file_name
from veloxquant.serve.identity import LoadedModel
from veloxquant.serve.identity import model_identity
from veloxquant.serve.prompts import PromptCache
from veloxquant.testing.toys import tiny_llama

KEY = ("model", None, None)
BIG = 10**9


@pytest.fixture(autouse=True)
def _methods(plugins):
    default_registry.cache_clear()
    for name in ("noop_attend", "evictor"):
        default_registry().register(plugins[name])
    yield
    default_registry.cache_clear()


@pytest.fixture(scope="module")
def model():
    return tiny_llama(layers=2)


@pytest.fixture(autouse=True)
def _unrouted(model):
    yield
    while veloxquant.attention.is_routed(model):
        veloxquant.unroute(model)


@pytest.fixture
def open_store(tmp_path, model):
    """Open a store on one folder; an earlier one is closed first, as by the end of its process."""
    opened = []

    def run(identity="a" * 64, max_bytes=BIG, method="noop_attend", key=KEY):
        while opened:
            opened.pop().close()
        config = default_registry().get(method).info.config()
        loaded = LoadedModel(key, model, identity, method, config)
        opened.append(DiskStore(CacheFolder(tmp_path / "caches"), max_bytes, lambda: loaded))
        return opened[0]

    yield run
    while opened:
        opened.pop().close()


def caches_of(model, tokens, method="noop_attend"):
    caches = veloxquant.make_prompt_cache(model, method)
    model(mx.array([tokens]), cache=caches)
    return caches


def tokens_of(seed, count=20):
    return [int(token) for token in np.random.default_rng(seed).integers(0, 64, count)]


def settle(store):
    deadline = time.monotonic() + 20
    while store.figures()["waiting"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def keep(store, model, *seeds, count=20):
    for seed in seeds:
        tokens = tokens_of(seed, count)
        store.offer(KEY, tokens, caches_of(model, tokens))
        settle(store)


def files(store):
    return sorted(store.folder.path.glob("[0-9a-f]*.safetensors"))


def test_a_cache_comes_back_in_the_next_run(open_store, model):
    store = open_store()
    keep(store, model, 1)
    (entry,) = open_store().entries(KEY)
    assert entry.tokens.tolist() == tokens_of(1)
    assert (entry.trimmable, entry.exact_trim) == (True, 20)
    store = open_store()
    (entry,) = store.entries(KEY)
    loaded = store.load(KEY, entry)
    step = mx.array([[3]])
    expected = model(step, cache=caches_of(model, tokens_of(1)))
    assert mx.array_equal(model(step, cache=loaded), expected)
    assert store.figures()["read"] == 1


def test_files_are_private_and_their_names_say_nothing(open_store, model):
    store = open_store()
    keep(store, model, 1, 2)
    assert stat.S_IMODE(store.folder.path.stat().st_mode) == 0o700
    for path in store.folder.path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one, other = files(store)
    assert one.stem != other.stem
    assert all(len(path.stem) == 64 for path in (one, other))


def test_where_threads_may_not_compute_the_one_that_generates_writes(open_store, model, monkeypatch):
    """On CUDA, where MLX ends the process otherwise."""
    writers = []
    usual = disk_module.write_file

    def write(*arguments):
        writers.append(threading.current_thread())
        usual(*arguments)

    monkeypatch.setattr(disk_module, "write_file", write)
    for compute, expected in ((False, True), (True, False)):
        monkeypatch.setattr(disk_module, "threads_compute", lambda compute=compute: compute)
        store = open_store()
        keep(store, model, 1 + compute)
        assert (writers.pop() is threading.current_thread()) is expected
    assert len(files(store)) == 2
    assert store.figures()["waiting"] == 0


def test_the_same_cache_is_written_once(open_store, model):
    store = open_store()
    keep(store, model, 1, 1)
    assert store.figures()["written"] == 1


def test_short_prompts_are_not_worth_a_file(open_store, model):
    store = open_store()
    keep(store, model, 1, count=disk_module.MIN_TOKENS - 1)
    assert files(store) == []


def test_other_identities_and_models_see_nothing_and_damage_nothing(open_store, model):
    store = open_store()
    keep(store, model, 1)
    assert store.entries("another model") == []
    other = open_store(identity="b" * 64)
    assert other.entries(KEY) == []
    assert other.figures()["files"] == 1
    assert other.figures()["set_aside"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
        lambda content: content.replace(b'"trimmable', b'"trimmabel', 1).replace(b'\\"trimmable', b'\\"trimmabel', 1),
        lambda content: b"\xff" * len(content),
    ],
    ids=["half", "empty", "one byte short", "one bit", "metadata", "noise"],
)
def test_a_damaged_file_is_set_aside_and_never_served(open_store, model, damage):
    store = open_store()
    keep(store, model, 1, 2)
    path = store.folder.path / file_name("a" * 64, np.array(tokens_of(1)))
    path.write_bytes(damage(path.read_bytes()))
    store = open_store()
    found = [store.load(KEY, entry) for entry in store.entries(KEY)]
    assert sum(caches is not None for caches in found) == 1
    assert [entry.tokens.tolist() for entry in store.entries(KEY)] == [tokens_of(2)]
    assert store.figures()["set_aside"] == store.figures()["files_set_aside"] == 1
    assert path.with_name(path.name + ".damaged").exists()
    assert not path.exists()
    # The next run does not find it again, and says that it lies there.
    store = open_store()
    assert store.figures()["set_aside"] == 0
    assert store.figures()["files_set_aside"] == 1


def test_a_file_under_the_name_of_another_is_set_aside(open_store, model):
    store = open_store()
    keep(store, model, 1, 2)
    one, other = files(store)
    one.write_bytes(other.read_bytes())
    store = open_store()
    assert len(store.entries(KEY)) == 1
    assert store.figures()["set_aside"] == 1


def test_a_file_that_is_gone_is_a_miss(open_store, model):
    store = open_store()
    keep(store, model, 1)
    (entry,) = store.entries(KEY)
    entry.path.unlink()
    assert store.load(KEY, entry) is None
    assert store.figures()["set_aside"] == 0
    assert store.entries(KEY) == []


def test_a_file_of_other_options_is_not_used(open_store, model):
    """The identity keeps them apart; should it not, loading does."""
    store = open_store(method="evictor")
    store.offer(KEY, tokens_of(1), caches_of(model, tokens_of(1), "evictor"))
    settle(store)
    store = open_store(method="noop_attend")
    (entry,) = store.entries(KEY)
    assert store.load(KEY, entry) is None


def test_what_a_broken_write_left_is_removed(open_store, model):
    store = open_store()
    keep(store, model, 1)
    left = store.folder.path / f".{files(store)[0].name}-x1.safetensors"
    left.write_bytes(b"half")
    store = open_store()
    assert not left.exists()
    assert store.figures()["files"] == 1


def test_the_least_recently_used_goes_first(open_store, model):
    store = open_store()
    keep(store, model, 1, 2, 3)
    size = store.figures()["bytes"] // 3
    entry = next(entry for entry in store.entries(KEY) if entry.tokens.tolist() == tokens_of(1))
    time.sleep(0.02)
    store.load(KEY, entry)
    # The order of use outlives the process.
    store = open_store(max_bytes=2 * size + size // 2)
    assert [entry.tokens.tolist() for entry in store.entries(KEY)] == [tokens_of(3), tokens_of(1)]
    keep(store, model, 4)
    assert [entry.tokens.tolist() for entry in store.entries(KEY)] == [tokens_of(1), tokens_of(4)]
    assert store.figures()["removed"] == 2
    assert len(files(store)) == 2


def test_files_set_aside_make_room_first(open_store, model):
    store = open_store()
    keep(store, model, 1)
    size = store.figures()["bytes"]
    (path,) = files(store)
    path.write_bytes(path.read_bytes()[:-1])
    store = open_store(max_bytes=size + size // 2)
    assert store.figures()["files_set_aside"] == 1
    keep(store, model, 2)
    assert store.figures()["files_set_aside"] == 0
    assert len(store.entries(KEY)) == 1


def test_a_cache_larger_than_the_bound_is_not_written(open_store, model):
    store = open_store(max_bytes=1000)
    keep(store, model, 1)
    assert store.figures()["skipped"] == 1
    assert files(store) == []


def test_a_folder_that_cannot_be_written_is_no_end(open_store, model, monkeypatch):
    def full(*_):
        raise VeloxQuantError("no space left")

    store = open_store()
    monkeypatch.setattr(disk_module, "write_file", full)
    keep(store, model, 1)
    assert store.figures()["failed"] == 1
    monkeypatch.undo()
    keep(store, model, 1)
    assert len(store.entries(KEY)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_against_a_list(open_store, model, seed):
    draw = random.Random(seed)
    store = open_store()
    keep(store, model, 0)
    room = int(store.figures()["bytes"] * 3.5)
    store, model_of_use = open_store(max_bytes=room), [0]
    for _ in range(25):
        number, action = draw.randint(0, 5), draw.random()
        if action < 0.5:
            keep(store, model, number)
            model_of_use = [*(one for one in model_of_use if one != number), number][-3:]
        elif action < 0.8:
            found = [entry for entry in store.entries(KEY) if entry.tokens.tolist() == tokens_of(number)]
            assert bool(found) == (number in model_of_use)
            if found:
                assert store.load(KEY, found[0])[0].offset == 20
                model_of_use = [*(one for one in model_of_use if one != number), number]
        else:
            time.sleep(0.02)
            store = open_store(max_bytes=room)
        assert sorted(entry.tokens.tolist() for entry in store.entries(KEY)) == sorted(map(tokens_of, model_of_use))
        assert sum(path.stat().st_size for path in files(store)) == store.figures()["bytes"] <= room


def test_a_process_killed_while_it_writes_leaves_only_whole_files(open_store, model, tmp_path):
    program = f"""
import mlx.core as mx
from veloxquant.safefile import write_file
from veloxquant.serve.folder import CacheFolder, describe_entry, file_name
import numpy as np
folder = CacheFolder({str(tmp_path / "caches")!r})
arrays = {{"a": mx.zeros((500, 1000))}}
print("begin", flush=True)
for number in range(10**6):
    tokens = np.array([number] * 20)
    name = file_name("a" * 64, tokens)
    write_file(folder.path / name, {{"metadata": describe_entry("a" * 64, tokens, True, 0), "layers": []}}, arrays)
"""
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(0.3)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store = open_store()
    assert store.figures()["set_aside"] == 0
    assert not list(store.folder.path.glob(".*.safetensors"))


def test_the_prompt_cache_reads_files_and_keeps_them_in_memory(open_store, model):
    prompts = PromptCache(disk=open_store())
    prompts.insert_cache(KEY, tokens_of(1), caches_of(model, tokens_of(1)))
    # Its prompt is still open: a checkpoint is not written.
    settle(prompts.disk)
    assert prompts.disk.figures()["files"] == 0
    caches = caches_of(model, tokens_of(1))
    model(mx.array([[7]]), cache=caches)
    prompts.insert_cache(KEY, [*tokens_of(1), 7], caches)
    prompts = PromptCache(disk=open_store())
    for memory in (0, 1):
        found, rest = prompts.fetch_nearest_cache(KEY, tokens_of(1))
        assert rest == tokens_of(1)[-1:]
        assert found[0].offset == 19
        assert (prompts.counts.memory_hits, prompts.counts.disk_hits) == (memory, 1)
    assert prompts.counts.exact_rewinds == 2


def test_a_damaged_file_makes_the_prompt_cache_look_further(open_store, model):
    prompts = PromptCache(disk=open_store())
    for tokens in (tokens_of(1), [*tokens_of(1), 1, 2, 3, 4]):
        caches = caches_of(model, tokens)
        model(mx.array([[7]]), cache=caches)
        prompts.insert_cache(KEY, [*tokens, 7], caches)
        settle(prompts.disk)
    store = open_store()
    longest = max(store.entries(KEY), key=lambda entry: entry.tokens.size)
    longest.path.write_bytes(longest.path.read_bytes()[:-4] + b"oops")
    prompts = PromptCache(disk=store)
    found, rest = prompts.fetch_nearest_cache(KEY, [*tokens_of(1), 1, 2, 9])
    assert found[0].offset == 20
    assert rest == [1, 2, 9]
    assert store.figures()["set_aside"] == 1


class Words:
    """A tokenizer as far as an identity looks at it."""

    def __init__(self, **words):
        self.words = words

    def get_vocab(self):
        return self.words


def test_the_identity_knows_weights_vocabulary_options_and_mode(registry):
    def identity(model=None, words=None, method="evictor", mode="routed", **options):
        chosen = registry.get(method)
        return model_identity(
            model or tiny_llama(), words or Words(a=0, b=1), chosen, chosen.info.config(**options), mode
        )

    first = identity()
    assert identity() == first
    others = [
        identity(model=tiny_llama(seed=1)),
        identity(model=tiny_llama(layers=3)),
        identity(words=Words(a=1, b=0)),
        identity(method="noop_attend"),
        identity(mode="proxy"),
        identity(keep=9),
    ]
    assert len({first, *others}) == 7

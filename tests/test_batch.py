"""Every method in mlx-lm's batch generator: each sequence as if it ran alone."""

import threading

import mlx.core as mx
import pytest
from mlx_lm import batch_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import BatchKVCache

import veloxquant
from veloxquant.testing.toys import tiny_gemma3
from veloxquant.testing.toys import tiny_hybrid


def run_batch(generator, prompts, counts, late=(), late_counts=(), **insert):
    """Tokens and final caches per prompt; the late prompts join after six steps."""
    uids = generator.insert(prompts, max_tokens=list(counts), **insert)
    tokens, caches, steps = {}, {}, 0
    while len(caches) < len(prompts) + len(late):
        _, responses = generator.next()
        steps += 1
        assert steps < 500
        if steps == 6 and late:
            uids += generator.insert(late, max_tokens=list(late_counts))
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
            if response.finish_reason is not None:
                caches[response.uid] = response.prompt_cache
    return [tokens[uid] for uid in uids], [caches[uid] for uid in uids]


@pytest.mark.parametrize("step", [2048, 64, 16])
def test_sequences_that_join_and_leave_equal_their_lone_runs(method, model, prompts, generate, step):
    counts = [20, 5, 20, 12, 10, 15]
    with veloxquant.use(model, method.name, method.small):
        generator = BatchGenerator(model, prefill_step_size=step, completion_batch_size=4, prefill_batch_size=3)
        tokens, caches = run_batch(generator, prompts[:4], counts[:4], prompts[4:], counts[4:])
        for prompt, count, found, cache in zip(prompts, counts, tokens, caches, strict=True):
            alone = method.caches(model)
            assert found == generate(model, prompt, alone, count, step)
            for one, other in zip(alone, cache, strict=True):
                assert type(one) is type(other)
                assert (one.offset, one.rows, one.nbytes) == (other.offset, other.rows, other.nbytes)


def test_mlx_lm_batch_generate(method, model, prompts, generate):
    class Tokenizer:
        eos_token_ids = ()
        detokenizer = None

        def decode(self, tokens):
            return " ".join(map(str, tokens))

    with veloxquant.use(model, method.name, method.small):
        answer = batch_generate(model, Tokenizer(), prompts[:3], max_tokens=8, verbose=False)
        for prompt, text in zip(prompts, answer.texts, strict=False):
            assert text == Tokenizer().decode(generate(model, prompt, method.caches(model), 8))


def test_caches_with_history_join_a_batch(method, model, prompts, generate):
    """A second turn: caches that hold a conversation, of different lengths, go into one batch."""
    histories, expected = [], []
    for prompt in prompts[:3]:
        alone = method.caches(model)
        first = generate(model, prompt, alone, 4)
        history = method.caches(model)
        generate(model, prompt, history, 4)
        histories.append(history)
        expected.append(generate(model, [*first[-1:], 7, 8, 9], alone, 6))
    seconds = [[generate(model, prompt, method.caches(model), 4)[-1], 7, 8, 9] for prompt in prompts[:3]]
    generator = BatchGenerator(model)
    tokens, _ = run_batch(generator, seconds, [6, 6, 6], caches=histories)
    assert tokens == expected


def test_a_batch_holds_the_bytes_of_its_members_and_no_plain_cache(method, model, prompts):
    members = []
    for prompt in prompts[1:4]:
        caches = method.caches(model)
        model(mx.array([prompt[:-1]]), cache=caches)
        model(mx.array([prompt[-1:]]), cache=caches)
        members.append(caches)
    for layer in zip(*members, strict=True):
        batch = type(layer[0]).merge(list(layer))
        assert not isinstance(batch, BatchKVCache)
        assert batch.nbytes == sum(cache.nbytes for cache in layer)
        assert batch.offset.tolist() == [len(prompt) for prompt in prompts[1:4]]


@pytest.mark.parametrize("make", [tiny_gemma3, tiny_hybrid])
def test_models_with_other_layers_batch_too(method, generate, prompts, make):
    model = make()
    short = [[token % 32 for token in prompt] for prompt in prompts[:3]]
    with veloxquant.use(model, method.name, method.small):
        tokens, _ = run_batch(BatchGenerator(model), short, [6, 6, 6])
        for prompt, found in zip(short, tokens, strict=True):
            assert found == generate(model, prompt, method.caches(model), 6)


def test_caches_that_cannot_share_a_mask_cannot_be_merged(method, model):
    """A plain layer beside a compressed one takes its mask from it, which a ragged batch cannot provide."""
    partly = veloxquant.make_prompt_cache(model, method.name, method.small, layers=[0])
    assert not hasattr(partly[0], "merge")
    if "queries" not in veloxquant.method_info(method.name).needs:
        assert not hasattr(veloxquant.get_cache(method.name, method.small), "merge")


def filled(method, model, length, seed=0):
    caches = method.caches(model)
    tokens = mx.random.randint(0, 64, (1, length), key=mx.random.key(seed))
    model(tokens[:, :-1], cache=caches)
    model(tokens[:, -1:], cache=caches)
    return caches


def decode(model, caches, tokens):
    return mx.stack([model(mx.array([[token]]), cache=caches)[0, -1] for token in tokens])


def test_one_history_given_to_several_prompts_becomes_several_sequences(method, model, generate):
    system = filled(method, model, 90)
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    expected = []
    for prompt in prompts:
        alone = filled(method, model, 90)
        expected.append(generate(model, prompt, alone, 5))
    tokens, _ = run_batch(BatchGenerator(model), prompts, [5, 5, 5], caches=[system] * 3)
    assert tokens == expected
    assert {cache.offset for cache in system} == {90}


def test_a_sequence_that_is_kept_twice_becomes_two(method, model):
    caches = filled(method, model, 90)
    for cache in caches:
        batch = type(cache).merge([cache])
        batch.filter([0, 0])
        one, other = batch.sequences
        assert one is not other
        one.trim(1)
        assert (one.offset, other.offset) == (89, 90)


def test_a_padded_prompt_is_announced_whole_and_cannot_be_rewound(method, model):
    cache = method.caches(model)[0]
    batch = type(cache).merge([cache, cache])
    for lengths, padding in ([[4], [0, 2]], [[4, 2], [0, 1]], [[4, -2], [0, 6]], [None, [0, 2]]):
        with pytest.raises(veloxquant.VeloxQuantError):
            batch.prepare(lengths=lengths, right_padding=padding)
    batch.prepare(lengths=[4, 2], right_padding=[0, 2])
    assert batch.is_trimmable() is False
    assert batch.trim(1) == 0
    twin = type(batch).from_state(batch.state)
    assert twin._remaining == [4, 2]
    batch.prepare(lengths=[4, 4], right_padding=[0, 0])
    assert batch.is_trimmable()


def test_what_does_not_belong_together_is_refused_with_a_sentence(method, model):
    caches = filled(method, model, 90)[0], filled(method, model, 40)[0]
    batch = type(caches[0]).merge(caches)
    half = method.caches(model)[0]
    rows = mx.zeros((1, 2, 3, 32), mx.float16)
    half.update_and_fetch(rows, rows)
    for action in (
        lambda: type(caches[0]).merge([caches[0], half]),
        lambda: type(caches[0]).merge([caches[0], BatchKVCache([0])]),
        lambda: batch.extend(batch),
        lambda: batch.extend(caches[0]),
        lambda: batch.extract(2),
        lambda: batch.filter(mx.array([True, False])),
        lambda: batch.to_quantized(),
        lambda: batch.make_mask(1, window_size=8),
    ):
        with pytest.raises(veloxquant.VeloxQuantError):
            action()
    assert batch.offset.tolist() == [90, 40]


def test_the_report_of_a_batch_is_the_sum_of_its_sequences(method, model):
    members = [filled(method, model, 90), filled(method, model, 40)]
    batch = [type(pair[0]).merge(list(pair)) for pair in zip(*members, strict=True)]
    whole, parts = veloxquant.report(batch), [veloxquant.report(caches) for caches in members]
    assert whole.bytes_held == sum(part.bytes_held for part in parts)
    assert whole.bytes_plain == sum(part.bytes_plain for part in parts)
    assert whole.tokens_seen == 130
    assert whole.query_mode == "routed"


def test_a_batch_goes_on_in_another_thread(method, model):
    """Whatever its steps hold is computed with the tokens, and can be used where they cannot be."""
    members = [filled(method, model, length, seed) for seed, length in enumerate((60, 90))]
    mx.eval([decode(model, caches, [4]) for caches in members])
    batches = [type(layer[0]).merge(list(layer)) for layer in zip(*members, strict=True)]
    alone = [decode(model, caches, [5, 6, 7]) for caches in members]
    found = []

    def run(tokens):
        for token in tokens:
            found.append(model(mx.array([[token], [token]]), cache=batches)[:, -1])
            mx.eval(found[-1])

    for tokens in ([5, 6], [7]):
        thread = threading.Thread(target=run, args=(tokens,))
        thread.start()
        thread.join()
    assert mx.allclose(mx.stack(found, axis=1), mx.stack(alone), atol=1e-4)


def test_a_batch_without_queries_says_so(method, model):
    caches = filled(method, model, 60)
    batch = type(caches[0]).merge(caches[:1])
    rows = mx.zeros((1, *batch.sequences[0].row_shape[1:2], 1, batch.sequences[0].row_shape[2]))
    batch.update_and_fetch(rows, rows)
    with pytest.raises(veloxquant.RoutingError, match="did not"):
        batch.update_and_fetch(rows, rows)

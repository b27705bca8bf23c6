"""What every process of a sharded run does: ``mlx.launch -n N sharded_run.py JOB OUT``, or without ``mlx.launch`` one.

JOB is a JSON file: ``model`` (``toy``, ``uneven``, ``sample`` or ``sample-quantized``), ``prompt`` and ``tokens`` (how
many to read and to generate) and ``runs``, the methods and options by a label of each. OUT is a folder; process r
writes r.json and, for the caches of each run, r-LABEL.safetensors.
"""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import sharded_load

import veloxquant
from veloxquant import VeloxQuantError
from veloxquant.testing.sample import load_sample_model
from veloxquant.testing.sample import sample_model_path
from veloxquant.testing.sample import sample_tokens
from veloxquant.testing.toys import tiny_llama

VOCABULARY = 512


def load(name, group):
    """The model, sharded by mlx-lm's own function where there is more than one process, and a prompt's tokens."""
    if name == "sample-quantized":
        model, tokenizer = sharded_load(str(sample_model_path()), tensor_group=group)
        model.set_dtype(mx.float32)
        return model, lambda count: sample_tokens(tokenizer, count)
    if name == "sample":
        model, tokenizer = load_sample_model("float32")
        prompt = lambda count: sample_tokens(tokenizer, count)  # noqa: E731
    else:
        kv_heads, query_heads = (8, 16) if name == "toy" else (3, 9)
        model = tiny_llama(kv_heads=kv_heads, query_heads=query_heads, layers=3, head_dim=32, vocab=VOCABULARY)
        prompt = lambda count: mx.random.randint(0, VOCABULARY, (count,), key=mx.random.key(count)).tolist()  # noqa: E731
    if group.size() > 1:
        model.shard(group)
        mx.eval(model.parameters())
    return model, prompt


def never_again(tokens, logits):
    """Rule out every token that has been; toys would say one of them for ever."""
    logits[:, tokens] = -mx.inf
    return logits


def generate(model, prompt, caches, count, *, repeat=True):
    """Greedy tokens, each with its log probability."""
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=caches,
        prefill_step_size=64,
        logits_processors=None if repeat else [never_again],
    )
    return [[int(token), float(probabilities[token])] for token, probabilities in steps]


def report(caches):
    """What a run says of itself, and the arrays that its caches hold."""
    arrays = {}
    for cache in caches:
        header, *held = cache.state
        for name, array in zip(json.loads(header)["arrays"], held, strict=True):
            arrays[f"{cache.layer.index}.{name}"] = array
    found = veloxquant.report(caches)
    return {"bytes_held": found.bytes_held, "kept": found.tokens_kept, "query_mode": found.query_mode}, arrays


def save_and_load(model, caches, out, group, prompt):
    """The own file goes on as the caches do; the file of another process is refused."""
    path = out / f"cache-{group.rank()}.safetensors"
    veloxquant.save_prompt_cache(path, caches)
    loaded = veloxquant.load_prompt_cache(path, model)
    alike = generate(model, prompt[:1], loaded, 4) == generate(model, prompt[:1], caches, 4)
    # All files are there when everybody has come this far.
    mx.eval(mx.distributed.all_sum(mx.array(1.0)))
    other = out / f"cache-{(group.rank() + 1) % group.size()}.safetensors"
    return {"alike": alike, "refused": refusal(lambda: veloxquant.load_prompt_cache(other, model))}


def refusal(action):
    try:
        action()
    except VeloxQuantError as error:
        return str(error)
    return None


def calibrate(model, prompt):
    from veloxquant_a2ats.calibration import calibrate_model
    from veloxquant_a2ats.fitting import Plan

    plan = Plan(sub_dim=8, bits=2, tokens=64, stretch=32)
    calibrate_model(model, prompt, plan, on_stage=lambda *_: None, on_progress=lambda *_: None)


def main():
    job, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    group = mx.distributed.init()
    model, make_prompt = load(job["model"], group)
    prompt, repeat = make_prompt(job["prompt"]), job["model"].startswith("sample")
    result = {"processes": group.size(), "runs": {}}
    for label, (method, config) in job["runs"].items():
        if method is None:
            result["runs"][label] = {"generated": generate(model, prompt, None, job["tokens"], repeat=repeat)}
            continue
        caches = []
        refused = refusal(lambda: caches.extend(veloxquant.make_prompt_cache(model, method, config)))  # noqa: B023
        if refused is not None:
            result["runs"][label] = {"refused": refused}
            continue
        generated = generate(model, prompt, caches, job["tokens"], repeat=repeat)
        said, arrays = report(caches)
        mx.save_safetensors(str(out / f"{group.rank()}-{label}.safetensors"), arrays)
        result["runs"][label] = {"generated": generated, **said}
        if label in job.get("files", ()) and group.size() > 1:
            result["runs"][label]["file"] = save_and_load(model, caches, out, group, prompt)
    if job.get("calibrate"):
        result["calibration"] = refusal(lambda: calibrate(model, make_prompt(256)))
    (out / f"{group.rank()}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()

"""The decoder's logits against those of transformers, on tiny checkpoints of all families."""

import numpy as np
import pytest
import torch

from kernels.cpu import backend
from runtime.model.load import load_model

VARIANTS = [
    "llama", "llama-llama3", "llama-linear", "mistral", "qwen2", "qwen2-yarn", "qwen3",
    "qwen2_moe", "qwen2_moe-mixed", "qwen3_moe", "mixtral", "olmoe", "olmoe-tied",
    "gemma4", "gemma4-moe", "gemma4-shared",
]  # fmt: skip
TOLERANCE = 1e-4


def prompts(*lengths):
    rng = np.random.default_rng(4)
    return [rng.integers(0, 97, size=n).tolist() for n in lengths]


@torch.inference_mode()
def expected(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def worst(found, wanted):
    return float((found - wanted).abs().max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_prompt_in_one_step_gives_the_library_logits(
    variant, tiny_model, tiny_folder, stepper
):
    (prompt,) = prompts(37)
    found = stepper(load_model(tiny_folder(variant))).step({0: prompt}, all_rows=True)[0]
    wanted = expected(tiny_model(variant), prompt)
    assert wanted.std() > 0.1  # weights are such that there is something to miss
    assert worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_mixed_with_decoding_of_other_sequences_give_the_library_logits(
    variant, tiny_model, tiny_folder, stepper
):
    loaded = stepper(load_model(tiny_folder(variant)))
    texts = dict(enumerate(prompts(41, 1, 23, 12)))
    done = dict.fromkeys(texts, 0)
    # sequence 1 decodes from the first step on, the others join later in odd chunks
    plan = [{1: 1, 0: 5}, {0: 7, 2: 13}, {2: 3, 3: 11, 0: 1}, {0: 17, 3: 1, 2: 7}, {0: 11}]
    for chunks in plan:
        chunks = {s: n for s, n in chunks.items() if done[s] < len(texts[s])}
        logits = loaded.step({s: texts[s][done[s] : done[s] + n] for s, n in chunks.items()})
        for sequence, count in chunks.items():
            done[sequence] += count
            wanted = expected(tiny_model(variant), texts[sequence][: done[sequence]])[-1]
            assert worst(logits[sequence], wanted) <= TOLERANCE
    assert done == {s: len(t) for s, t in texts.items()}
    for _ in range(9):  # now all decode together
        texts = {
            s: [*text, int(logits[s].argmax()) if s in logits else 5] for s, text in texts.items()
        }
        logits = loaded.step({s: text[-1:] for s, text in texts.items()})
    for sequence, text in texts.items():
        wanted = expected(tiny_model(variant), text)
        assert worst(logits[sequence], wanted[-1]) <= TOLERANCE


@pytest.mark.parametrize("variant", ["qwen2_moe-mixed", "gemma4-moe", "mistral"])
def test_greedy_decoding_gives_the_tokens_that_generate_gives(
    variant, tiny_model, tiny_folder, stepper
):
    (prompt,) = prompts(19)
    model = tiny_model(variant)
    wanted = model.generate(
        torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False,
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long), pad_token_id=0,
        eos_token_id=None,
    )[0].tolist()  # fmt: skip
    loaded = stepper(load_model(tiny_folder(variant)))
    text, new = list(prompt), prompt
    for _ in range(12):
        text.append(int(loaded.step({0: new})[0].argmax()))
        new = text[-1:]
    assert text == wanted


@pytest.mark.parametrize("variant", ["qwen2_moe-mixed", "olmoe", "gemma4-moe", "gemma4-shared"])
def test_logits_have_the_same_bits_whatever_else_is_in_the_step(variant, tiny_folder, stepper):
    if backend().library is None:
        pytest.skip("only the compiled kernels promise it")
    model = load_model(tiny_folder(variant))
    text, *others = prompts(27, 16, 9, 31)
    alone = stepper(model)
    wanted = [alone.step({0: text[:20]}, all_rows=True)[0]]
    wanted += [alone.step({0: [token]}, all_rows=True)[0] for token in text[20:]]
    together = stepper(model)
    found = [together.step({1: others[0], 0: text[:3], 2: others[1][:4]}, all_rows=True)[0]]
    found += [together.step({0: text[3:14], 2: others[1][4:]}, all_rows=True)[0]]
    found += [together.step({3: others[2], 0: text[14:20], 1: [5], 2: [6]}, all_rows=True)[0]]
    for token in text[20:]:
        found += [together.step({2: [token], 3: [1, token], 0: [token]}, all_rows=True)[0]]
    assert torch.equal(torch.cat(found), torch.cat(wanted))


@pytest.mark.parametrize("variant", ["qwen2_moe", "llama", "gemma4-moe", "olmoe"])
def test_logits_of_a_step_without_wanted_rows_are_empty(variant, tiny_folder, stepper):
    from runtime.model.step import StepBatch

    loaded = stepper(load_model(tiny_folder(variant)))
    loaded.cache.add(0)
    assert loaded.cache.grow(0, 3)
    batch = StepBatch(
        (0,), np.array([1, 2, 3]), np.array([0, 3]), np.array([0]), np.array([], np.int64)
    )
    logits = loaded.decoder.forward(batch, loaded.attention, loaded.experts)
    assert logits.shape == (0, 97)


def test_a_model_with_experts_does_not_run_without_them(tiny_folder, stepper):
    loaded = load_model(tiny_folder("qwen2_moe"))
    with pytest.raises(ValueError, match=r"experts: .* none were given"):
        stepper(loaded.decoder).step({0: [1, 2]})

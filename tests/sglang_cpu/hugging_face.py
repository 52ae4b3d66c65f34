"""What the target alone writes, by Hugging Face's own forward pass; runs in the fork server."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def complete(folder, prompts, length):
    """Greedy completions of `length` tokens."""
    model = _load(folder)
    return [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=length, do_sample=False, eos_token_id=None
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def weigh_continuations(folder, prompt, length, temperature, top_k):
    """Every continuation that the filter allows, each with its probability."""
    model = _load(folder)
    paths = [([], 1.0)]
    for _ in range(length):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + path for path, _ in paths])).logits[:, -1]
        best, ids = (logits.double() / temperature).topk(top_k)
        rows = zip(paths, best.softmax(-1).tolist(), ids.tolist(), strict=True)
        paths = [
            ([*path, token], probability * share)
            for (path, probability), shares, tokens in rows
            for share, token in zip(shares, tokens, strict=True)
        ]
    return paths


def _load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def chat(folder, questions, length):
    """Greedy answers of at most `length` tokens in the target's chat template.

    Prompt ids, answer ids and the answer's text, of each question.
    """
    model, tokenizer = _load(folder), AutoTokenizer.from_pretrained(folder)
    rows = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        tokens = model.generate(**prompt, max_new_tokens=length, do_sample=False)[0]
        prompt_length = prompt["input_ids"].shape[1]
        answer = tokens[prompt_length:].tolist()
        text = tokenizer.decode(answer, skip_special_tokens=True)
        rows.append([tokens[:prompt_length].tolist(), answer, text])
    return rows

"""What the target alone writes, by Hugging Face's own forward pass; runs in the fork server."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def complete(folder, prompts, length):
    """Greedy completions of `length` tokens."""
    model = _load(folder)
    completions = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        # Without a mask, generate() would hide padding tokens, which chats use as end of a turn.
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
        )
        completions.append(output[0, len(prompt) :].tolist())
    return completions


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


def encode_chats(folder, questions):
    """Prompt ids of questions in the target's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for chat in chats
    ]


def decode(folder, completions):
    """Texts of completions, as servers answer with them."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [tokenizer.decode(completion, skip_special_tokens=True) for completion in completions]


def top_two_gaps(folder, texts):
    """How far the two likeliest next tokens of each text are apart, in logits."""
    model = _load(folder)
    gaps = []
    for text in texts:
        with torch.inference_mode():
            best, second = model(torch.tensor([text])).logits[0, -1].topk(2).values.tolist()
        gaps.append(best - second)
    return gaps


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

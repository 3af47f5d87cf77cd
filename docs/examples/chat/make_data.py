"""Writes conversations, a tokenizer and a chat template: `data/` beside this file, or the folder that is named.

Everything is drawn from a fixed seed, so that every run of this script writes the same bytes.
"""
from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CITIES = ("Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin")
ASKED = ("Is it warm in {}?", "What is the weather like in {}?", "Do I need a coat in {}?")
SAID = ("It is {} degrees in {}.", "{} degrees, says the station in {}.")
TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "The temperature in a city, in degrees Celsius",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

#: ChatML with tools. The marks say which tokens the model is to learn: its own words, and the token that ends them.
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def talk(rng: random.Random) -> dict[str, Any]:
    """One to four questions; some conversations have a tool, some are in the shape that ShareGPT made known."""
    shape = rng.choice(("plain", "tools", "sharegpt"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Answer in one sentence."}]
    for _ in range(rng.randint(1, 4)):
        city, degrees = rng.choice(CITIES), rng.randint(-20, 40)
        messages.append({"role": "user", "content": rng.choice(ASKED).format(city)})
        if shape == "tools":
            call = {"name": "temperature", "arguments": {"city": city}}
            messages.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": str(degrees)})
        messages.append({"role": "assistant", "content": rng.choice(SAID).format(degrees, city)})
    if shape == "sharegpt":
        speakers = {"system": "system", "user": "human", "assistant": "gpt"}
        messages = [{"from": speakers[message["role"]], "value": message["content"]} for message in messages]
    return {"messages": messages, **({"tools": [TOOL]} if shape == "tools" else {})}


def make(folder: Path) -> None:
    rng = random.Random(11)
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    lines = []
    for shard in range(3):
        rows = [json.dumps(talk(rng)) + "\n" for _ in range(200)]
        (folder / f"talks-{shard}.jsonl").write_text("".join(rows))
        lines += rows

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (model / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "data")

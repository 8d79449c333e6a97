"""The accuracy of a decoder with int8 and 4-bit weights, per token of a text that neither training nor calibration saw.

    pip install transformers
    python benchmarks/decoders.py

A Llama of 4 layers and 256 channels learns the bytes of a text that Python ships, the documentation of its topics
(pydoc_data/topics.py); the last tenth is kept for evaluation. For each recipe: the perplexity of the evaluated bytes,
the divergence of Kullback and Leibler from the float model per byte, how often the most probable byte is the float
model's, and the signal-to-noise ratio of the logits.

Small models lack the few large channels of large ones. ``--outliers 32`` makes 4 channels behind every norm 32 times as
large, without a change to the function: the layers that read them have smaller weights.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from pathlib import Path
from pydoc_data import topics

import record
import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch.nn import functional
from torchvision_operators import declare_operators

import intaglio

declare_operators()  # transformers imports torchvision if it is installed

LENGTH = 128
"""Bytes of a sample."""
PART = 8
"""Samples that are computed together."""
INT4 = {"weights_dtype": "s4", "weights": "group:32"}
NEAREST = {"equalize": 0.0, "rounding": "nearest"}
RECIPES: dict[str, dict[str, object]] = {
    "W8A8": {},
    "W8A8, per token": {"activations": "token"},
    "W4A8, nearest": {**INT4, **NEAREST},
    "W4A8, equalization": {**INT4, "rounding": "nearest"},
    "W4A8, GPTQ": {**INT4, "equalize": 0.0},
    "W4A8, both": INT4,
    "W4A8, Qronos": {**INT4, "rounding": "qronos"},
    "W4A8, per token, nearest": {**INT4, **NEAREST, "activations": "token"},
    "W4A8, per token, GPTQ": {**INT4, "activations": "token"},
    "W8A8, linear layers per token": {},
    "W4A8, linear layers per token": INT4,
    "W4A8, linear layers per token, nearest": {**INT4, "rounding": "nearest"},
    "W4A8, linear layers per token, Qronos": {**INT4, "rounding": "qronos"},
    "W8A8, rotations": {"rotate": True},
    "W8A8, linear layers per token, rotations": {"rotate": True},
    "W4A8, linear layers per token, rotations": {**INT4, "rotate": True},
    "W4A8, linear layers per token, rotations, Qronos": {**INT4, "rotate": True, "rounding": "qronos"},
    "W4A8, linear layers per token, rotations, nearest": {**INT4, "rotate": True, "rounding": "nearest"},
}
"""Settings of all operators by the name of a row."""
PER_TOKEN = "linear layers per token"
"""Part of the names of rows in which the scales of linear layers are those of tokens, and all others are calibrated."""


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes for training and for evaluation, in samples [n, LENGTH]."""
    joined = "\n".join(text for _, text in sorted(topics.topics.items())).encode()
    samples = torch.tensor(list(joined[: len(joined) // LENGTH * LENGTH])).reshape(-1, LENGTH)
    held = len(samples) // 10
    return samples[:-held], samples[-held:]


def trained(samples: torch.Tensor, steps: int) -> transformers.LlamaForCausalLM:
    """Return a decoder after so many steps of AdamW on random samples of 32 rows."""
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        batch = samples[torch.randint(len(samples), (32,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def enlarge_channels(model: transformers.LlamaForCausalLM, factor: float) -> None:
    """Multiply 4 channels of each norm by a factor, and divide the weights that read them by it."""
    readers = [(model.model.norm, [model.lm_head])]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        readers.append((layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]))
        readers.append((layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]))
    for norm, layers in readers:
        channels = torch.randperm(len(norm.weight))[:4]
        norm.weight.data[channels] *= factor
        for layer in layers:
            layer.weight.data[:, channels] /= factor


def logits_of(model: torch.nn.Module, samples: torch.Tensor) -> list[torch.Tensor]:
    """Return the logits [n, length - 1, vocabulary] for the tokens after the first, in parts of `PART` samples."""
    with torch.no_grad():
        return [model(input_ids=part, use_cache=False).logits[:, :-1] for part in samples.split(PART)]


def figures(found: list[torch.Tensor], expected: list[torch.Tensor], samples: torch.Tensor) -> dict[str, float]:
    """Return the figures of one row, from its logits and those of the float model."""
    surprise, divergence, agreement, noise, signal, count = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    for part, reference, tokens in zip(found, expected, samples.split(PART), strict=True):
        own, wanted = part.double(), reference.double()
        noise, signal = noise + (own - wanted).square().sum().item(), signal + wanted.square().sum().item()
        agreement += (own.argmax(-1) == wanted.argmax(-1)).sum().item()
        own, wanted = functional.log_softmax(own, -1), functional.log_softmax(wanted, -1)
        surprise -= own.gather(2, tokens[:, 1:, None]).sum().item()
        divergence += (wanted.exp() * (wanted - own)).sum().item()
        count += own.shape[0] * own.shape[1]
    return {
        "perplexity": math.exp(surprise / count),
        "divergence": divergence / count,
        "agreement": 100 * agreement / count,
        "sqnr_db": -10 * math.log10(noise / signal + 1e-14),
    }


def show(results: dict[str, dict[str, float]], unit: str) -> None:
    """Print the table of the results, whose tokens are of this unit."""
    table = Table("", "perplexity", "divergence", f"same {unit}", "SQNR")
    for name, row in results.items():
        found = f"{row['perplexity']:.3f}", f"{row['divergence']:.4f}"
        table.add_row(name, *found, f"{row['agreement']:.1f} %", f"{row['sqnr_db']:.1f} dB")
    Console(highlight=False).print(table)


def parser_of(text: str | None, samples: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a comparison of recipes, by default with so many samples."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=samples, help="samples of calibration")
    parser.add_argument("--limit", type=int, default=samples, help="samples of evaluation")
    parser.add_argument("--recipes", help="names of rows, separated by semicolons")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    return parser


def main() -> None:
    parser = parser_of(__doc__, 128)
    parser.add_argument("--steps", type=int, default=600, help="steps of training")
    parser.add_argument("--model", type=Path, help="folder of a trained model, which is written if it does not exist")
    parser.add_argument("--outliers", type=float, help="factor of 4 channels behind each norm")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    seen, unseen = texts()
    if arguments.model and arguments.model.exists():
        model = transformers.LlamaForCausalLM.from_pretrained(arguments.model).eval()
    else:
        model = trained(seen, arguments.steps)
        if arguments.model:
            model.save_pretrained(arguments.model)
    if arguments.outliers:
        enlarge_channels(model, arguments.outliers)
    unseen = unseen[: arguments.limit]
    expected = logits_of(model, unseen)
    results = {"float32": figures(expected, expected, unseen)}
    data = [{"input_ids": part} for part in seen[torch.randperm(len(seen))[: arguments.samples]].split(16)]
    names = arguments.recipes.split(";") if arguments.recipes else RECIPES
    for name in names:
        calibrated = {} if PER_TOKEN in name else {"activations": "static"}
        recipe = {"*": {"rotate": False, **calibrated, **RECIPES[name]}}
        quantized = intaglio.quantize(model, data, recipe=recipe, progress=False)
        results[name] = figures(logits_of(quantized, unseen), expected, unseen)
        print(name, results[name], flush=True)
    show(results, "byte")
    record.append("decoders", arguments, results)


if __name__ == "__main__":
    main()

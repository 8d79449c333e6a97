"""Small models of ``transformers`` that generate, with inputs, their int8 models, and these as interpreted graphs."""

import copy
from functools import cache

import torch
from torch import nn

from intaglio import Recipe, Setting, stages
from intaglio.integrations import ExportExample
from support.transformers_library import library

VOCABULARY, PAD, END = 64, 0, 63
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": END}
WIDE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
PAIR |= {
    "init_std": 0.05,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {**WIDE, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {**WIDE, "num_key_value_heads": 2, "sliding_window": 6}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **WIDE,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        {
            **WIDE,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            **{"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 40},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 6},
        },
    ),
    "opt": ("OPTForCausalLM", {**WIDE, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "roberta": ("RobertaForCausalLM", {**WIDE, "is_decoder": True, "max_position_embeddings": 64}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}),
    "bart": ("BartForConditionalGeneration", {**PAIR, "forced_eos_token_id": None}),
    "whisper": ("WhisperForConditionalGeneration", {**PAIR, "num_mel_bins": 16, "max_source_positions": 20}),
}
MORE = {
    "opt": {"intermediate_size": None},
    "t5": {"decoder_start_token_id": PAD, "initializer_factor": 4.0},
    "whisper": {"max_target_positions": 40, "suppress_tokens": None, "begin_suppress_tokens": None},
}


def float_model(name: str, **settings) -> nn.Module:
    kind, own = MODELS[name]
    entries = {**SIZES, **own, **MORE.get(name, {}), **settings}
    found = getattr(library(), kind)
    torch.manual_seed(0)
    model = found(found.config_class(**{key: value for key, value in entries.items() if value is not None})).eval()
    for parameter in model.parameters():  # tokens depend on those before, not on the last one alone
        parameter.data.mul_(2 if parameter.dim() > 1 and name != "t5" else 1)
    return model


def batch(name: str, size: int = 4, length: int = 12, padding: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a model; the first sample begins with padding in decoders, and ends with it in encoders."""
    draw = torch.Generator().manual_seed(seed)
    words = {"generator": draw, "size": (size, length)}
    if name == "whisper":
        return {"input_features": torch.randn(size, 16, 40, generator=draw)}
    mask = torch.ones(size, length, dtype=torch.int64)
    mask[0, slice(-padding, None) if name in ("t5", "bart") else slice(padding)] = 1 if not padding else 0
    return {"input_ids": torch.randint(2, END, **words) * mask, "attention_mask": mask}


def calibration(name: str) -> list[dict[str, torch.Tensor]]:
    batches = [batch(name, seed=seed) for seed in range(4)]
    if "input_features" in batches[0] or name in ("t5", "bart"):
        draw = torch.Generator().manual_seed(9)
        batches = [{**one, "labels": torch.randint(2, END, (4, 9), generator=draw)} for one in batches]
    return batches


class InterpretedProgram(nn.Module):
    """The interpreter in the place of a program."""

    def __init__(self, lowered: stages.Lowered) -> None:
        super().__init__()
        self.lowered, self.signature = lowered, lowered.signature

    def forward(self, *args):
        return self.lowered(*args)


@cache
def quantized(name: str, keys_and_values: str = "float"):
    """The float model, the int8 model, and the same with interpreted graphs in place of programs."""
    model, graphs = float_model(name), []
    from intaglio.integrations.transformers.generation import quantize_generator

    def quantize(module, data, example):
        calls = list(data)
        given = example or ExportExample(calls[0], None)
        recipe = Recipe(default=Setting(cache=keys_and_values))
        quantizer = stages.Quantizer(recipe, cached_inputs=given.cached_inputs)
        prepared = stages.prepare(stages.capture(module, given.inputs, dynamic_shapes=given.dynamic_shapes), quantizer)
        reference = stages.convert(prepared, stages.calibrate(prepared, calls, progress=False))
        graphs.append(stages.requantize(reference))
        return stages.compile(reference)

    int8_model = quantize_generator(model, calibration(name), quantize)
    interpreted = copy.copy(int8_model)
    names = ["encoder", "cross_attention", "decoder"] if len(graphs) == 3 else ["decoder"]
    programs = {kind: InterpretedProgram(one) for kind, one in zip(names, graphs, strict=True)}
    interpreted._modules = {"programs": nn.ModuleDict(programs)}
    return model, int8_model, interpreted


def generated(model, inputs, **settings) -> torch.Tensor:
    torch.manual_seed(3)
    given = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END, **settings}
    return model.generate(**inputs, **given)

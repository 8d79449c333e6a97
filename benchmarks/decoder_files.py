"""Files of decoders for other engines, written from the weights of a ``transformers`` model: GGUF and ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnx
import torch
import transformers
from decoder_networks import NEW, PAST
from onnx import TensorProto, helper, numpy_helper

GROUP = 32
"""Weights that share a scale in the ONNX file."""


def write_gguf(model: transformers.PreTrainedModel, path: Path) -> None:
    """Write a file of llama.cpp with matrices in float16 and everything else in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = interleaved(tensor, head)
        array = tensor.numpy().astype(np.float16 if tensor.dim() == 2 else np.float32)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: torch.Tensor, head: int) -> torch.Tensor:
    """Order the rows of each head so that neighbours are rotated together, as llama.cpp does for this architecture."""
    return weight.unflatten(0, (-1, 2, head // 2)).transpose(1, 2).reshape(weight.shape)


def write_onnx(model: transformers.PreTrainedModel, bits: int, path: Path) -> None:
    """Write a decoder of the operators that ONNX Runtime has for generation, with its data beside it."""
    onnx.save(OnnxDecoder(model, bits).model(), path, save_as_external_data=True, location=f"{path.name}.data")


class OnnxDecoder:
    """Collects nodes and weights. Layers are MatMulNBits in groups of 32 that quantize activations to 8 bits."""

    def __init__(self, model: transformers.PreTrainedModel, bits: int) -> None:
        self.source, self.config, self.bits = model, model.config, bits
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.head: int = model.model.layers[0].self_attn.head_dim

    def model(self) -> onnx.ModelProto:
        self.constant("table", self.source.model.embed_tokens.weight.detach().numpy().astype(np.float16))
        self.add("Gather", ["table", "ids"], ["half"])
        self.add("Cast", ["half"], ["x"], to=TensorProto.FLOAT)
        angles = np.outer(np.arange(PAST + NEW), self.frequencies()).astype(np.float32)
        self.constant("cosine", np.cos(angles))
        self.constant("sine", np.sin(angles))
        self.norm(self.source.model.layers[0].input_layernorm, "x", "given_0")
        sums, following = "x", [layer.input_layernorm for layer in self.source.model.layers[1:]]
        for index, norm in enumerate([*following, self.source.model.norm]):
            sums = self.layer(index, sums, norm)
        count = self.config.num_hidden_layers
        self.constant("last", np.array([-1], np.int64))
        self.add("Gather", [f"given_{count}", "last"], ["kept"], axis=1)
        self.linear("output", [self.source.lm_head], "kept", "logits")
        return self.finished()

    def frequencies(self) -> np.ndarray:
        return self.config.rope_parameters["rope_theta"] ** (-np.arange(0, self.head, 2) / self.head)

    def layer(self, index: int, x: str, following: Any) -> str:
        """Add a layer, whose normalized input exists, and return the name of its result."""
        layer, name = self.source.model.layers[index], f"layer_{index}"
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        given = f"given_{index}"
        if hasattr(attention, "q_norm"):
            heads = [f"{name}_{part}" for part in "qkv"]
            for projection, result in zip(projections, heads, strict=True):
                self.linear(result, [projection], given, result)
            for part, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
                self.norm_of_heads(f"{name}_{part}", norm)
            heads = [f"{name}_q_normed", f"{name}_k_normed", heads[2]]
        else:
            self.linear(f"{name}_qkv", projections, given, f"{name}_qkv")
            heads = [f"{name}_qkv", "", ""]
        past, present = ([f"{kind}_{part}_{index}" for part in ("keys", "values")] for kind in ("past", "present"))
        inputs = [*heads, *past, "lengths", "total", "cosine", "sine"]
        counts = {"num_heads": self.config.num_attention_heads, "kv_num_heads": self.config.num_key_value_heads}
        self.add("GroupQueryAttention", inputs, [f"{name}_a", *present], "com.microsoft", do_rotary=1, **counts)
        self.linear(f"{name}_o", [attention.o_proj], f"{name}_a", f"{name}_ao")
        self.added_norm(layer.post_attention_layernorm, x, f"{name}_ao", f"{name}_given", f"{name}_x")
        self.linear(f"{name}_gate", [layer.mlp.gate_proj], f"{name}_given", f"{name}_g")
        self.linear(f"{name}_up", [layer.mlp.up_proj], f"{name}_given", f"{name}_u")
        self.add("Sigmoid", [f"{name}_g"], [f"{name}_s"])
        self.add("Mul", [f"{name}_g", f"{name}_s"], [f"{name}_silu"])
        self.add("Mul", [f"{name}_silu", f"{name}_u"], [f"{name}_m"])
        self.linear(f"{name}_down", [layer.mlp.down_proj], f"{name}_m", f"{name}_mo")
        self.added_norm(following, f"{name}_x", f"{name}_mo", f"given_{index + 1}", f"{name}_result")
        return f"{name}_result"

    def linear(self, name: str, layers: Any, x: str, result: str) -> None:
        """Add the rows of layers as one MatMulNBits."""
        weight = np.concatenate([layer.weight.detach().numpy() for layer in layers])
        packed, scales = packed_groups(weight, self.bits)
        self.constant(f"{name}_w", packed)
        self.constant(f"{name}_scales", scales)
        inputs = [x, f"{name}_w", f"{name}_scales"]
        if layers[0].bias is not None:
            self.constant(f"{name}_bias", np.concatenate([layer.bias.detach().numpy() for layer in layers]))
            inputs += ["", "", f"{name}_bias"]
        sizes = {"N": weight.shape[0], "K": weight.shape[1], "bits": self.bits, "block_size": GROUP}
        self.add("MatMulNBits", inputs, [result], "com.microsoft", accuracy_level=4, **sizes)

    def norm(self, norm: Any, x: str, result: str) -> None:
        self.constant(f"{result}_norm", norm.weight.detach().numpy())
        epsilon = self.config.rms_norm_eps
        self.add("SimplifiedLayerNormalization", [x, f"{result}_norm"], [result], axis=-1, epsilon=epsilon)

    def added_norm(self, norm: Any, x: str, y: str, result: str, total: str) -> None:
        """Add two tensors and normalize the sum, which is a result too."""
        self.constant(f"{result}_norm", norm.weight.detach().numpy())
        outputs = [result, "", "", total]
        epsilon = self.config.rms_norm_eps
        inputs = [x, y, f"{result}_norm"]
        self.add("SkipSimplifiedLayerNormalization", inputs, outputs, "com.microsoft", epsilon=epsilon)

    def norm_of_heads(self, name: str, norm: Any) -> None:
        """Normalize every head of the queries or keys ``name``."""
        self.constant(f"{name}_heads", np.array([0, 0, -1, self.head], np.int64))
        self.constant(f"{name}_flat", np.array([0, 0, -1], np.int64))
        self.add("Reshape", [name, f"{name}_heads"], [f"{name}_split"])
        self.norm(norm, f"{name}_split", f"{name}_normed_heads")
        self.add("Reshape", [f"{name}_normed_heads", f"{name}_flat"], [f"{name}_normed"])

    def constant(self, name: str, array: np.ndarray) -> None:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))

    def add(self, kind: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> None:
        self.nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))

    def finished(self) -> onnx.ModelProto:
        cache = ["batch", self.config.num_key_value_heads, "room", self.head]
        kinds = {"ids": (TensorProto.INT64, ["batch", "new"]), "lengths": (TensorProto.INT32, ["batch"])}
        kinds["total"] = (TensorProto.INT32, [1])
        results = {"logits": (TensorProto.FLOAT, ["batch", 1, self.config.vocab_size])}
        for index in range(self.config.num_hidden_layers):
            for part in ("keys", "values"):
                kinds[f"past_{part}_{index}"] = results[f"present_{part}_{index}"] = (TensorProto.FLOAT, cache)
        inputs, outputs = (
            [helper.make_tensor_value_info(name, *kind) for name, kind in found.items()] for found in (kinds, results)
        )
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def packed_groups(weight: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return weights in groups, with the zero point in the middle, as MatMulNBits takes them, and their scales.

    The value with the largest magnitude of each group is the lowest quantized value, as in Q4_0 and Q8_0.
    """
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, inputs // GROUP, GROUP)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    middle = 1 << bits - 1
    scales = extreme / -middle
    scales[scales == 0] = 1
    values = np.clip(np.rint(groups / scales) + middle, 0, 2 * middle - 1).astype(np.uint8)
    if bits == 4:
        values = values[..., ::2] | values[..., 1::2] << 4
    return values, scales[..., 0].astype(np.float32)

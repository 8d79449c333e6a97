"""Serve a quantized decoder with the API of OpenAI's chat completions, by LitServe. Needs transformers and litserve.

    python examples/serve_decoder.py                    a tiny Llama with random weights, one token for each byte
    python examples/serve_decoder.py FOLDER             the model and the tokenizer in a folder, quantized by "w4a8"

    curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"model": "lit", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}'

Texts are sent word by word if the request says ``"stream": true``.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import litserve
import tokenizers
import torch
import transformers

import intaglio

MOST_TOKENS = 64
"""Largest number of tokens of an answer to a request without a limit of its own."""


class Decoder(litserve.LitAPI):
    """Answers chats with an int8 model, one request after the other."""

    def __init__(self, folder: Path) -> None:
        super().__init__(spec=litserve.OpenAISpec())
        self.folder = folder

    def setup(self, device: str) -> None:
        """Load the model and the tokenizer in the process that computes."""
        self.model = intaglio.load(self.folder / "model.intaglio", trust=True)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)

    def predict(self, messages: list[dict[str, str]], context: dict[str, Any]) -> Iterator[str]:
        """Yield the words of the answer to a chat."""
        chat = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        words = transformers.TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        settings = {"max_new_tokens": context.get("max_completion_tokens") or context.get("max_tokens") or MOST_TOKENS}
        if temperature := context.get("temperature"):
            settings |= {"do_sample": True, "temperature": temperature, "top_p": context.get("top_p") or 1.0}

        def generate() -> None:
            try:
                self.model.generate(**chat, **settings, streamer=words)
            finally:
                words.end()  # also if it fails, so that the answer ends

        thread = threading.Thread(target=generate)
        thread.start()
        yield from words
        thread.join()


def tiny_model() -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Return a Llama with random weights and a tokenizer with one token for each byte."""
    torch.manual_seed(0)
    letters = {character: number for number, character in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={**letters, "<end>": len(letters)}, merges=[]))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}"
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.LlamaForCausalLM(config).eval(), tokenizer


def quantize(source: Path | None, folder: Path) -> None:
    """Quantize the model of a folder, or the tiny one, and write it with its tokenizer."""
    if source is None:
        model, tokenizer = tiny_model()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(intaglio.__file__).parent.glob("*.py"))[:8]]
    batches = [{"input_ids": torch.tensor([tokenizer(text)["input_ids"][:128]])} for text in texts]
    intaglio.quantize(model, batches, recipe="w4a8").save(folder / "model.intaglio")
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="folder with a model and a tokenizer of transformers")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        quantize(arguments.folder, Path(temporary))
        server = litserve.LitServer(Decoder(Path(temporary)), accelerator="cpu", timeout=600)
        server.run(host="127.0.0.1", port=arguments.port, generate_client_file=False)

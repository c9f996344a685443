"""Tiny random models, in folders that transformers loads; and tokenizers of a few words for them."""

from __future__ import annotations

import pytest

END = 256


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the folder of a model of a kind, "qwen3", "llama" or "gpt2", with random weights and 260 token ids."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # these models are too small for more
    folders = {}
    decoder = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {
        "qwen3": decoder | heads | {"head_dim": 8},
        "llama": decoder | heads,
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    }

    def folder(kind):
        if kind not in folders:
            torch.manual_seed(0)
            config = transformers.AutoConfig.for_model(
                kind, vocab_size=260, eos_token_id=END, initializer_range=0.2, **sizes[kind]
            )
            folders[kind] = tmp_path_factory.mktemp(kind)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[kind])
        return str(folders[kind])

    return folder

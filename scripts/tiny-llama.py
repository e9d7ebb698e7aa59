"""Writes a small Llama with random weights and a byte-level BPE, as vLLM loads it: tiny-llama.py FOLDER [SEED]."""
import json, pathlib, sys

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

out = pathlib.Path(sys.argv[1])
rnd = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
out.mkdir(parents=True, exist_ok=True)
tok = Tokenizer(models.BPE())
tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tok.decoder = decoders.ByteLevel()
words = " ".join(dir(np)).replace("_", " ")
tok.train_from_iterator([words, pathlib.Path(__file__).read_text()], trainers.BpeTrainer(
    vocab_size=1024, special_tokens=["<s>", "</s>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
tok.save(str(out / "tokenizer.json"))
vocab, dim, layers, heads, kv, ffn = tok.get_vocab_size(), 128, 2, 4, 2, 256
(out / "tokenizer_config.json").write_text(json.dumps({
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "model_max_length": 2048, "clean_up_tokenization_spaces": False,
    "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if not loop.last or add_generation_prompt %}\n{% endif %}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"}))
(out / "config.json").write_text(json.dumps({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim, "intermediate_size": ffn,
    "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim // heads, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"}))
(out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 1}))


def r(*shape, scale=0.2):
    return (rnd.standard_normal(shape) * scale * np.sqrt(64 / shape[-1])).astype(np.float32)


w = {"model.embed_tokens.weight": r(vocab, dim, scale=0.6), "model.norm.weight": np.ones(dim, np.float32), "lm_head.weight": r(vocab, dim)}
for i in range(layers):
    p = f"model.layers.{i}."
    w |= {p + n + ".weight": np.ones(dim, np.float32) for n in ("input_layernorm", "post_attention_layernorm")}
    for n, rows, cols in (("self_attn.q_proj", dim, dim), ("self_attn.k_proj", dim // 2, dim), ("self_attn.v_proj", dim // 2, dim), ("self_attn.o_proj", dim, dim),
                          ("mlp.gate_proj", ffn, dim), ("mlp.up_proj", ffn, dim), ("mlp.down_proj", dim, ffn)):
        w[p + n + ".weight"] = r(rows, cols)
save_file(w, str(out / "model.safetensors"), metadata={"format": "pt"})

package kvplan

import (
	"bytes"
	"encoding/binary"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/kvcache"
)

// models are configurations as Hugging Face has them, with what a token takes.
func models() map[string]struct {
	config string
	token  int64
} {
	return map[string]struct {
		config string
		token  int64
	}{
		"Llama-3.1-8B":  {`{"model_type":"llama","num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"hidden_size":4096,"torch_dtype":"bfloat16","max_position_embeddings":131072}`, 131072},
		"Llama-3.1-70B": {`{"model_type":"llama","num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"hidden_size":8192,"torch_dtype":"bfloat16"}`, 327680},
		"Qwen2.5-72B":   {`{"model_type":"qwen2","num_hidden_layers":80,"num_attention_heads":64,"num_key_value_heads":8,"hidden_size":8192,"torch_dtype":"bfloat16","sliding_window":131072,"use_sliding_window":false,"max_window_layers":70}`, 327680},
		"Qwen2.5-7B":    {`{"model_type":"qwen2","num_hidden_layers":28,"num_attention_heads":28,"num_key_value_heads":4,"hidden_size":3584,"torch_dtype":"bfloat16"}`, 57344},
		"Qwen3-8B":      {`{"model_type":"qwen3","num_hidden_layers":36,"num_attention_heads":32,"num_key_value_heads":8,"head_dim":128,"hidden_size":4096,"dtype":"bfloat16"}`, 147456},
		"Qwen3-32B":     {`{"model_type":"qwen3","num_hidden_layers":64,"num_attention_heads":64,"num_key_value_heads":8,"head_dim":128,"hidden_size":5120,"torch_dtype":"bfloat16"}`, 262144},
		"Qwen3-235B":    {`{"model_type":"qwen3_moe","num_hidden_layers":94,"num_attention_heads":64,"num_key_value_heads":4,"head_dim":128,"hidden_size":4096,"torch_dtype":"bfloat16"}`, 192512},
		"DeepSeek-V3":   {`{"model_type":"deepseek_v3","num_hidden_layers":61,"num_attention_heads":128,"num_key_value_heads":128,"hidden_size":7168,"kv_lora_rank":512,"qk_rope_head_dim":64,"torch_dtype":"bfloat16"}`, 70272},
	}
}

// TestTable: bytes per token, and GiB of 32k tokens raw, in INT8 and in INT4, of known models.
func TestTable(t *testing.T) {
	gib := map[string][3]float64{
		"Llama-3.1-8B": {4, 2.12, 1.12}, "Llama-3.1-70B": {10, 5.31, 2.81}, "Qwen2.5-72B": {10, 5.31, 2.81}, "Qwen2.5-7B": {1.75, .93, .49},
		"Qwen3-8B": {4.5, 2.39, 1.27}, "Qwen3-32B": {8, 4.25, 2.25}, "Qwen3-235B": {5.88, 3.12, 1.65}, "DeepSeek-V3": {2.14, 1.14, .60},
	}
	for name, m := range models() {
		s, err := ParseConfig([]byte(m.config))
		if err != nil {
			t.Fatal(err)
		}
		if n := s.TokenBytes(); n != m.token {
			t.Errorf("%s: %d bytes per token, want %d", name, n, m.token)
		}
		for i, codec := range []kvcache.Codec{kvcache.CodecRaw, kvcache.CodecInt8, kvcache.CodecInt4} {
			p, err := Make(s, Config{Context: 32768, Codec: codec})
			if err != nil {
				t.Fatal(err)
			}
			if got := float64(p.StreamBytes) / (1 << 30); math.Abs(got-gib[name][i]) > .01 {
				t.Errorf("%s as %v: %.3f GiB, want %.2f", name, codec, got, gib[name][i])
			}
		}
	}
}

// near says whether two numbers are within a per cent.
func near(a, b float64) bool { return math.Abs(a-b) <= b/100 }

// TestPlan: rates and sums of a host.
func TestPlan(t *testing.T) {
	s, err := ParseConfig([]byte(models()["Llama-3.1-8B"].config))
	if err != nil {
		t.Fatal(err)
	}
	for codec, mb := range map[kvcache.Codec]float64{kvcache.CodecRaw: 336, kvcache.CodecInt8: 178, kvcache.CodecInt4: 94} {
		p, err := Make(s, Config{Streams: 64, Decode: 40, Codec: codec})
		if err != nil || !near(p.DecodeBytes, mb*1e6) {
			t.Errorf("%v: %g bytes per second are decoded, want %g MB: %v", codec, p.DecodeBytes, mb, err)
		}
	}
	p, err := Make(s, Config{Context: 8192, Output: 2048, Streams: 10, Decode: 32, Prefill: 15_000, RF: 3, Retention: 100 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if p.StreamBytes != 1<<30 || p.Memory != 30<<30 || !near(p.BreakEven, 1.97e9) || !near(p.ReplicationPeak, 2*131072*(15_000+320)) {
		t.Errorf("%+v", p)
	}
	// 10 streams of 1 GiB in 64.4 s each, three copies, for 100 s.
	if rate := 10 * (1 << 30) / (6144.0/15000 + 64); !near(p.Replication, 2*rate) || !near(p.Written, 3*rate) || !near(float64(p.NVMe), 300*rate) {
		t.Errorf("%+v, want a rate of %g", p, rate)
	}
	if p, err := Make(s, Config{RF: 1}); err != nil || p.Replication != 0 || p.ReplicationPeak != 0 {
		t.Errorf("a single copy is sent: %+v, %v", p, err)
	}
	for _, bad := range []Config{
		{Context: -1}, {Context: 10, Output: 11}, {Streams: -1}, {RF: 17}, {Decode: -1}, {Prefill: math.NaN()}, {Link: math.Inf(1)}, {Retention: -1}, {Codec: 9},
	} {
		if _, err := Make(s, bad); err == nil {
			t.Errorf("%+v is taken", bad)
		}
	}
	if p, err := Make(s, Config{Context: 200_000}); err != nil || len(p.Shape.Notes) != 1 {
		t.Errorf("more than the model's context: %v, %v", p.Shape.Notes, err)
	}
}

// TestWindows: layers with a window keep that many tokens.
func TestWindows(t *testing.T) {
	for name, c := range map[string]struct {
		config        string
		full, windows int
	}{
		"gemma 3":          {`{"model_type":"gemma3","text_config":{"num_hidden_layers":18,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":512,"sliding_window_pattern":6}}`, 3, 15},
		"by types":         {`{"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":512,"layer_types":["sliding_attention","full_attention","sliding_attention","linear_attention"]}`, 1, 2},
		"mistral":          {`{"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":512}`, 0, 4},
		"qwen2 with":       {`{"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":512,"use_sliding_window":true,"max_window_layers":3}`, 3, 1},
		"no window":        {`{"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":1,"head_dim":256,"sliding_window":null}`, 4, 0},
		"as long as heads": {`{"n_layer":4,"n_head":2,"n_embd":512,"multi_query":true}`, 4, 0},
	} {
		s, err := ParseConfig([]byte(c.config))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got, want := s.StreamBytes(2048), int64(2*2*256)*int64(2048*c.full+512*c.windows); got != want {
			t.Errorf("%s: %d bytes, want %d: %+v", name, got, want, s)
		}
	}
	for _, bad := range []string{
		"", "[]", "{}", `{"num_hidden_layers":4}`, `{"num_hidden_layers":-4,"num_attention_heads":1,"hidden_size":1}`, `{"num_hidden_layers":4,"num_attention_heads":8,"hidden_size":4}`,
		`{"num_hidden_layers":2,"num_attention_heads":1,"hidden_size":8,"layer_types":["linear_attention","mamba"]}`, `{"num_hidden_layers":4,"num_attention_heads":1,"head_dim":99999999}`,
	} {
		if s, err := ParseConfig([]byte(bad)); err == nil {
			t.Errorf("%s is taken: %+v", bad, s)
		}
	}
}

// ggufFile writes a header: numbers, and a list of texts before them.
func ggufFile(arch string, fields map[string][]uint32) []byte {
	le := binary.LittleEndian
	text := func(b []byte, s string) []byte { return append(le.AppendUint64(b, uint64(len(s))), s...) }
	b := append([]byte("GGUF"), 3, 0, 0, 0)
	b = le.AppendUint64(le.AppendUint64(b, 7), uint64(len(fields)+2))
	b = text(le.AppendUint32(text(b, "general.architecture"), 8), arch)
	b = le.AppendUint64(le.AppendUint32(le.AppendUint32(text(b, "tokenizer.ggml.tokens"), 9), 8), 2)
	b = text(text(b, "one"), "two")
	for name, list := range fields {
		b = text(b, arch+"."+name)
		if len(list) == 1 {
			b = le.AppendUint32(le.AppendUint32(b, 4), list[0])
			continue
		}
		b = le.AppendUint64(le.AppendUint32(le.AppendUint32(b, 9), 4), uint64(len(list)))
		for _, n := range list {
			b = le.AppendUint32(b, n)
		}
	}
	return b
}

func TestGGUF(t *testing.T) {
	for name, c := range map[string]struct {
		arch   string
		fields map[string][]uint32
		want   int64 // of 2,048 tokens
	}{
		"gemma 3": {"gemma3", map[string][]uint32{
			"block_count": {18}, "attention.head_count": {4}, "attention.head_count_kv": {1}, "attention.key_length": {256}, "attention.value_length": {256},
			"embedding_length": {640}, "attention.sliding_window": {512},
		}, 1024 * (3*2048 + 15*512)},
		"llama": {"llama", map[string][]uint32{"block_count": {32}, "attention.head_count": {32}, "attention.head_count_kv": {8}, "embedding_length": {4096}, "context_length": {8192}}, 131072 * 2048},
		"MLA": {"deepseek2", map[string][]uint32{
			"block_count": {61}, "attention.head_count": {128}, "attention.head_count_kv": {128}, "attention.key_length": {192}, "attention.value_length": {128},
			"attention.kv_lora_rank": {512}, "rope.dimension_count": {64}, "embedding_length": {7168},
		}, 70272 * 2048},
		"heads of each layer":   {"some", map[string][]uint32{"block_count": {3}, "attention.head_count": {4}, "attention.head_count_kv": {2, 0, 1}, "embedding_length": {256}}, 3 * 2 * 64 * 2 * 2048},
		"a window, who has it?": {"phi3", map[string][]uint32{"block_count": {2}, "attention.head_count": {1}, "embedding_length": {64}, "attention.sliding_window": {5}}, 2 * 2 * 64 * 2 * 2048},
	} {
		s, err := ParseGGUF(bytes.NewReader(ggufFile(c.arch, c.fields)))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := s.StreamBytes(2048); got != c.want {
			t.Errorf("%s: %d bytes, want %d: %+v", name, got, c.want, s)
		}
	}
	whole := ggufFile("llama", map[string][]uint32{"block_count": {1}, "attention.head_count": {1}, "embedding_length": {4}})
	for n := range whole {
		if s, err := ParseGGUF(bytes.NewReader(whole[:n])); err == nil {
			t.Fatalf("%d of %d bytes are taken: %+v", n, len(whole), s)
		}
	}
	if _, err := ParseGGUF(strings.NewReader("no model at all, but long enough for one")); err == nil {
		t.Error("another file is taken")
	}
}

// FuzzParse: no metadata harms, and what is taken gives a plan.
func FuzzParse(f *testing.F) {
	for _, m := range models() {
		f.Add([]byte(m.config))
	}
	f.Add(ggufFile("gemma3", map[string][]uint32{"block_count": {18}, "attention.head_count": {4}, "embedding_length": {640}, "attention.sliding_window": {512}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, parse := range []func() (Shape, error){func() (Shape, error) { return ParseConfig(b) }, func() (Shape, error) { return ParseGGUF(bytes.NewReader(b)) }} {
			s, err := parse()
			if err != nil {
				continue
			}
			if p, err := Make(s, Config{}); err != nil || p.TokenBytes < 0 || p.StreamBytes < 0 {
				t.Fatalf("%+v: %v", p, err)
			}
		}
	})
}

package kvplan

import (
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
)

// hfConfig is what matters of Hugging Face's config.json. Older models have other names.
type hfConfig struct {
	ModelType string    `json:"model_type"`
	Text      *hfConfig `json:"text_config"` // of models that see, too

	Layers  int  `json:"num_hidden_layers"`
	NLayer  int  `json:"n_layer"`
	Heads   int  `json:"num_attention_heads"`
	NHead   int  `json:"n_head"`
	KVHeads int  `json:"num_key_value_heads"`
	NumKV   int  `json:"num_kv_heads"`
	MultiQ  bool `json:"multi_query"`
	Hidden  int  `json:"hidden_size"`
	NEmbd   int  `json:"n_embd"`
	HeadDim int  `json:"head_dim"`
	Latent  int  `json:"kv_lora_rank"`
	Rope    int  `json:"qk_rope_head_dim"`

	Window     int      `json:"sliding_window"`
	UseWindow  *bool    `json:"use_sliding_window"`
	FullLayers int      `json:"max_window_layers"` // before the first with a window
	Pattern    int      `json:"sliding_window_pattern"`
	Types      []string `json:"layer_types"`

	Context int    `json:"max_position_embeddings"`
	NCtx    int    `json:"n_positions"`
	DType   string `json:"torch_dtype"`
	DType2  string `json:"dtype"`
}

// maxLayers bounds the layers of a model.
const maxLayers = 1 << 12

// ParseConfig reads Hugging Face's config.json.
func ParseConfig(b []byte) (Shape, error) {
	var c hfConfig
	if err := json.Unmarshal(b, &c); err != nil {
		return Shape{}, fmt.Errorf("no config.json of a model: %w", err)
	}
	if t := c.Text; t != nil {
		t.ModelType = cmp.Or(t.ModelType, c.ModelType)
		t.DType = cmp.Or(t.DType, t.DType2, c.DType, c.DType2)
		c = *t
	}
	c.Layers, c.Heads = cmp.Or(c.Layers, c.NLayer), cmp.Or(c.Heads, c.NHead)
	c.Hidden, c.Context = cmp.Or(c.Hidden, c.NEmbd), cmp.Or(c.Context, c.NCtx)
	if c.Layers < 1 || c.Layers > maxLayers {
		return Shape{}, fmt.Errorf("config.json has no num_hidden_layers between 1 and %d", maxLayers)
	}
	h, err := c.heads()
	if err != nil {
		return Shape{}, err
	}
	s := Shape{Arch: c.ModelType, Bits: 16, Context: c.Context}
	switch strings.TrimPrefix(cmp.Or(c.DType, c.DType2), "torch.") {
	case "float32":
		s.Bits = 32
	case "float16", "bfloat16":
	default:
		s.Notes = append(s.Notes, "no type of 16 or 32 bits is said: KV is taken to have 16")
	}
	c.groups(&s, h.values())
	if err := s.validate(); err != nil {
		return Shape{}, fmt.Errorf("config.json: %w", err)
	}
	return s, nil
}

// heads are the sizes of attention.
func (c *hfConfig) heads() (heads, error) {
	if c.Latent > 0 {
		return heads{latent: c.Latent + c.Rope}, nil
	}
	kv := cmp.Or(c.KVHeads, c.NumKV)
	if kv == 0 && c.MultiQ {
		kv = 1
	}
	kv = cmp.Or(kv, c.Heads)
	dim := c.HeadDim
	if dim == 0 && c.Heads > 0 {
		dim = c.Hidden / c.Heads
	}
	if kv < 1 || kv > most || dim < 1 || dim > most {
		return heads{}, fmt.Errorf("config.json has no num_key_value_heads or num_attention_heads, or no head_dim or hidden_size")
	}
	return heads{kv: kv, key: dim, value: dim}, nil
}

// groups says which layers keep what.
func (c *hfConfig) groups(s *Shape, values int) {
	window := c.Window
	if c.UseWindow != nil && !*c.UseWindow {
		window = 0
	}
	switch {
	case len(c.Types) > 0:
		c.typed(s, values)
	case window > 0 && c.Pattern > 0:
		s.Groups = windows(c.Layers, values, window, every(c.Pattern))
	case window > 0 && c.UseWindow != nil:
		s.Groups = windows(c.Layers, values, window, func(i int) bool { return i >= c.FullLayers })
	default:
		s.Groups = windows(c.Layers, values, window, func(int) bool { return true })
	}
}

// typed goes by the list of the kinds of layers.
func (c *hfConfig) typed(s *Shape, values int) {
	full, some, other := Group{Values: values}, Group{Values: values, Window: c.Window}, 0
	for _, t := range c.Types {
		switch {
		case t == "sliding_attention" && c.Window > 0:
			some.Layers++
		case strings.HasSuffix(t, "attention") && t != "linear_attention":
			full.Layers++
		default:
			other++
		}
	}
	for _, g := range []Group{full, some} {
		if g.Layers > 0 {
			s.Groups = append(s.Groups, g)
		}
	}
	if other > 0 {
		s.Notes = append(s.Notes, fmt.Sprintf("%d layers with a recurrent state are not counted: it does not grow with the sequence", other))
	}
}

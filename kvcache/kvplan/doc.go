// Package kvplan says how much room and bandwidth the KV of a model needs, from the
// model's metadata: Hugging Face's config.json or the header of a GGUF file. It does no
// more than arithmetic:
//
//	bytes per token = 2 × layers × KV heads × head dimension × bytes per value
//
// and for multi-head latent attention (MLA) layers × (latent rank + rope dimension) ×
// bytes per value. Layers with a sliding window keep that many tokens and no more; layers
// with a recurrent state are not counted, and Shape.Notes says so.
package kvplan

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/kvcache"
	"github.com/kvmesh/kvmesh/kvcache/kvplan"
)

// kvPlanOptions are the flags of `kvmesh kv plan`.
type kvPlanOptions struct {
	kvplan.Config
	model, codec, output string
}

func kvPlanCommand(e *env) *cobra.Command {
	o := kvPlanOptions{}
	c := &cobra.Command{
		Use:   "plan --model FILE",
		Short: "Say how much memory, disk and network the KV of a model needs",
		Long: `Plan reads a model's metadata, Hugging Face's config.json, the folder it is in, or
a GGUF file, and says what one host needs for the KV of its streams: in memory, on disk
and to other hosts, and how fast a restore must be to beat prefill. Nothing is measured:
give the rates of your engine.`,
		Example: `  kvmesh kv plan --model /models/Llama-3.1-8B --context 32768 --streams 64
  kvmesh kv plan --model gemma-3-270m.gguf --codec int8 --prefill 2000 -o json | jq .nvme_bytes`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return planKV(e, o) },
	}
	f := c.Flags()
	f.StringVar(&o.model, "model", "", "config.json, its folder, or a GGUF file")
	f.IntVar(&o.Context, "context", 8192, "tokens of a stream at its end")
	f.IntVar(&o.Output, "output-tokens", 0, "how many of them are generated (default a quarter)")
	f.IntVar(&o.Streams, "streams", 64, "streams at once on one host")
	f.Float64Var(&o.Decode, "decode", 40, "tokens per second of one stream")
	f.Float64Var(&o.Prefill, "prefill", 8000, "tokens per second of one host's prefill")
	f.DurationVar(&o.Retention, "retention", 0, "how long KV is kept for prompts to come (default 1h)")
	f.IntVar(&o.RF, "rf", 2, "on how many hosts a block is")
	f.Float64Var(&o.Link, "link", 1.25e9, "bytes per second that reach a host")
	f.StringVar(&o.codec, "codec", "raw", "how blocks are stored: raw, int8 or int4")
	outputFlag(c, &o.output)
	_ = c.MarkFlagRequired("model")
	return c
}

// planKV reads the metadata and prints the plan. Zeros that somebody gave are mistakes, since
// they would be taken for defaults.
func planKV(e *env, o kvPlanOptions) error {
	js, err := asJSON(o.output)
	if err != nil {
		return err
	}
	if o.Context == 0 || o.Streams == 0 || o.RF == 0 || o.Decode == 0 || o.Prefill == 0 || o.Link == 0 {
		return usagef("--context, --streams, --rf, --decode, --prefill and --link are above 0")
	}
	if o.Codec, err = kvcache.ParseCodec(o.codec); err != nil {
		return usagef("--codec: %w", err)
	}
	shape, err := readShape(o.model)
	if err != nil {
		return withHint(err, "give --model the config.json of a model for transformers or vLLM, its folder, or a GGUF file")
	}
	p, err := kvplan.Make(shape, o.Config)
	if err != nil {
		return usagef("%w", err)
	}
	if js {
		return writeJSON(e.stdout, p)
	}
	printKVPlan(e.stdout, p)
	return nil
}

// mostConfig bounds a config.json.
const mostConfig = 16 << 20

// readShape reads the metadata of a model. Which of the two forms a file has is told by its
// first four bytes and not by its name, since models are often stored under a hash. Of a
// GGUF file no more than the header is read, however large it is.
func readShape(path string) (s kvplan.Shape, err error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, "config.json")
	}
	f, err := os.Open(path)
	if err != nil {
		return s, fmt.Errorf("metadata of the model: %w", err)
	}
	defer f.Close()
	var magic [4]byte
	n, err := io.ReadFull(f, magic[:])
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		return s, fmt.Errorf("metadata of the model: read %s: %w", path, err)
	}
	rest := io.MultiReader(bytes.NewReader(magic[:n]), f)
	if string(magic[:]) == "GGUF" {
		s, err = kvplan.ParseGGUF(rest)
	} else {
		var text []byte
		if text, err = io.ReadAll(io.LimitReader(rest, mostConfig)); err == nil {
			s, err = kvplan.ParseConfig(text)
		}
	}
	if err != nil {
		return s, fmt.Errorf("metadata of the model: %s: %w", path, err)
	}
	return s, nil
}

// printKVPlan prints a plan for people: one line for each thing to be bought or set, with
// the flag that sets it where there is one, and then what the metadata left open.
func printKVPlan(w io.Writer, p kvplan.Plan) {
	c := p.Config
	fmt.Fprintf(w, "model        %s: %s a token as the engine has it, %s stored as %s\n", dash(p.Shape.Arch), amount(float64(p.TokenBytes)), amount(p.StoredTokenBytes), p.Codec)
	fmt.Fprintf(w, "stream       %d tokens: %s\n", c.Context, amount(float64(p.StreamBytes)))
	fmt.Fprintf(w, "memory       %s for %d streams, in %d copies over the hosts; `kvmesh kvnode --limit %d` leaves an eighth for new ones\n", amount(float64(p.Memory)), c.Streams, c.RF, p.Memory+p.Memory/7)
	fmt.Fprintf(w, "disk         %s for %s, %s/s written; --nvme-limit %d\n", amount(float64(p.NVMe)), p.Retention, amount(p.Written), p.NVMe)
	fmt.Fprintf(w, "replication  %s/s on average, %s/s at most; decoding alone makes %s/s\n", amount(p.Replication), amount(p.ReplicationPeak), amount(p.DecodeBytes))
	fmt.Fprintf(w, "break-even   a restore of more than %s/s beats prefill at %g tokens/s\n", amount(p.BreakEven), c.Prefill)
	verdict := "restoring wins"
	if p.RestoreTime >= p.PrefillTime {
		verdict = "computing wins"
	}
	fmt.Fprintf(w, "a stream     %.3g s to prefill, %.3g s to restore over %s/s: %s\n", p.PrefillTime, p.RestoreTime, amount(c.Link), verdict)
	for _, n := range p.Shape.Notes {
		fmt.Fprintf(w, "note         %s\n", n)
	}
}

// amount writes bytes for people, in binary units and four digits: a plan is no more exact
// than the rates that it was made of.
func amount(n float64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for ; n >= 1024 && i < len(units)-1; i++ {
		n /= 1024
	}
	return fmt.Sprintf("%.4g %s", n, units[i])
}

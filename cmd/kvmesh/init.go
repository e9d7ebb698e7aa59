package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"
)

// starter is the policy that `kvmesh init` writes: the smallest mesh that runs,
// at most 15 lines.
const starter = `# Run it: kvmesh up -f %s
apiVersion: kvmesh.io/v1alpha1
kind: WorkerPool
metadata:
  name: main
spec:
  engine: %s
%s`

const starterLocal = `  model: %s
  local:
    - {id: worker-1, zone: zone-a}
    - {id: worker-2, zone: zone-b}
`

const starterStatic = `  static: # your servers
    - {url: "http://127.0.0.1:8000"}
    - {url: "http://127.0.0.1:8001"}
`

func initCommand(e *env) *cobra.Command {
	engine := "llamacpp"
	c := &cobra.Command{
		Use:   "init [FILE | -]",
		Short: "Write a small policy file to start from (default kvmesh.yaml; - is stdout)",
		Example: `  kvmesh init && kvmesh up -f kvmesh.yaml
  kvmesh init --engine openai mesh.yaml     # in front of your own vLLM servers`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			file := "kvmesh.yaml"
			if len(args) == 1 {
				file = args[0]
			}
			return writeStarter(e, file, engine)
		},
	}
	c.Flags().StringVar(&engine, "engine", engine, "llamacpp (fetched model), sim (simulated) or openai (your own servers)")
	_ = c.RegisterFlagCompletionFunc("engine", cobra.FixedCompletions([]string{"llamacpp", "sim", "openai"}, cobra.ShellCompDirectiveNoFileComp))
	return c
}

func writeStarter(e *env, file, engine string) error {
	body := starterStatic
	switch engine {
	case "llamacpp":
		body = fmt.Sprintf(starterLocal, "gemma-3-270m")
	case "sim":
		body = fmt.Sprintf(starterLocal, "sim-1")
	case "openai":
	default:
		return usagef("--engine %q: want llamacpp, sim or openai", engine)
	}
	if file == "-" {
		_, err := fmt.Fprintf(e.stdout, starter, "FILE", engine, body)
		return err
	}
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return withHint(fmt.Errorf("%s exists and is left as it is", file), "give another name: "+e.self()+" init OTHER.yaml")
	}
	if err != nil {
		return withHint(fmt.Errorf("write policy: %w", err), "give the path of a file in a folder that can be written, or - for stdout")
	}
	_, err = fmt.Fprintf(f, starter, file, engine, body)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write policy: %w", err)
	}
	fmt.Fprintf(e.stdout, "wrote %s; next: %s up -f %s\n", file, e.self(), file)
	return nil
}

package main

import (
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fetch"
)

// versions is what `kvmesh version -o json` prints.
type versions struct {
	Kvmesh   string `json:"kvmesh"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	// Assets are the pinned versions of what is fetched for this platform.
	Assets  map[string]string `json:"assets"`
	Modules map[string]string `json:"modules"`
}

func versionCommand(e *env) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of kvmesh and of what it is built from",
		Example: "  kvmesh version\n  kvmesh version -o json | jq -r .kvmesh",
		Args:    cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := readVersions()
			if ok, err := asJSON(output); err != nil {
				return err
			} else if ok {
				return writeJSON(e.stdout, v)
			}
			return v.print(e)
		},
	}
	outputFlag(c, &output)
	return c
}

// readVersions takes the versions from what the Go linker wrote into the binary.
func readVersions() versions {
	v := versions{
		Kvmesh: "(devel)", Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Assets: map[string]string{}, Modules: map[string]string{},
	}
	for _, name := range fetch.Names() {
		if version := fetch.Version(name, "", ""); version != "" {
			v.Assets[name] = version
		}
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return v
	}
	if info.Main.Version != "" {
		v.Kvmesh = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	for _, m := range info.Deps {
		switch m.Path {
		case "github.com/envoyproxy/go-control-plane", "github.com/envoyproxy/go-control-plane/envoy",
			"github.com/hybridgroup/yzma", "google.golang.org/grpc":
			v.Modules[m.Path] = m.Version
		}
	}
	return v
}

// print writes the versions as a table.
func (v versions) print(e *env) error {
	w := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "kvmesh\t%s %s\n", v.Kvmesh, v.Revision)
	fmt.Fprintf(w, "go\t%s %s\n", v.Go, v.Platform)
	for _, of := range []map[string]string{v.Assets, v.Modules} {
		for _, name := range slices.Sorted(maps.Keys(of)) {
			fmt.Fprintf(w, "%s\t%s\n", name, of[name])
		}
	}
	return w.Flush()
}

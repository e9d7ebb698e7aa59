package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/doctor"
	"github.com/kvmesh/kvmesh/internal/fetch"
)

// versions is what `kvmesh version -o json` prints.
type versions struct {
	Kvmesh   string `json:"kvmesh"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
	// Assets are the programs and files that a run uses.
	Assets  []assetVersion    `json:"assets"`
	Modules map[string]string `json:"modules"`
}

// assetVersion is one thing that kvmesh does not contain: the pinned one, or the
// user's own.
type assetVersion struct {
	Name string `json:"name"`
	// Version is the pin, or what an own program says of itself; "" is unknown.
	Version string `json:"version,omitempty"`
	// Path is where it is; "" when it is not fetched yet.
	Path string `json:"path,omitempty"`
	// Bytes is the size of a model's file.
	Bytes int64 `json:"bytes,omitempty"`
	// Own is the variable that names it; "" for the pinned one.
	Own string `json:"own,omitempty"`
}

func versionCommand(e *env) *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:     "version",
		Short:   "Print the versions of kvmesh and of what it is built from",
		Example: "  kvmesh version\n  kvmesh version -o json | jq -r .kvmesh",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			v := readVersions()
			v.Assets = e.assetVersions(c.Context())
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
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Modules: map[string]string{},
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

// askVersion is how long an own program may take to say its version.
const askVersion = 5 * time.Second

// assetVersions says what a run would use now. The user's own programs are asked; of
// an own model the path and the size are all there is to tell.
func (e *env) assetVersions(ctx context.Context) []assetVersion {
	cfg, err := fetchConfig(e)
	if err != nil {
		cfg.CacheDir = "/none" // no place for a cache: nothing is fetched yet
	}
	var list []assetVersion
	for _, name := range fetch.Names() {
		a := assetVersion{Name: name, Version: fetch.Version(name, "", "")}
		if own, _, err := fetch.Plan(cfg, name); err == nil && own.Get(name) != "" {
			a = assetVersion{Name: name, Path: own.Get(name), Own: ownedBy(e, name)}
			if name == fetch.Envoy || name == fetch.Redis {
				ctx, cancel := context.WithTimeout(ctx, askVersion)
				a.Version = doctor.Version(ctx, a.Path, "--version")
				cancel()
			}
		} else if paths, err := fetch.Locate(cfg, name); err == nil {
			a.Path = paths.Get(name)
		}
		if info, err := os.Stat(a.Path); err == nil && name == fetch.Model {
			a.Bytes = info.Size()
		}
		if a.Version != "" || a.Path != "" {
			list = append(list, a)
		}
	}
	return list
}

// ownedBy says where an own asset comes from: a variable, or the system.
func ownedBy(e *env, name string) string {
	if variable := fetch.Variable(name); e.getenv(variable) != "" {
		return variable
	}
	return "the system"
}

// describe is an asset's line.
func (a assetVersion) describe() string {
	text := cmp.Or(a.Version, "version unknown")
	if a.Name == fetch.Model {
		// A model's package has a version, the model has a name.
		text = fetch.ModelName + ", package " + a.Version
		if a.Own != "" {
			text = filepath.Base(a.Path)
		}
		if a.Bytes > 0 {
			text += fmt.Sprintf(", %.1f MB", float64(a.Bytes)/1e6)
		}
	}
	switch {
	case a.Own != "":
		return fmt.Sprintf("%s (%s, from %s)", text, a.Path, a.Own)
	case a.Path == "":
		return text + " (not fetched)"
	}
	return text
}

// print writes the versions as a table.
func (v versions) print(e *env) error {
	w := tabwriter.NewWriter(e.stdout, 0, 4, 2, ' ', 0)
	fmt.Fprintf(w, "kvmesh\t%s %s\n", v.Kvmesh, v.Revision)
	fmt.Fprintf(w, "go\t%s %s\n", v.Go, v.Platform)
	for _, a := range v.Assets {
		fmt.Fprintf(w, "%s\t%s\n", a.Name, a.describe())
	}
	for _, name := range slices.Sorted(maps.Keys(v.Modules)) {
		fmt.Fprintf(w, "%s\t%s\n", name, v.Modules[name])
	}
	return w.Flush()
}

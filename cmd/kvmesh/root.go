package main

import (
	"encoding/json"
	"io"
	"log/slog"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

// env is everything a command takes from outside: streams, environment
// variables and, once flags are parsed, the logger. A test passes its own.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	getenv         func(string) string
	// name is how the command was called, for lines that say what to call next.
	name string

	// log writes to stderr as --log-level and --log-format say. It is set
	// before any command's own code runs.
	log *slog.Logger
	// logLevel and logFormat are the flags' values, for a command that starts
	// child processes with the same ones.
	logLevel, logFormat string
	// started says that a command's own code was reached.
	started bool
}

// self is how a person calls this command again: by its path if it was called so.
func (e *env) self() string {
	if strings.ContainsRune(e.name, filepath.Separator) {
		return e.name
	}
	return "kvmesh"
}

// newRoot builds the whole command tree. A new subcommand is one function
// `xxxCommand(e *env) *cobra.Command` in its own file, and one line here.
func newRoot(e *env) *cobra.Command {
	root := &cobra.Command{
		Use:   "kvmesh",
		Short: "LLM serving behind a stock Envoy that goes on when workers do not",
		Example: `  kvmesh demo                            # see it at work, with a real model
  kvmesh up -f examples/quickstart.yaml  # the same, and it stays running
  kvmesh workers                         # status, weight and load
  kvmesh doctor                          # can this machine run it?`,
		SilenceErrors: true,
		SilenceUsage:  true,
		PersistentPreRunE: func(*cobra.Command, []string) error {
			return e.initLog()
		},
	}
	root.SetIn(e.stdin)
	root.SetOut(e.stdout)
	root.SetErr(e.stderr)
	root.PersistentFlags().StringVar(&e.logLevel, "log-level", "info", "least level to log: debug, info, warn or error")
	root.PersistentFlags().StringVar(&e.logFormat, "log-format", "text", "form of log lines on stderr: text or json")
	grouped(root, "A mesh on this machine:", upCommand(e), demoCommand(e), initCommand(e), doctorCommand(e), fetchCommand(e), modelsCommand(e), purgeCommand(e))
	grouped(root, "Looking at a running mesh:", workersCommand(e), streamsCommand(e), inspectCommand(e), kvCommand(e))
	grouped(root, "Changing a running mesh:", drainCommand(e), undrainCommand(e), migrateCommand(e), rolloutCommand(e), restartCommand(e), drillCommand(e))
	grouped(root, "Each part alone:", controlPlaneCommand(e), gatewayCommand(e), workerCommand(e), kvNodeCommand(e), lmcacheCommand(e))
	root.AddCommand(versionCommand(e), reapCommand(e))
	markStart(e, root)
	return root
}

// grouped adds commands under a heading of the help.
func grouped(root *cobra.Command, title string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: title, Title: title})
	for _, c := range commands {
		c.GroupID = title
		root.AddCommand(c)
	}
}

// markStart makes every command note that its own code was reached, so that run
// can tell a wrong call from a failed one.
func markStart(e *env, c *cobra.Command) {
	if runE := c.RunE; runE != nil {
		c.RunE = func(c *cobra.Command, args []string) error {
			e.started = true
			return runE(c, args)
		}
	}
	for _, sub := range c.Commands() {
		markStart(e, sub)
	}
}

// initLog builds the logger from the flags.
func (e *env) initLog() error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(e.logLevel)); err != nil {
		return usagef("--log-level %q: want debug, info, warn or error", e.logLevel)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch strings.ToLower(e.logFormat) {
	case "text":
		e.log = slog.New(slog.NewTextHandler(e.stderr, opts))
	case "json":
		e.log = slog.New(slog.NewJSONHandler(e.stderr, opts))
	default:
		return usagef("--log-format %q: want text or json", e.logFormat)
	}
	return nil
}

// outputFlag adds the flag -o, which every command with a result has: a form
// for people by default, or JSON for programs.
func outputFlag(c *cobra.Command, to *string) {
	c.Flags().StringVarP(to, "output", "o", "text", "form of the result: text or json")
	// The only error is an unknown flag, and it was just added.
	_ = c.RegisterFlagCompletionFunc("output",
		cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

// asJSON says whether -o asks for JSON, and refuses values it does not know.
func asJSON(output string) (bool, error) {
	switch output {
	case "json":
		return true, nil
	case "text", "table", "":
		return false, nil
	}
	return false, usagef("-o %q: want text or json", output)
}

// writeJSON prints one indented JSON document.
func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

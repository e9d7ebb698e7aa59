package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// migrateCommand makes `kvmesh migrate`. It asks the gateway and does not wait for the
// first token of the other worker.
func migrateCommand(e *env) *cobra.Command {
	var f meshFlags
	var to, output string
	c := &cobra.Command{
		Use:   "migrate STREAM",
		Short: "Move one stream to another worker",
		Long: `Move a running stream to another worker of the same weights: the best one, or --to.
Its client sees nothing of it. 'kvmesh streams' lists the streams with their workers;
the beginning of an id is enough where only one stream has it.`,
		Example: `  kvmesh migrate tkl_sQysLJto4XQhRBEbzA
  kvmesh migrate tkl_ --to worker-3`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: streamNames(e, &f),
		RunE: func(c *cobra.Command, args []string) error {
			js, err := asJSON(output)
			if err != nil {
				return err
			}
			gateway, err := f.findGateway(c.Context(), e)
			if err != nil {
				return err
			}
			id, err := wholeID(c.Context(), gateway, args[0])
			if err != nil {
				return err
			}
			if err := migrate(c.Context(), gateway, id, to); err != nil {
				return fmt.Errorf("migrate %s: %w", id, err)
			}
			if js {
				return writeJSON(e.stdout, asked{id, to})
			}
			_, err = fmt.Fprintf(e.stdout, "%s moves; `%s streams` shows where it is.\n", id, e.self())
			return err
		},
	}
	opsFlags(c, &f)
	outputFlag(c, &output)
	c.Flags().StringVar(&to, "to", "", "worker to move to (default: the best other one)")
	_ = c.RegisterFlagCompletionFunc("to", workerNames(e, &f)) // the flag was just added
	return c
}

// asked is the answer of `kvmesh migrate -o json`: what is under way.
type asked struct {
	Stream string `json:"stream"`
	To     string `json:"to,omitempty"` // the worker that was named, "" for the best one
}

// wholeID completes the beginning of a stream's id.
func wholeID(ctx context.Context, gateway, part string) (string, error) {
	ids, err := streamIDs(ctx, gateway)
	if err != nil {
		return "", err
	}
	if slices.Contains(ids, part) {
		return part, nil
	}
	ids = slices.DeleteFunc(ids, func(id string) bool { return len(id) < len(part) || id[:len(part)] != part })
	switch len(ids) {
	case 0:
		return "", withHint(fmt.Errorf("no stream %s runs", part), "`kvmesh streams` lists them")
	case 1:
		return ids[0], nil
	}
	return "", fmt.Errorf("%d streams begin with %s: %s and others", len(ids), part, ids[0])
}

// streamIDs lists the ids of the streams that the gateway carries. They are secrets of
// their clients, so the gateway tells them on loopback only.
func streamIDs(ctx context.Context, gateway string) ([]string, error) {
	var list fleet.StreamList
	if err := get(ctx, gateway+"/v1/streams", &list); err != nil {
		return nil, withHint(err, "is the gateway up, and is this its --metrics port?")
	}
	var ids []string
	for _, s := range list.Streams {
		ids = append(ids, s.ID)
	}
	return ids, nil
}

// migrate asks the gateway to have a stream go on at another worker, that of the id to
// unless "". The error is the gateway's reason why the stream stays where it is.
func migrate(ctx context.Context, gateway, id, to string) error {
	target := gateway + "/v1/streams/" + url.PathEscape(id) + "/migrate"
	if to != "" {
		target += "?to=" + url.QueryEscape(to)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode < 300 {
		return nil
	}
	return answerError(resp)
}

// answerError is the message of an OpenAI-shaped error.
func answerError(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // only for the message
	var answer struct{ Error struct{ Message string } }
	if json.Unmarshal(body, &answer) != nil || answer.Error.Message == "" {
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	return errors.New(answer.Error.Message)
}

// streamNames completes the ids of streams.
func streamNames(e *env, f *meshFlags) cobra.CompletionFunc {
	return func(c *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		gateway, err := f.findGateway(c.Context(), e)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ids, err := streamIDs(c.Context(), gateway)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return ids, cobra.ShellCompDirectiveNoFileComp
	}
}

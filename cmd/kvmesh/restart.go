package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
)

// restartCommand makes `kvmesh restart`, which needs a `kvmesh up` in this folder: it is
// the one that starts the new process and waits for the old one.
func restartCommand(e *env) *cobra.Command {
	handover := 15 * time.Minute
	c := &cobra.Command{
		Use:   "restart gateway|envoy",
		Short: "Replace the gateway or Envoy of 'kvmesh up' without cutting a stream",
		Long: `Start a second process of the gateway or of Envoy, wait until it has taken over,
and let the first one carry its streams to their end. New requests go to the new
process from that moment on. The old gateway ends with its last stream, the old Envoy
when --handover is over; until then Envoy cannot be replaced again. This is how a new version of either comes into use:
replace the executable, then restart. Workers are restarted with 'kvmesh rollout'.`,
		Example:   "  kvmesh restart gateway\n  kvmesh restart envoy",
		ValidArgs: []string{partGateway, partEnvoy},
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		RunE: func(c *cobra.Command, args []string) error {
			m, err := lastUp(".")
			if err != nil {
				return withHint(err, "run it in the folder of `kvmesh up`; elsewhere, Envoy's own hot restart and SIGUSR2 to an old gateway do the same")
			}
			if err := order(c.Context(), filepath.Join(m.RunDir, controlSocket), "/restart/"+args[0]+"?handover="+handover.String()); err != nil {
				return fmt.Errorf("restart %s: %w", args[0], err)
			}
			_, err = fmt.Fprintf(e.stdout, "A new %s has taken over; the old one has %v for its streams.\n", args[0], handover)
			return err
		},
	}
	c.Flags().DurationVar(&handover, "handover", handover, "time that the old process has to carry its streams to their end")
	return c
}

// order has a running `kvmesh up` do something.
func order(ctx context.Context, socket, path string) error {
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}}
	defer client.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://up"+path, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode < 300 {
		return nil
	}
	return answerError(resp)
}

package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// A value that makes no sense ends the start before anything is opened, with the exit
// status of wrong usage and the flag's name.
func TestSenselessFlags(t *testing.T) {
	long := strings.Repeat("z", 254)
	worker, gateway := []string{"worker", "--engine", "sim", "--model", "m"}, []string{"gateway", "-f", "none.yaml", "--run-dir", "none"}
	for _, c := range []struct {
		start []string
		args  string
		want  string
	}{
		{worker, "--self-check -1s", "--self-check -1s: want a time of at least 0s"},
		{worker, "--drain -1s", "--drain -1s"},
		{worker, "--max-queue -1", "--max-queue -1: want a whole number from 0"},
		{worker, "--max-body 0", "--max-body 0: want a whole number from 1"},
		{worker, "--kv-block 0", "--kv-block 0: want a whole number from 1 to 512"},
		{worker, "--kv-block 513", "--kv-block 513"},
		{worker, "--kv-limit 1", "--kv-limit 1: want a whole number from 1048576"},
		{worker, "--kv-tokens -1", "--kv-tokens -1"},
		{worker, "--kv-pause-limit -1", "--kv-pause-limit -1"},
		{worker, "--context-length 0", "--context-length 0"},
		{worker, "--context-length 2", "--context-length 2: want a whole number from 8"},
		{worker, "--threads 0", "--threads 0"},
		{worker, "--sim-ttft -1ms", "--sim-ttft -1ms"},
		{worker, "--sim-itl -1ms", "--sim-itl -1ms"},
		{worker, "--zone " + long[:64], "--zone \"zzz"},
		{worker, "--zone a,b", "--zone \"a,b\""},
		{worker, "--id " + long, "--id \"zzz"},
		{worker, "--id a/b", "--id \"a/b\""},
		{worker, "--listen here", "--listen \"here\": want ip:port"},
		{worker, "--listen 127.0.0.1:70000", "--listen \"127.0.0.1:70000\""},
		{worker, "--engine llamacpp --max-num-seqs 257", "--max-num-seqs or MAX_NUM_SEQS 257"},
		{worker, "--engine llamacpp --max-num-seqs 9 --max-num-batched-tokens 8", "MAX_NUM_BATCHED_TOKENS 8"},
		{worker, "--engine llamacpp --kv-tokens 10", "--kv-tokens 10: want at least --context-length"},
		{gateway, "--drain -1s", "--drain -1s"},
		{gateway, "--handover 0s", "--handover 0s"},
		{gateway, "--zone a,b", "--zone \"a,b\""},
		{gateway, "--node " + long, "--node \"zzz"},
		{gateway, "--metrics 9090", "--metrics \"9090\": want ip:port"},
		{[]string{"controlplane", "-f", "none.yaml", "--run-dir", "none"}, "--api 9000", "--api \"9000\": want ip:port"},
		{[]string{"rollout"}, "--max-error-rate NaN", "--max-error-rate NaN: want a share from 0 to 1"},
		{[]string{"rollout"}, "--max-error-rate -1", "--max-error-rate -1"},
		{[]string{"rollout"}, "--max-error-rate 1.1", "--max-error-rate 1.1"},
		{[]string{"rollout"}, "--ready-timeout 0", "--ready-timeout 0s: want a time of at least 1ms"},
		{[]string{"rollout"}, "--timeout 0", "--timeout 0s"},
		{[]string{"rollout"}, "--observe -1s", "--observe -1s"},
		{[]string{"rollout"}, "--min-ready -1", "--min-ready -1: want a whole number from 0"},
		{[]string{"drain", "w"}, "--timeout 0", "--timeout 0s: want a time of at least 1ms"},
		{[]string{"drain", "w"}, "--timeout -1s", "--timeout -1s"},
		{[]string{"up", "-f", "none.yaml"}, "--ready-timeout -1s", "--ready-timeout -1s"},
	} {
		e := &env{getenv: environment(), stdout: new(strings.Builder), stderr: new(strings.Builder)}
		make := map[string]func(*env) *cobra.Command{"worker": workerCommand, "gateway": gatewayCommand, "controlplane": controlPlaneCommand, "up": upCommand, "rollout": rolloutCommand, "drain": drainCommand}
		cmd := make[c.start[0]](e)
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(append(c.start[1:], strings.Fields(c.args)...))
		err := cmd.ExecuteContext(t.Context())
		if _, usage := errors.AsType[usageError](err); !usage && err != nil && strings.Contains(err.Error(), "--") {
			t.Errorf("%s %s: %v is no usage error", c.start[0], c.args, err)
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s: %v, want %s", c.start[0], c.args, err, c.want)
		}
	}
}

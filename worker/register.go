package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
)

// Times between two tries while the control plane does not answer.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = time.Second
)

// patience is for how long nobody may answer after the start: both are started
// together, and a control plane that is not up yet is no news.
const patience = 5 * time.Second

// registrar keeps the worker's registration at the control plane alive. It never
// holds up the service: while the control plane is away it goes on trying.
type registrar struct {
	url     string
	client  *http.Client
	log     *slog.Logger
	current func() fleet.Registration
	changed <-chan struct{} // the state changed: renew at once
	ended   chan struct{}   // closed when run has returned
}

// run renews the registration until ctx ends.
func (r *registrar) run(ctx context.Context) {
	defer close(r.ended)
	retry := firstRetry
	wrong := "" // last complaint, to log each once
	known, began := false, time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.changed:
		case <-timer.C:
		}
		wait, err := r.put(ctx)
		switch {
		case err == nil:
			if wrong != "" {
				r.log.Info("registered again")
			}
			retry, wrong, known = firstRetry, "", true
		case ctx.Err() != nil:
			return
		default:
			_, absent := errors.AsType[*url.Error](err)
			early := absent && !known && time.Since(began) < patience
			if wrong != err.Error() && !early {
				wrong = err.Error()
				r.log.Warn("the control plane does not take the registration", "err", err)
			}
			wait, retry = retry, min(2*retry, lastRetry)
		}
		timer.Reset(wait)
	}
}

// put sends the registration and returns when to send the next one.
func (r *registrar) put(ctx context.Context) (time.Duration, error) {
	reg := r.current()
	body, err := json.Marshal(reg)
	if err != nil {
		return 0, fmt.Errorf("encode the registration: %w", err)
	}
	answer, err := r.do(ctx, http.MethodPut, r.target(reg), body)
	if err != nil {
		return 0, err
	}
	var lease fleet.Lease
	if json.Unmarshal(answer, &lease) == nil && lease.TTLSeconds > 0 {
		third := time.Duration(lease.TTLSeconds / 3 * float64(time.Second))
		return min(fleet.Heartbeat, max(third, firstRetry)), nil
	}
	return fleet.Heartbeat, nil
}

// signOff waits for run to return and takes the registration back. A later start
// of the same worker keeps its own, because the incarnation is named.
func (r *registrar) signOff() {
	<-r.ended
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	reg := r.current()
	target := r.target(reg) + "?incarnation=" + strconv.FormatUint(reg.Incarnation, 10)
	if _, err := r.do(ctx, http.MethodDelete, target, nil); err != nil {
		r.log.Info("could not sign off; the registration will expire", "err", err)
	}
}

// target is the registration's URL; ids may hold characters that need escaping.
func (r *registrar) target(reg fleet.Registration) string {
	return strings.TrimRight(r.url, "/") + "/v1/workers/" + url.PathEscape(reg.ID)
}

// do sends one request and returns the body of a 2xx answer, of at most 64 KiB.
func (r *registrar) do(ctx context.Context, method, target string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, target, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%s registration: %w", method, err)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, target, err)
	}
	if resp.StatusCode/100 != 2 {
		return nil, fmt.Errorf("%s %s: status %d: %.200s", method, target, resp.StatusCode, answer)
	}
	return answer, nil
}

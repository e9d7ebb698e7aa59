package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// maxAnswer bounds what a Client reads of one answer.
const maxAnswer = 64 << 20

// Client reads the control plane's HTTP API. It is safe for concurrent use.
type Client struct {
	base string // without a slash at the end
	http *http.Client
}

// NewClient makes a Client of the API at base, for example http://127.0.0.1:9000.
func NewClient(base string) *Client {
	return &Client{base: strings.TrimRight(base, "/"), http: &http.Client{Timeout: 10 * time.Second}}
}

// APIError is an answer of the API that is no success.
type APIError struct {
	Status  int    // HTTP status
	Message string // for people
}

// Error returns the message with its status.
func (e *APIError) Error() string { return fmt.Sprintf("control plane: %d: %s", e.Status, e.Message) }

// Workers lists the workers the control plane knows, sorted by id.
func (c *Client) Workers(ctx context.Context) ([]WorkerView, error) {
	var out WorkerList
	if err := c.call(ctx, http.MethodGet, "/v1/workers", &out); err != nil {
		return nil, fmt.Errorf("list workers: %w", err)
	}
	return out.Workers, nil
}

// Clusters lists the pool clusters with the endpoints Envoy should have, sorted
// by name.
func (c *Client) Clusters(ctx context.Context) ([]ClusterView, error) {
	var out ClusterList
	if err := c.call(ctx, http.MethodGet, "/v1/clusters", &out); err != nil {
		return nil, fmt.Errorf("list clusters: %w", err)
	}
	return out.Clusters, nil
}

// Mesh says where the other parts of the mesh are.
func (c *Client) Mesh(ctx context.Context) (MeshView, error) {
	var out MeshView
	if err := c.call(ctx, http.MethodGet, "/v1/mesh", &out); err != nil {
		return out, fmt.Errorf("find the mesh: %w", err)
	}
	return out, nil
}

// Drain sets or lifts the drain of one worker. When it returns nil the control
// plane has stored it: it survives the control plane's own death.
func (c *Client) Drain(ctx context.Context, id string, on bool) error {
	// The id is one path segment, whatever characters it has.
	method, what := http.MethodPost, "drain"
	if !on {
		method, what = http.MethodDelete, "undrain"
	}
	if err := c.call(ctx, method, "/v1/workers/"+url.PathEscape(id)+"/drain", nil); err != nil {
		return fmt.Errorf("%s %s: %w", what, id, err)
	}
	return nil
}

// DrainKeeping is Drain whose running streams end at the worker instead of moving.
func (c *Client) DrainKeeping(ctx context.Context, id string) error {
	if err := c.call(ctx, http.MethodPost, "/v1/workers/"+url.PathEscape(id)+"/drain?"+ParamStreams+"="+StreamsKeep, nil); err != nil {
		return fmt.Errorf("drain %s: %w", id, err)
	}
	return nil
}

// LeasePool takes or renews the right to replace workers of a pool, which one owner has
// at a time, for TTL. The error matches ErrLeased while another has it.
func (c *Client) LeasePool(ctx context.Context, pool, owner string) error {
	err := c.call(ctx, http.MethodPut, leasePath(pool, owner), nil)
	if e, ok := errors.AsType[*APIError](err); ok && e.Status == http.StatusConflict {
		return fmt.Errorf("%w: %s", ErrLeased, e.Message)
	}
	if err != nil {
		return fmt.Errorf("take pool %s for a rollout: %w", pool, err)
	}
	return nil
}

// ReleasePool gives back what LeasePool took. Nothing happens where another has it.
func (c *Client) ReleasePool(ctx context.Context, pool, owner string) error {
	if err := c.call(ctx, http.MethodDelete, leasePath(pool, owner), nil); err != nil {
		return fmt.Errorf("give pool %s back: %w", pool, err)
	}
	return nil
}

func leasePath(pool, owner string) string {
	return "/v1/pools/" + url.PathEscape(pool) + "/rollout?" + ParamOwner + "=" + url.QueryEscape(owner)
}

// call makes one request and decodes a successful answer into out unless nil.
func (c *Client) call(ctx context.Context, method, path string, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, nil)
	if err != nil {
		return err
	}
	res, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	// The API never redirects, so anything but 2xx is an error.
	if res.StatusCode >= 300 {
		return apiError(res.StatusCode, raw)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	return nil
}

// apiError takes the message out of an OpenAI-shaped body, if it is one.
func apiError(status int, raw []byte) error {
	var body struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	_ = json.Unmarshal(raw, &body) // another server's page: the status has to do
	return &APIError{Status: status, Message: cmp.Or(body.Error.Message, http.StatusText(status))}
}

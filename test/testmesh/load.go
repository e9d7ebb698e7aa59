package testmesh

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// Result is one request of a Load.
type Result struct {
	Start time.Time
	Took  time.Duration
	Err   error // nil = status 200 and a whole body
}

// Request is what a Load sends; N counts the requests from 0.
type Request struct {
	Model  string
	Header map[string]string
	Stream bool
}

// Load sends completions at a steady rate, whether or not earlier ones have been
// answered, and keeps what came of them.
type Load struct {
	cancel  context.CancelFunc
	done    chan struct{}
	mu      sync.Mutex
	results []Result
}

// StartLoad sends perSecond requests a second made by next until Stop.
func (m *Mesh) StartLoad(perSecond int, next func(n int) Request) *Load {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{cancel: cancel, done: make(chan struct{})}
	client := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		MaxIdleConnsPerHost: 256,
		DialContext:         (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
	}}
	go func() {
		defer close(l.done)
		defer client.CloseIdleConnections()
		var wg sync.WaitGroup
		defer wg.Wait()
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			wg.Go(func() { l.add(m.one(client, next(n))) })
		}
	}()
	return l
}

func (m *Mesh) one(client *http.Client, r Request) Result {
	res := Result{Start: time.Now()}
	body := fmt.Sprintf(`{"model":%q,"prompt":"hello","max_tokens":3,"stream":%v,"sim":{"ttft_ms":5,"itl_ms":5}}`, r.Model, r.Stream)
	req, err := http.NewRequest(http.MethodPost, m.OpenAI+"/completions", strings.NewReader(body))
	if err != nil {
		res.Err = err
		return res
	}
	req.Header.Set("Content-Type", "application/json")
	for k, v := range r.Header {
		req.Header.Set(k, v)
	}
	resp, err := client.Do(req)
	if err == nil {
		var text []byte
		text, err = io.ReadAll(resp.Body)
		_ = resp.Body.Close() // read to its end
		switch {
		case err != nil:
		case resp.StatusCode != http.StatusOK:
			err = fmt.Errorf("status %d: %.300s", resp.StatusCode, text)
		case r.Stream && !strings.Contains(string(text), "[DONE]"):
			err = fmt.Errorf("stream without [DONE]: %.300s", text)
		case !strings.Contains(string(text), `"finish_reason":"length"`):
			err = fmt.Errorf("answer without its end: %.300s", text)
		}
	}
	res.Err, res.Took = err, time.Since(res.Start)
	return res
}

func (l *Load) add(r Result) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.results = append(l.results, r)
}

// Stop ends the load, waits for its requests and returns all results.
func (l *Load) Stop() []Result {
	l.cancel()
	<-l.done
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.results
}

// Failures returns those of the results that started in [from, to) and failed,
// and how many started there at all.
func Failures(results []Result, from, to time.Time) (failed []Result, total int) {
	for _, r := range results {
		if r.Start.Before(from) || !r.Start.Before(to) {
			continue
		}
		total++
		if r.Err != nil {
			failed = append(failed, r)
		}
	}
	return failed, total
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/names"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// heard is an answer as a client got it.
type heard struct {
	stream string      // its id
	tokens []string    // the text of each token; where one event has several, the first has it all
	times  []time.Time // when each came
	ids    []string    // of the tokens, as far as the server tells them
	worker string      // of the first byte
	moves  []fleet.MoveView
	failed string // the error event that ended it, or how it broke off
}

// mostDrill is how long one answer of a drill may take.
const mostDrill = 5 * time.Minute

// ask streams one completion. after, unless nil, is called once with what was heard so
// far when o.at tokens have come.
func (d *driller) ask(ctx context.Context, o drillOptions, after func(context.Context, *heard) error) (*heard, error) {
	body, err := json.Marshal(map[string]any{"model": o.model, "prompt": o.prompt, "max_tokens": o.tokens, "temperature": 0, "stream": true, "return_token_ids": true})
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, mostDrill)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.mesh.OpenAI+"/completions", bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // only for the message
		return nil, fmt.Errorf("request: status %d: %s", resp.StatusCode, text)
	}
	h := &heard{worker: resp.Header.Get(names.Worker)}
	events := openai.NewEventReader(resp.Body, 1<<20)
	for {
		ev, err := events.Next()
		switch {
		case err != nil:
			h.failed = "the connection broke: " + err.Error()
			return h, ctx.Err()
		case ev.Done():
			return h, nil
		case ev.Data == nil:
			continue
		}
		if err := h.take(ev); err != nil {
			return h, nil
		}
		if after != nil && len(h.tokens) >= o.at {
			if err := after(ctx, h); err != nil {
				return nil, err
			}
			after = nil
			defer d.follow(ctx, h)()
		}
	}
}

// errEvent is the end of an answer by an error event.
var errEvent = errors.New("error event")

// take notes one event.
func (h *heard) take(ev openai.Event) error {
	var chunk struct {
		Choices []struct {
			Text string
			IDs  []int64 `json:"token_ids"`
		}
		Error *struct{ Message string }
	}
	if err := json.Unmarshal(ev.Data, &chunk); err != nil {
		h.failed = "an event is no JSON: " + err.Error()
		return errEvent
	}
	if chunk.Error != nil {
		h.failed = chunk.Error.Message
		return errEvent
	}
	if h.stream == "" {
		id, _, _ := strings.Cut(string(ev.ID), ":")
		h.stream = id
	}
	for _, c := range chunk.Choices {
		h.hear(c.Text, c.IDs)
	}
	return nil
}

// hear notes the tokens of one event. Without their ids a text is one token; with them, a
// token may have no text of its own, as the first half of a character.
func (h *heard) hear(text string, ids []int64) {
	n := len(ids)
	if n == 0 && text != "" {
		n = 1
	}
	for i := range n {
		h.tokens, h.times = append(h.tokens, text), append(h.times, time.Now())
		if text = ""; len(ids) > 0 {
			h.ids = append(h.ids, strconv.FormatInt(ids[i], 10))
		}
	}
}

// told is what tells the tokens apart: their ids where the server told all of them, else
// their texts.
func (h *heard) told() []string {
	if len(h.ids) == len(h.tokens) {
		return h.ids
	}
	return h.tokens
}

// follow watches the answer's moves at the gateway until it is told to stop; h.moves
// holds them then. The last answer that knew the stream counts.
func (d *driller) follow(ctx context.Context, h *heard) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	id, moves := h.stream, make(chan []fleet.MoveView, 1)
	go func() {
		var last []fleet.MoveView
		for ctx.Err() == nil {
			if v, ok := d.look(ctx, id); ok {
				last = v.Moves
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
		moves <- last
	}()
	return func() {
		cancel()
		h.moves = <-moves
	}
}

// look is what the gateway says of one stream.
func (d *driller) look(ctx context.Context, id string) (fleet.StreamView, bool) {
	var list fleet.StreamList
	if get(ctx, d.mesh.Gateway+"/v1/streams", &list) != nil {
		return fleet.StreamView{}, false // it is asked again
	}
	i := slices.IndexFunc(list.Streams, func(v fleet.StreamView) bool { return v.ID == id })
	if i < 0 {
		return fleet.StreamView{}, false
	}
	return list.Streams[i], true
}

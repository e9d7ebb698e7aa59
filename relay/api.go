package relay

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/internal/fleet"
	"github.com/kvmesh/kvmesh/internal/openai"
)

// StreamsHandler serves the operators' view of what runs:
//
//	GET  /v1/streams                           fleet.StreamList
//	POST /v1/streams/{id}/migrate[?to=WORKER]  204: the answer is to go on elsewhere
//
// A migration is asked for and not waited for: the list shows the worker and the moves.
// It answers 404 for a stream that does not run here, and 409 with the reason for one
// that cannot go on elsewhere or not at that worker. Stream ids are secrets of their
// clients: keep it on loopback.
//
// What gateways still carry that this one has replaced is part of it.
func (r *Relay) StreamsHandler() http.Handler { return streamsHandler(r.list, r.migrateAnywhere) }

func streamsHandler(list func(context.Context) fleet.StreamList, migrate func(ctx context.Context, stream, to string) *openai.Error) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/streams", func(w http.ResponseWriter, in *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list(in.Context())) // the caller may be gone
	})
	mux.HandleFunc("POST /v1/streams/{id}/migrate", func(w http.ResponseWriter, in *http.Request) {
		if err := migrate(in.Context(), in.PathValue("id"), in.URL.Query().Get("to")); err != nil {
			err.Write(w)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

// own lists what this process carries, and what it knows of those that have ended.
func (r *Relay) own(context.Context) fleet.StreamList {
	now := time.Now()
	out := fleet.StreamList{Gateways: []string{r.name}, Streams: r.Streams(now), Attempts: r.Attempts()}
	r.old.tell(now, &out)
	return out
}

// migrate has an answer of this process go on at another worker: that of the id to, or the
// best one for "".
func (r *Relay) migrate(ctx context.Context, stream, to string) *openai.Error {
	j := r.live.find(stream)
	if j == nil {
		return openai.Errorf(http.StatusNotFound, "No stream of that id runs here.")
	}
	answer := make(chan string, 1)
	why := leaving{cause: causeMigrate, to: to, answer: answer}
	if !j.ask(why) {
		return openai.Errorf(http.StatusConflict, "The stream has too much to do at the moment. Please try again.")
	}
	select {
	case no := <-answer:
		if no != "" {
			return openai.Errorf(http.StatusConflict, "The stream stays where it is: %s.", no)
		}
		return nil
	case <-ctx.Done(): // nobody waits for it any more
		return openai.Unavailable(time.Second, "The stream does not answer. Please look where it is.")
	case <-j.ctx.Done():
		return openai.Errorf(http.StatusNotFound, "The stream has ended.")
	}
}

package extproc

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/kvmesh/kvmesh/extproc/picker"
)

// Health is the body of the gateway's GET /health.
type Health struct {
	// Status is "ok", or "starting" while no fleet was received yet.
	Status string `json:"status"`
	// Active is the number of workers that take new requests.
	Active int `json:"active"`
	// Workers lists every worker by id with its zone and load.
	Workers []picker.View `json:"workers"`
}

// AdminHandler serves the gateway's own pages: GET /health, 200 once a fleet was
// received and 503 before, and GET /metrics.
func AdminHandler(p *picker.Picker, g prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) {
		h := Health{Status: "ok", Workers: p.Workers(time.Now())}
		for _, v := range h.Workers {
			if v.Active {
				h.Active++
			}
		}
		code := http.StatusOK
		if !p.Known() {
			h.Status, h.Workers, code = "starting", []picker.View{}, http.StatusServiceUnavailable
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(h) // the caller may be gone
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(g, promhttp.HandlerOpts{}))
	return mux
}

package relay

import (
	"testing"

	"github.com/kvmesh/kvmesh/internal/openai"
)

// BenchmarkSplice is what the ledger costs per token: reading the event, counting it,
// taking the relay's own out, and giving it an id.
func BenchmarkSplice(b *testing.B) {
	for name, s := range map[string]*splicer{"first": {}, "later": {later: true, resumed: true, started: []bool{true}}} {
		data := []byte(`{"id":"cmpl-UFCLIUMNLW4VMVSQ5MQO4Q2E6C","object":"text_completion","created":1795982664,"model":"gemma-3-270m","system_fingerprint":"f1-6693b6c9",` +
			`"choices":[{"token_ids":[2364],"index":0,"text":" the","logprobs":null,"finish_reason":null}]}`)
		b.Run(name, func(b *testing.B) {
			j := &job{led: ledger{stream: "tkl_sQysLJto4XQhRBEbzA"}}
			if s.later {
				spliceAll(b, &splicer{}, &j.led, `{"id":"cmpl-1","object":"text_completion","created":1,"model":"gemma-3-270m","system_fingerprint":"f1-6693b6c9","choices":[{"index":0,"text":"x"}]}`)
			}
			ev := openai.Event{Data: data}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.scan(ev.Data); err != nil {
					b.Fatal(err)
				}
				got, err := s.splice(&j.led, ev.Data)
				if err != nil {
					b.Fatal(err)
				}
				j.led.events++
				j.frame(ev, got.data)
				if len(j.led.choices[0].ids) > 4096 {
					j.led.choices[0].ids = j.led.choices[0].ids[:1]
				}
			}
		})
	}
}

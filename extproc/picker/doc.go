// Package picker chooses tier and worker of a request. It is shared by ext_proc,
// which names the candidates, and the relay, which tries them.
//
// A Picker holds an immutable snapshot of the fleet, swapped whole by Update, and
// beside it what only this gateway knows: how many of its requests each worker
// carries, and which workers failed lately (the breaker). Pick reads both and
// changes neither, so the same call explains a choice and makes it; Choose also
// notes the choice, so that a burst does not land on one worker.
//
// Health, weight, drain and incarnation are the control plane's; the picker adds
// nothing to them. The order of candidates is, first to last:
//
//	healthy workers of the gateway's own zone that have room
//	other healthy workers
//	DEGRADED workers
//	full workers, at which one more request would wait
//	workers behind an open breaker
//
// and within each line by estimated load over capacity and weight; those about as
// good as the first take turns. Where breakers would leave out more than half of a pool, only
// those of workers at which nobody listens count: whoever gets everything would break, too. There a worker with a free sequence that holds the KV of
// the prompt's beginning counts as less loaded, by the share of the work that it is spared, as
// Config.Held tells. A session's worker goes before all of them while it has a free sequence.
package picker
